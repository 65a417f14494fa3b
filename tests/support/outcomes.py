"""Every outcome of trying to reach a node, and what design §2's table says about each: written down, not computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from localai_dist.reach import (
    Answer,
    Answered,
    Cancelled,
    DeadlineExceeded,
    NoRoute,
    NotServed,
    Outcome,
    PeerUnreachable,
    Reconnecting,
    Refused,
    RegistryUnknown,
    VerbNotServed,
)


@dataclass(frozen=True)
class Says:
    """
    One line of the table.

    Attributes:
        outcome: with node ``t`` where it names one.
        reap: the row of the replica that was asked may go.
        demote: the node may be marked unhealthy.
        status, code, retry_after: what an HTTP client sees; ``retry_after`` only says whether the header is there.
        waits: whether a request waits the route wait before it says so.
    """

    outcome: Outcome
    reap: bool = False
    demote: bool = False
    status: int = 500
    code: str = "worker_error"
    retry_after: bool = False
    waits: bool = False


NODE = "t"

TABLE: tuple[Says, ...] = (
    Says(Answered(Answer.SUCCESS)),
    Says(Answered(Answer.ERROR, "out of memory")),
    Says(Answered(Answer.BACKEND_UNAVAILABLE, "connection refused"), reap=True),
    Says(Answered(Answer.MODEL_NOT_LOADED, "model not loaded"), reap=True),
    Says(Answered(Answer.PROCESS_ABSENT, "no such process"), reap=True),
    Says(Refused("unknown-tag", "what is grpc?"), status=502, code="worker_refused"),
    Says(Refused("bad-request", "no port"), status=502, code="worker_refused"),
    Says(NotServed("the stream ended"), status=503, code="worker_unavailable", retry_after=True),
    Says(VerbNotServed("/v1/control/new"), status=501, code="verb_not_served"),
    Says(NoRoute(NODE, departed=False), status=503, code="no_route", retry_after=True),
    Says(NoRoute(NODE, departed=True), reap=True, demote=True, status=503, code="no_route", retry_after=True),
    Says(Reconnecting(NODE, 3.0), status=503, code="worker_reconnecting", retry_after=True, waits=True),
    Says(PeerUnreachable("there", "refused"), status=503, code="peer_unreachable", retry_after=True, waits=True),
    Says(PeerUnreachable("there", "401", True), status=503, code="peer_unreachable", retry_after=True, waits=True),
    Says(RegistryUnknown("away"), status=503, code="registry_unavailable", retry_after=True, waits=True),
    Says(DeadlineExceeded(), status=504, code="deadline_exceeded"),
    Says(Cancelled(), status=499, code="cancelled"),
)

assert {type(says.outcome) for says in TABLE} == set(get_args(Outcome)), "an outcome has no line in the table"
assert {says.outcome.answer for says in TABLE if isinstance(says.outcome, Answered)} == set(Answer)
