"""
Whose bytes go next: the pull side of a session.

The shell asks for one batch (one carrier message) at a time and says how much the transport already holds.

1. Control frames (credit, pings, resets, go-away) go first; they wait only behind ``CONTROL_ROOM``, which no honest
   peer reaches.
2. Then streams in class order, round robin within a class: control, inference, bulk.
3. Control and inference may go ``RESERVE`` bytes over the transport limit; bulk may not, and stops at the delay cap.
4. While bulk waits, one bulk frame goes after four bulk frames' worth of the others: its floor of a fifth.

Source: traffic-classes §5, rules 1 to 7.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from localai_dist.mux.classes import BULK
from localai_dist.mux.frame import HEADER_SIZE, VERSION, Flag, FrameType, pack_header
from localai_dist.mux.pacing import FRAME_MIN, DelayCap, TransportLimit
from localai_dist.mux.stream import SEND_DATA, SEND_FIN, Stream
from localai_dist.units import KiB

BATCH_MAX: Final = 256 * KiB - 14
"""A carrier message with a WebSocket header of 14 bytes stays within 256 KiB, one read of a tunnel's socket.
A frame costs the same whatever its size; so long a one only goes where the transport drains it in two milliseconds."""

SMALL_FRAME: Final = 16 * KiB
"""What control and inference streams send in one turn."""

RESERVE: Final = 64 * KiB
CONTROL_ROOM: Final = 1024 * KiB
FLOOR: Final = 0.2
SMALLEST_TURN: Final = 4 * KiB
"""No new stream gets a turn in a batch with less room left than this."""

OTHERS_PER_BULK: Final = (1 - FLOOR) / FLOOR
_DATA, _WINDOW_UPDATE, _FIN = int(FrameType.DATA), int(FrameType.WINDOW_UPDATE), int(Flag.FIN)


@dataclass(slots=True)
class Batch:
    """
    What to send as one message.

    Attributes:
        parts: byte strings to be sent one after the other.
        size: how many bytes they are.
        served: streams that gave bytes or a FIN, for the shell to resume their producers.
    """

    parts: list[bytes | memoryview] = field(default_factory=list)
    size: int = 0
    served: list[Stream] = field(default_factory=list)

    def add(self, frame: bytes) -> None:
        """Append a whole frame without payload."""
        self.parts.append(frame)
        self.size += len(frame)


class Sender:
    """
    The send side of one session.

    Attributes:
        control: frames without payload, waiting for the next batch.
        limit: how much the transport may hold.
        delay: the cap on bulk under way.
    """

    def __init__(self) -> None:
        self.control: deque[bytes] = deque()
        self.limit = TransportLimit()
        self.delay = DelayCap()
        self._ready: tuple[deque[Stream], ...] = (deque(), deque(), deque())
        self._since_bulk = 0

    def wake(self, stream: Stream) -> None:
        """Put ``stream`` in line if it has something to send; it moves when its class changed."""
        if stream.ready_in is not None:
            if stream.ready_in is stream.traffic:
                return
            self.forget(stream)
        if stream.wants_turn:
            stream.ready_in = stream.traffic
            self._ready[stream.ready_in].append(stream)

    def forget(self, stream: Stream) -> None:
        """Take ``stream`` out of the line."""
        if stream.ready_in is not None:
            self._ready[stream.ready_in].remove(stream)
            stream.ready_in = None

    @property
    def bulk_waits(self) -> bool:
        """Whether a bulk stream has something to send."""
        return bool(self._ready[BULK])

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send at all, given credit and caps aside."""
        control, inference, bulk = self._ready
        return not (self.control or control or inference or bulk)

    def batch(self, now: float, held: int) -> Batch:
        """
        The next message; an empty one when nothing may go.

        Args:
            now: the time (s).
            held: bytes given to the transport since it was last empty.
        """
        batch = Batch()
        if held >= self.limit.limit and not self.control and not self._ready[0] and not self._ready[1]:
            return batch  # only bulk, which has to wait
        top = max(FRAME_MIN, min(BATCH_MAX, self.limit.limit))
        while self.control and batch.size < BATCH_MAX - HEADER_SIZE and held < CONTROL_ROOM:
            batch.add(self.control.popleft())
        room = self.limit.limit - held
        if room + RESERVE > 0:
            self._take_urgent(batch, top, now, room)
        if room > 0:
            self._take_bulk(batch, top, now)
        return batch

    def _take_urgent(self, batch: Batch, top: int, now: float, room: int) -> None:
        control, inference, bulk = self._ready
        while (control or inference) and top - batch.size >= SMALLEST_TURN:
            # The floor keeps to the transport's limit and the delay cap like all bulk.
            owed = bulk and self._since_bulk >= OTHERS_PER_BULK * top and self.delay.open and room > 0
            if owed:
                self._turn(bulk, batch, top - batch.size - HEADER_SIZE, now)
                self._since_bulk = 0
                continue
            line = control or inference
            size = self._turn(line, batch, min(SMALL_FRAME, top - batch.size - HEADER_SIZE), now)
            self._since_bulk = self._since_bulk + size if bulk else 0

    def _take_bulk(self, batch: Batch, top: int, now: float) -> None:
        bulk = self._ready[BULK]
        while bulk and self.delay.open and top - batch.size >= SMALLEST_TURN:
            self._turn(bulk, batch, top - batch.size - HEADER_SIZE, now)
            self._since_bulk = 0

    def _turn(self, line: deque[Stream], batch: Batch, limit: int, now: float) -> int:
        """One frame of the first stream in ``line``, its FIN behind it when due; returns the payload's size."""
        stream = line.popleft()
        stream.ready_in = None
        traffic = stream.traffic
        parts, count = stream.take(limit, now)
        if count:
            stream.apply(SEND_DATA)
            batch.add(pack_header(VERSION, _DATA, 0, stream.id, count))
            batch.parts += parts
            batch.size += count
            if traffic is BULK:
                self.delay.bulk_sent(count)
        if stream.fin_due:
            stream.apply(SEND_FIN)
            batch.add(pack_header(VERSION, _WINDOW_UPDATE, _FIN, stream.id, 0))
        batch.served.append(stream)
        self.wake(stream)
        return count
