"""gRPC statuses: the codes, the error that carries one, and how HTTP/2 speaks of them (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Final
from urllib.parse import unquote

from localai_dist.errors import LocalAIDistError

_DETAILS_LIMIT: Final = 8192


class StatusCode(IntEnum):
    """The codes of gRPC, by number."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Origin(Enum):
    """
    Who says so: the backend's own bytes, this side (its deadline, its cancel, its limits), or the lost connection.

    Only a backend's own word may ever be acted upon; a lost connection is a fact about nothing.
    """

    BACKEND = "backend"
    CALLER = "caller"
    TRANSPORT = "transport"


class RpcError(LocalAIDistError):
    """
    A call that did not end with OK.

    Attributes:
        status: the gRPC code.
        details: the text that goes with it, as the backend said it.
        origin: whose word it is.
    """

    def __init__(self, status: StatusCode, details: str, origin: Origin = Origin.BACKEND) -> None:
        super().__init__(f"{status.name}: {details}" if details else status.name)
        self.status: Final = status
        self.details: Final = details
        self.origin: Final = origin


_OF_RESET: Final[Mapping[int, StatusCode]] = {
    0x7: StatusCode.UNAVAILABLE,  # REFUSED_STREAM: not processed
    0x8: StatusCode.CANCELLED,
    0xB: StatusCode.RESOURCE_EXHAUSTED,  # ENHANCE_YOUR_CALM
    0xC: StatusCode.PERMISSION_DENIED,  # INADEQUATE_SECURITY
}

_OF_HTTP: Final[Mapping[str, StatusCode]] = {
    "400": StatusCode.INTERNAL,
    "401": StatusCode.UNAUTHENTICATED,
    "403": StatusCode.PERMISSION_DENIED,
    "404": StatusCode.UNIMPLEMENTED,
    "429": StatusCode.UNAVAILABLE,
    "502": StatusCode.UNAVAILABLE,
    "503": StatusCode.UNAVAILABLE,
    "504": StatusCode.UNAVAILABLE,
}


def error_of_reset(code: int) -> RpcError:
    """
    The error an RST_STREAM stands for.

    Source: gRPC over HTTP/2, "HTTP2 Transport Mapping, Errors".
    """
    return RpcError(_OF_RESET.get(code, StatusCode.INTERNAL), f"the backend reset the call (HTTP/2 error {code})")


def error_of_http(status: str) -> RpcError:
    """The error an HTTP answer that is no gRPC answer stands for."""
    return RpcError(_OF_HTTP.get(status, StatusCode.UNKNOWN), f"HTTP status {status} instead of a gRPC answer")


def error_of_trailers(trailers: Mapping[str, str]) -> RpcError | None:
    """The error in a call's trailers, or None when they say OK; trailers without a readable status are UNKNOWN."""
    text = trailers.get("grpc-status")
    if text is None:
        return RpcError(StatusCode.UNKNOWN, "the call ended without a grpc-status")
    try:
        status = StatusCode(int(text))
    except ValueError:
        return RpcError(StatusCode.UNKNOWN, f"unknown grpc-status {text[:16]!r}")
    if status is StatusCode.OK:
        return None
    return RpcError(status, unquote(trailers.get("grpc-message", ""), errors="replace")[:_DETAILS_LIMIT])
