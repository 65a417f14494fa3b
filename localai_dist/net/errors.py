"""
What can go wrong between two ends of a connection.

::

    NetError
    ├── DialFailed        no connection, or no HTTP answer
    ├── DialRefused       an HTTP answer instead of the upgrade
    ├── HandshakeLate     an opening frame did not come in time
    └── StreamEnded       the stream ended before a whole opening frame
    SessionLost           mux.errors.SessionDead, and a Twisted ConnectionLost: how a dead session ends its streams
    ├── SessionSilent     nothing was received for too long
    └── SessionClosedHere this end closed it on purpose
    StreamCutShort        mux.errors.StreamReset, and a Twisted ConnectionLost: how a reset ends a stream
"""

from __future__ import annotations

from collections.abc import Mapping

from twisted.internet.error import ConnectionLost

from localai_dist.errors import LocalAIDistError
from localai_dist.mux.errors import KeepaliveTimeout, SessionDead, StreamReset


class NetError(LocalAIDistError):
    """Anything this folder raises on purpose."""


class DialFailed(NetError):
    """No connection to the address, or what answered there does not speak HTTP; the text names address and cause."""


class DialRefused(NetError):
    """
    The address answered with HTTP and did not upgrade.

    Attributes:
        status: the HTTP status.
        headers: the answer's headers, names in lower case.
    """

    def __init__(self, status: int, headers: Mapping[str, str], text: str) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


class HandshakeLate(NetError):
    """An opening frame did not come in time."""


class StreamEnded(NetError):
    """The stream ended before a whole opening frame was there."""


class SessionLost(SessionDead, ConnectionLost):
    """The session died under a stream."""

    def __str__(self) -> str:
        """The cause alone, without Twisted's preamble."""
        return " ".join(map(str, self.args))


class SessionSilent(KeepaliveTimeout, SessionLost):
    """The session died because nothing was received for too long."""


class SessionClosedHere(SessionLost):
    """This end closed the session; for its streams a death like any other, for a splice a plain shutdown."""


class StreamCutShort(StreamReset, ConnectionLost):
    """The stream was reset."""

    def __str__(self) -> str:
        """The cause alone, without Twisted's preamble."""
        return " ".join(map(str, self.args))


def as_lost(reason: Exception) -> Exception:
    """``reason`` as what streams are told: always session death, with the cause kept."""
    if isinstance(reason, SessionLost):
        return reason
    lost = SessionLost(str(reason) or type(reason).__name__)
    lost.__cause__ = reason
    return lost
