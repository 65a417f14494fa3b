"""Which failures of an upload pass by themselves."""

from __future__ import annotations

from twisted.internet.defer import CancelledError
from twisted.internet.error import ConnectError, ConnectionClosed, TimeoutError

from localai_dist.mux.errors import MuxError
from localai_dist.net.errors import NetError
from localai_dist.reach import DeadlineExceeded, Retry, Unreached, may_retry
from localai_dist.staging.errors import StagingError


class Later(StagingError):
    """The worker answered that it can't now; the text is its own."""


WAY_FAILURES: tuple[type[Exception], ...] = (
    CancelledError,  # of one request; whether the whole load was cancelled is the hold's to say
    ConnectError,
    ConnectionClosed,
    Later,
    MuxError,
    NetError,
    TimeoutError,
    Unreached,
)
"""What a request to a node may raise besides the errors of the source file."""


def passes(error: Exception) -> bool:
    """Whether the same request may succeed later: the way broke, and no answer of anybody forbids it."""
    if isinstance(error, Unreached):
        return may_retry(error.outcome) is not Retry.NEVER or isinstance(error.outcome, DeadlineExceeded)
    return isinstance(error, WAY_FAILURES)
