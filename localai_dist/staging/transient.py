"""Which failures of an upload pass by themselves."""

from __future__ import annotations

from twisted.internet.defer import CancelledError
from twisted.internet.error import ConnectError, ConnectionClosed, TimeoutError
from twisted.web.client import (
    RequestGenerationFailed,
    RequestTransmissionFailed,
    ResponseFailed,
    ResponseNeverReceived,
)

from localai_dist.mux.errors import MuxError
from localai_dist.net.errors import NetError
from localai_dist.reach import DeadlineExceeded, Retry, Unreached, may_retry
from localai_dist.staging.errors import StagingError


class Later(StagingError):
    """The worker answered that it can't now; the text is its own."""


_OF_THE_WAY = (
    Later,
    CancelledError,  # of a request whose own deadline passed; a cancelled load is seen by the hold's check
    ConnectError,
    ConnectionClosed,
    MuxError,
    NetError,
    RequestTransmissionFailed,
    ResponseFailed,
    ResponseNeverReceived,
    TimeoutError,
)
WAY_FAILURES: tuple[type[Exception], ...] = (Unreached, RequestGenerationFailed, *_OF_THE_WAY)
"""What a request to a node may raise besides the errors of the source file."""


def passes(error: Exception) -> bool:
    """Whether the same request may succeed later: the way broke, and no answer of anybody forbids it."""
    if isinstance(error, Unreached):
        return may_retry(error.outcome) is not Retry.NEVER or isinstance(error.outcome, DeadlineExceeded)
    return isinstance(error, _OF_THE_WAY)


def source_trouble(error: Exception) -> StagingError | None:
    """The source file's own error, if that is why a request's body could not be written."""
    if isinstance(error, RequestGenerationFailed):
        for reason in error.reasons:
            if isinstance(reason.value, StagingError):
                return reason.value
    return None


def cause_of(error: Exception) -> str:
    """What broke, in words; Twisted's wrappers say little themselves."""
    reasons = getattr(error, "reasons", None)
    if reasons:
        return cause_of(reasons[-1].value)
    return str(error) or type(error).__name__
