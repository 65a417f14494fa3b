"""
One yamux session without any I/O: bytes in, events out, batches to send.

The caller passes the time; it may be anything that only grows (s). Nothing here raises on what a peer sends: a broken
rule comes out as ``SessionFailed`` or ``StreamCut``.

Source: docs/wire/mux.md.
"""

from __future__ import annotations

from typing import Final

from localai_dist.mux.classes import BULK, INFERENCE, TrafficClass
from localai_dist.mux.errors import (
    LocalProtocolError,
    SessionClosing,
    StreamIdsExhausted,
    TooManyStreams,
)
from localai_dist.mux.frame import MAX_LENGTH, Flag, FrameType, GoAway
from localai_dist.mux.limits import Limits
from localai_dist.mux.receiver import Receiver
from localai_dist.mux.sender import Batch, Sender
from localai_dist.mux.stream import BULK_WINDOW, SEND_RST, Stream
from localai_dist.mux.window import CREDIT_GRAIN, SPEC_WINDOW, WindowPool

CONTROL_MAX: Final = 65_536
"""Control frames waiting; a peer that makes us owe it more and takes none ends the session."""


class Session(Receiver):
    """
    One end of a session.

    Attributes:
        streams: the streams that live, by id.
        sender: what decides who sends next.
        closing: a go-away was sent or received.
    """

    def __init__(self, *, client: bool, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.sender = Sender()
        self.pool = WindowPool(self.limits.pool)
        super().__init__(client=client)
        self.go_away_sent: GoAway | None = None
        self.unacked = 0

    # -- streams ---------------------------------------------------------------------------------------------------

    @property
    def closing(self) -> bool:
        """Whether no new stream may be opened: a go-away was sent or received, or the session failed."""
        return self.go_away_sent is not None or self.go_away_received or self.failed

    @property
    def backlog_full(self) -> bool:
        """Whether another open has to wait for the peer's accept of an earlier one."""
        return self.unacked >= self.limits.backlog

    def open(self, traffic: TrafficClass = INFERENCE) -> Stream:
        """
        A new stream; its SYN goes with the next batch.

        Raises:
            SessionClosing: no new streams any more.
            TooManyStreams: this end has ``max_streams`` open.
            LocalProtocolError: the backlog is full; wait for ``StreamAccepted`` or ``StreamCut``.
            StreamIdsExhausted: every id was used.
        """
        if self.closing:
            raise SessionClosing("the session takes no new streams: it is going away")
        if self.opened_here >= self.limits.max_streams:
            raise TooManyStreams(f"{self.limits.max_streams} streams are open already")
        if self.backlog_full:
            raise LocalProtocolError(f"{self.unacked} opens wait for the peer's accept")
        if self._next_id > MAX_LENGTH:
            raise StreamIdsExhausted("no stream id is left in this session")
        stream = self._new_stream(self._next_id, local=True, traffic=traffic)
        self._next_id += 2
        self.opened_here += 1
        self.unacked += 1
        self._announce(stream, Flag.SYN)
        return stream

    def accept(self, stream: Stream) -> None:
        """Tell the peer its stream is taken; a second call does nothing, nor does one on a stream that is gone."""
        if stream.local or stream.acked or stream.over:
            return
        stream.acked = True
        self._announce(stream, Flag.ACK)

    def _announce(self, stream: Stream, flag: Flag) -> None:
        window = stream.receive_window
        window.grow(self.limits.initial_window)
        self._owed.pop(stream.id, None)
        self._control(FrameType.WINDOW_UPDATE, flag, stream.id, window.take_grant())

    def set_traffic(self, stream: Stream, traffic: TrafficClass) -> None:
        """Class ``stream`` from now on; bulk widens its receive window."""
        stream.declared = traffic
        if traffic is BULK and stream.readable:
            stream.receive_window.grow(BULK_WINDOW)
            self._owe(stream)
        self.sender.wake(stream)

    def write(self, stream: Stream, data: bytes, now: float) -> None:
        """Queue ``data``; raises ``LocalProtocolError`` once the stream can't send any more."""
        stream.append(data, now)
        self.sender.wake(stream)

    def finish(self, stream: Stream) -> None:
        """Send FIN after what is queued; a second call does nothing."""
        if stream.writable:
            stream.finishing = True
            self.sender.wake(stream)

    def reset(self, stream: Stream) -> None:
        """Cut ``stream`` now, dropping what is queued; nothing happens on one that is over."""
        if stream.over:
            return
        stream.apply(SEND_RST)
        self._control(FrameType.WINDOW_UPDATE, Flag.RST, stream.id, 0)
        self._settle_cut(stream)

    def consumed(self, stream: Stream, count: int, now: float) -> None:
        """The application took ``count`` bytes of ``stream``; credit follows when enough is owed."""
        stream.receive_window.consumed(count, now, self.sender.delay.round_trip)
        self._owe(stream)
        self._retire(stream)

    def _owe(self, stream: Stream) -> None:
        window = stream.receive_window
        if window.owed >= CREDIT_GRAIN and stream.readable and (stream.local or stream.acked):
            (self._owed if window.grant_due else self._withheld)[stream.id] = stream

    # -- the session -----------------------------------------------------------------------------------------------

    def ping(self, now: float) -> None:
        """Ask the peer for a sign of life; ``PongReceived`` tells the round trip."""
        self._control(FrameType.PING, Flag.SYN, 0, self.sender.delay.ping_sent(now))

    def go_away(self, code: GoAway = GoAway.NORMAL) -> None:
        """Take no new streams from now on and tell the peer; a second call does nothing."""
        if self.go_away_sent is None:
            self.go_away_sent = code
            self._control(FrameType.GO_AWAY, Flag.NONE, 0, code)

    @property
    def bulk_under_way(self) -> bool:
        """Whether bulk bytes are out or waiting, so that the delay has to be measured."""
        return self.sender.delay.under_way > 0 or self.sender.bulk_waits

    def next_batch(self, now: float, held: int) -> Batch:
        """
        The next message for the carrier; empty when nothing may go now.

        Args:
            now: the time (s).
            held: bytes given to the transport since it was last empty.
        """
        while self._owed:
            _, stream = self._owed.popitem()
            self._withheld.pop(stream.id, None)
            if stream.readable and stream.receive_window.owed:
                self._control(FrameType.WINDOW_UPDATE, Flag.NONE, stream.id, stream.receive_window.take_grant())
        batch = self.sender.batch(now, held)
        for stream in batch.served:
            self._retire(stream)
        return batch

    @property
    def credit_due(self) -> bool:
        """Whether credit is owed to the peer and worth a frame."""
        return bool(self._owed)

    @property
    def has_something(self) -> bool:
        """Whether a batch could have anything in it; asked first, because most turns end with an empty one."""
        return bool(self._owed) or not self.sender.idle

    @property
    def credit_withheld(self) -> bool:
        """Whether credit waits to become a larger piece; ``release_credit`` is called ``CREDIT_TIME`` later."""
        return bool(self._withheld)

    def release_credit(self) -> None:
        """Whatever was withheld is due now: the sender may stand still for want of it."""
        self._owed.update(self._withheld)
        self._withheld.clear()

    @property
    def flooded(self) -> bool:
        """Whether the peer makes us owe it more control frames than any honest one."""
        return len(self.sender.control) > CONTROL_MAX

    def check(self) -> None:
        """
        Every invariant of a session, for tests; raises ``AssertionError``.

        Unread bytes stay under streams x 256 KiB + the pool because growth is only ever taken from the pool.
        """
        grown = 0
        for stream in self.streams.values():
            window = stream.receive_window
            assert min(window.allowed, window.unread, window.owed, stream.send_window.available) >= 0, stream.id
            if stream.readable:
                assert window.allowed + window.unread + window.owed == window.size, stream.id
            grown += window.size - SPEC_WINDOW
            assert stream.queued == sum(map(len, stream.queue)) - stream._taken, stream.id
        assert self.pool.free >= 0 and self.pool.free + grown == self.limits.pool
        assert self.unacked == sum(s.local and not s.acked for s in self.streams.values())
        assert self.opened_here == sum(s.local for s in self.streams.values())
