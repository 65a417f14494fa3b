"""
What a session tells its shell about received bytes; past tense, in the order it happened.

Nobody changes an event. They are not frozen because making one would then cost more than twice as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from localai_dist.mux.errors import RemoteProtocolError, SessionDead
from localai_dist.mux.frame import GoAway
from localai_dist.mux.stream import Stream


@dataclass(slots=True)
class StreamOpened:
    """The peer opened a stream; it waits for ``accept`` or ``reset``."""

    stream: Stream


@dataclass(slots=True)
class StreamAccepted:
    """The peer accepted a stream of ours."""

    stream: Stream


@dataclass(slots=True)
class DataReceived:
    """Bytes of a stream; the shell reports them ``consumed`` once the application took them."""

    stream: Stream
    data: bytes


@dataclass(slots=True)
class StreamFinished:
    """The peer will send no more on this stream (its FIN)."""

    stream: Stream


@dataclass(slots=True)
class StreamCut:
    """
    A stream was reset.

    Attributes:
        violation: what the peer did, when it was this end that cut the stream because of it; None: the peer reset it.
        after_fin: the peer had finished sending before, so what was read is whole.
    """

    stream: Stream
    violation: RemoteProtocolError | None
    after_fin: bool


@dataclass(slots=True)
class PongReceived:
    """A ping of ours was answered after ``round_trip`` seconds."""

    round_trip: float


@dataclass(slots=True)
class GoAwayReceived:
    """The peer takes no new streams; the open ones go on."""


@dataclass(slots=True)
class SessionFailed:
    """
    The session is over for every stream.

    Attributes:
        error: the peer's violation, or the session death it announced.
        code: the go-away to tell the peer, or None when it told us.
    """

    error: RemoteProtocolError | SessionDead
    code: GoAway | None


Event: TypeAlias = (
    StreamOpened
    | StreamAccepted
    | DataReceived
    | StreamFinished
    | StreamCut
    | PongReceived
    | GoAwayReceived
    | SessionFailed
)
