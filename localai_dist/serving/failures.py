"""A failed call on a backend, as the exception that serving raises for it."""

from __future__ import annotations

from localai_dist.grpcclient.status import Origin, RpcError, StatusCode
from localai_dist.grpcclient.verdict import outcome_of
from localai_dist.reach import Unreached
from localai_dist.serving.errors import RequestRefused

_CLIENTS_FAULT = (StatusCode.INVALID_ARGUMENT, StatusCode.OUT_OF_RANGE)


def failure_of(error: RpcError) -> Unreached | RequestRefused:
    """``RequestRefused`` when the backend found the request invalid or can't do such a thing, else the outcome."""
    if error.origin is Origin.BACKEND and error.status is StatusCode.UNIMPLEMENTED:
        return RequestRefused("this model's backend can't do that: ask a model that is made for it")
    if error.origin is Origin.BACKEND and error.status in _CLIENTS_FAULT:
        return RequestRefused(error.details or "the backend refused the request without saying why")
    return Unreached(outcome_of(error))
