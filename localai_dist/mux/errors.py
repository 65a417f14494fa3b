"""
What can go wrong in a session, and whose fault it is.

::

    MuxError
    ├── LocalProtocolError      our own caller broke a rule; nothing was sent
    │   ├── TooManyStreams      the bound on concurrent streams is reached
    │   ├── StreamIdsExhausted  2**32 ids are used up; a new session is needed
    │   └── SessionClosing      a go-away was sent or received: no new streams
    ├── RemoteProtocolError     the peer broke a rule; carries the go-away code that tells it so
    │   ├── BadVersion, BadFrameType, BadStreamId, FrameTooLong, WindowOverflow
    │   └── StreamViolation     costs the peer that stream only, not the session
    ├── SessionDead             the session ended under its streams; never a clean end
    │   └── KeepaliveTimeout    because nothing was received for too long
    └── StreamReset             one stream was cut, by the peer (``remote``) or here
"""

from __future__ import annotations

from localai_dist.errors import LocalAIDistError
from localai_dist.mux.frame import GoAway


class MuxError(LocalAIDistError):
    """Anything a session raises on purpose."""


class LocalProtocolError(MuxError):
    """Our own caller broke a rule."""


class TooManyStreams(LocalProtocolError):
    """The bound on concurrent streams of this session is reached."""


class StreamIdsExhausted(LocalProtocolError):
    """Every stream id of this end was used once; open a new session."""


class SessionClosing(LocalProtocolError):
    """A go-away was sent or received, so no new stream may be opened."""


class RemoteProtocolError(MuxError):
    """
    The peer broke a rule of the wire.

    Attributes:
        go_away: the code the session's go-away carries because of it.
    """

    go_away = GoAway.PROTOCOL_ERROR


class BadVersion(RemoteProtocolError):
    """A frame of another protocol version (or no yamux at all)."""


class BadFrameType(RemoteProtocolError):
    """A frame type, flag or go-away code yamux does not have."""


class BadStreamId(RemoteProtocolError):
    """An id of the wrong parity, zero where a stream is needed, or one in use."""


class FrameTooLong(RemoteProtocolError):
    """A data frame longer than any window can be."""


class WindowOverflow(RemoteProtocolError):
    """Credit above 2**32 - 1 bytes."""


class StreamViolation(RemoteProtocolError):
    """The peer broke a rule of one stream (data past its window, data after its FIN)."""


class SessionDead(MuxError):
    """The session ended while the stream was in use; what was sent may or may not have arrived."""


class KeepaliveTimeout(SessionDead):
    """Nothing was received from the peer for longer than the keepalive allows."""


class StreamReset(MuxError):
    """
    One stream was cut in the middle.

    Attributes:
        remote: True when the peer did it.
    """

    def __init__(self, text: str, *, remote: bool) -> None:
        super().__init__(text)
        self.remote = remote
