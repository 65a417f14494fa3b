"""What a failed call says about the replica that was asked (pure)."""

from __future__ import annotations

from typing import assert_never

from localai_dist.grpcclient.status import Origin, RpcError, StatusCode
from localai_dist.reach import Answer, Answered, Cancelled, DeadlineExceeded, NotServed, Outcome

_NOT_LOADED_TEXTS = ("model not loaded", "wrong model loaded")


def answer_of(error: RpcError) -> Answer:
    """
    What the backend's own answer said.

    An error that is not the backend's word (a lost connection, our deadline, our limits) is a plain ERROR: it must
    never let a row be reaped. Use ``outcome_of`` to tell those apart.

    Source: surface §4.4 (identity guard: status and text are both needed), internals §3 ("model not loaded" or "wrong
    model loaded" drop the row, other errors never).
    """
    if error.origin is not Origin.BACKEND:
        return Answer.ERROR
    text = error.details.lower()
    if error.status is StatusCode.NOT_FOUND and "model identity mismatch" in text:
        return Answer.MODEL_NOT_LOADED
    if error.status is StatusCode.FAILED_PRECONDITION and "not loaded" in text:
        return Answer.MODEL_NOT_LOADED
    if error.status is StatusCode.UNKNOWN and any(said in text for said in _NOT_LOADED_TEXTS):
        return Answer.MODEL_NOT_LOADED
    if error.status is StatusCode.UNAVAILABLE:
        return Answer.BACKEND_UNAVAILABLE
    return Answer.ERROR


def outcome_of(error: RpcError) -> Outcome:
    """
    The failed call as one of the outcomes of reaching a node.

    A lost connection is ``NotServed``: nothing is known, the caller asks the registry and may try once on a fresh
    stream.
    """
    match error.origin:
        case Origin.BACKEND:
            return Answered(answer_of(error), str(error))
        case Origin.TRANSPORT:
            return NotServed(error.details)
        case Origin.CALLER:
            if error.status is StatusCode.DEADLINE_EXCEEDED:
                return DeadlineExceeded()
            if error.status is StatusCode.CANCELLED:
                return Cancelled()
            return Answered(Answer.ERROR, str(error))
        case _:
            assert_never(error.origin)
