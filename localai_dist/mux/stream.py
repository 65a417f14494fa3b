"""One stream: its transition table, and the two halves' queues and windows."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final

from localai_dist.mux.classes import BULK, INFERENCE, TrafficClass
from localai_dist.mux.errors import LocalProtocolError, MuxError
from localai_dist.mux.window import ReceiveWindow, SendWindow, WindowPool
from localai_dist.units import KiB, MiB

BEFORE_ACK: Final = 32 * KiB
"""What we send of a stream before the far side accepted it. Source: design §7."""

BULK_WINDOW: Final = 4 * MiB
"""The receive window a bulk stream starts with, pool permitting. Source: traffic-classes rule 6."""

TURNS_BULK_AFTER: Final = 1 * MiB
"""A stream nobody classed counts as bulk once it sent this much without a pause. Source: design §5.5."""

PAUSE: Final = 0.1
"""An empty send queue for this long (s) is a pause."""


class State(Enum):
    """What may still travel on a stream."""

    __hash__ = object.__hash__  # members are single; Enum's own costs a Python call for each look-up in the table

    OPEN = "open"
    LOCAL_CLOSED = "we sent FIN"
    REMOTE_CLOSED = "the peer sent FIN"
    CLOSED = "both sent FIN"
    RESET = "one side sent RST"


class Input(Enum):
    """What happens to a stream."""

    __hash__ = object.__hash__

    SEND_DATA = "send data"
    SEND_FIN = "send FIN"
    SEND_RST = "send RST"
    RECV_DATA = "receive data"
    RECV_FIN = "receive FIN"
    RECV_RST = "receive RST"
    RECV_CREDIT = "receive credit"


# The members once more: see ``BULK`` of classes.py.
OPEN, LOCAL_CLOSED, REMOTE_CLOSED, CLOSED, RESET = State
SEND_DATA, SEND_FIN, SEND_RST, RECV_DATA, RECV_FIN, RECV_RST, RECV_CREDIT = Input

_O, _L, _R, _C, _X = OPEN, LOCAL_CLOSED, REMOTE_CLOSED, CLOSED, RESET
_SENDING, _RECEIVING, _OVER = (_O, _R), (_O, _L), (_C, _X)

TRANSITIONS: Final[dict[tuple[State, Input], State]] = {
    (_O, SEND_DATA): _O,
    (_O, SEND_FIN): _L,
    (_O, SEND_RST): _X,
    (_O, RECV_DATA): _O,
    (_O, RECV_FIN): _R,
    (_O, RECV_RST): _X,
    (_O, RECV_CREDIT): _O,
    (_L, SEND_RST): _X,
    (_L, RECV_DATA): _L,
    (_L, RECV_FIN): _C,
    (_L, RECV_RST): _X,
    (_L, RECV_CREDIT): _L,
    (_R, SEND_DATA): _R,
    (_R, SEND_FIN): _C,
    (_R, SEND_RST): _X,
    (_R, RECV_FIN): _R,  # a repeated FIN says nothing new
    (_R, RECV_RST): _X,
    (_R, RECV_CREDIT): _R,
    # Frames that crossed our last one on the wire: the stream is gone, they change nothing.
    (_C, RECV_FIN): _C,
    (_C, RECV_RST): _C,
    (_C, RECV_CREDIT): _C,
    (_X, RECV_DATA): _X,
    (_X, RECV_FIN): _X,
    (_X, RECV_RST): _X,
    (_X, RECV_CREDIT): _X,
    (_X, SEND_RST): _X,
}


class IllegalInput(MuxError):
    """The table has no such transition: ours is a bug here, the peer's a violation of that stream."""

    def __init__(self, state: State, input_: Input) -> None:
        super().__init__(f"can't {input_.value} on a stream where {state.value}")


def step(state: State, input_: Input) -> State:
    """
    The state after ``input_``.

    Raises:
        IllegalInput: the table has no such transition; the stream stays as it was.
    """
    try:
        return TRANSITIONS[state, input_]
    except KeyError:
        raise IllegalInput(state, input_) from None


class Stream:
    """
    The local end of one stream, as its session keeps it.

    Only the session and its sender change it; the shell reads it.

    Attributes:
        id: the stream's number in the session.
        local: True when this end opened it.
        acked: the far side's accept was received (own streams) or sent (theirs).
        queued: bytes written and not yet put into a frame.
    """

    __slots__ = (
        "_empty_since",
        "_run",
        "_taken",
        "acked",
        "declared",
        "finishing",
        "id",
        "local",
        "queue",
        "queued",
        "ready_in",
        "receive_window",
        "send_window",
        "sent",
        "state",
    )

    def __init__(self, stream_id: int, *, local: bool, traffic: TrafficClass, pool: WindowPool, maximum: int) -> None:
        self.id = stream_id
        self.local = local
        self.acked = False
        self.state = OPEN
        self.declared = traffic
        self.send_window = SendWindow()
        self.receive_window = ReceiveWindow(pool, maximum)
        self.queue: deque[bytes] = deque()
        self.queued = 0
        self.sent = 0
        self.finishing = False
        self.ready_in: TrafficClass | None = None
        self._run = 0
        self._taken = 0  # of the first string in the queue, so that each byte is sliced once only
        self._empty_since: float | None = None
        if traffic is BULK:
            self.receive_window.grow(BULK_WINDOW)

    @property
    def traffic(self) -> TrafficClass:
        """The class its bytes are sent in: the declared one, or bulk after a long run without a pause."""
        if self._run >= TURNS_BULK_AFTER and self.declared is INFERENCE:
            return BULK
        return self.declared

    @property
    def sendable(self) -> int:
        """How many queued bytes the peer's credit (and, before its ACK, our own restraint) allows."""
        allowed = self.send_window.available
        if self.local and not self.acked and allowed > BEFORE_ACK - self.sent:
            allowed = BEFORE_ACK - self.sent
        return self.queued if self.queued <= allowed else max(allowed, 0)

    @property
    def wants_turn(self) -> bool:
        """Whether the sender could put something of this stream on the wire now."""
        return self.sendable > 0 if self.queued else self.fin_due

    @property
    def fin_due(self) -> bool:
        """Whether everything written is sent, and a FIN is asked for and not yet sent."""
        return self.finishing and not self.queued and self.state in _SENDING

    @property
    def readable(self) -> bool:
        """Whether the peer may still send."""
        return self.state in _RECEIVING

    @property
    def writable(self) -> bool:
        """Whether ``write`` may still be called."""
        return self.state in _SENDING and not self.finishing

    @property
    def over(self) -> bool:
        """Whether nothing travels any more in either direction."""
        return self.state in _OVER

    def apply(self, input_: Input) -> None:
        """Take one step of the table; raises ``IllegalInput`` and changes nothing when there is none."""
        self.state = step(self.state, input_)

    def append(self, data: bytes, now: float) -> None:
        """Queue ``data``; a queue that stood empty for a pause ends the run that makes a stream bulk."""
        if not self.writable:
            raise LocalProtocolError(f"can't write on a stream where {self.state.value}")
        if not self.queued and (self._empty_since is None or now - self._empty_since >= PAUSE):
            self._run = 0
        self.queue.append(data)
        self.queued += len(data)

    def take(self, limit: int, now: float) -> tuple[list[bytes | memoryview], int]:
        """Up to ``limit`` sendable bytes off the queue, as references, and how many they are."""
        count = min(limit, self.sendable)
        parts: list[bytes | memoryview] = []
        left, skip = count, self._taken
        while left:
            chunk = self.queue[0]
            if len(chunk) - skip > left:
                parts.append(memoryview(chunk)[skip : skip + left])
                skip += left
                break
            parts.append(memoryview(chunk)[skip:] if skip else chunk)
            left -= len(chunk) - skip
            skip = 0
            self.queue.popleft()
        self._taken = skip
        self.queued -= count
        self.sent += count
        self._run += count
        self.send_window.use(count)
        if not self.queued:
            self._empty_since = now
        return parts, count

    def drop_queue(self) -> None:
        """Forget what was written and not sent."""
        self.queue.clear()
        self.queued = self._taken = 0
