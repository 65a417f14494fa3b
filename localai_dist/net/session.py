"""Drives one ``mux.Session`` over a carrier: flushing, keepalive, opening and ending of streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, assert_never

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.mux import events
from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import LocalProtocolError, RemoteProtocolError, SessionClosing, SessionDead, TooManyStreams
from localai_dist.mux.frame import GoAway
from localai_dist.mux.pacing import PING_INTERVAL
from localai_dist.mux.session import Session
from localai_dist.mux.stream import Stream
from localai_dist.mux.window import CREDIT_TIME
from localai_dist.net.carrier import Carrier
from localai_dist.net.config import SessionConfig, SessionEnd
from localai_dist.net.errors import SessionClosedHere, SessionLost, SessionSilent, as_lost
from localai_dist.net.opens import QueueOfOpens
from localai_dist.net.stream import MuxStream

FIRST_PINGS: Final = 4
"""Pings at the start of a session: they give the base round trip before any load does."""

PINGS_OUT: Final = 4
"""No further ping while this many are unanswered."""

CLOSE_NORMAL: Final = 1000
CLOSE_PROTOCOL_ERROR: Final = 1002


class MuxSession:
    """
    One session of streams over one connection.

    Attributes:
        on_stream: called with each incoming stream, which is ACKed by its ``accept()`` or ``start()``; unset, streams
            are refused with a reset.
        on_go_away: called once when the far side sent a go-away.
        on_idle: called whenever the last stream is gone.
        opened_at: when the session began, by its clock (s).
        rtt: the latest measured round trip (s), or None.
    """

    _log = Logger()

    def __init__(self, carrier: Carrier, *, client: bool, config: SessionConfig, clock: IReactorTime) -> None:
        self.config = config
        self.on_stream: Callable[[MuxStream], None] | None = None
        self.on_go_away: Callable[[], None] | None = None
        self.on_idle: Callable[[], None] | None = None
        self.clock = clock
        self.core = Session(client=client, limits=config.limits())
        self.opened_at: float = clock.seconds()
        self.rtt: float | None = None
        self._carrier = carrier
        self._streams: dict[int, MuxStream] = {}
        self._waiting = QueueOfOpens(self._open_now)
        self._closed: Failure | None = None
        self._close_watchers: list[Deferred[SessionEnd]] = []
        self._held = 0
        self._held_since = 0.0
        self._paused = False
        self._pumping = self._receiving = self._in_read = self._flush_due = False
        self._flush_call: IDelayedCall | None = None
        self._pings_sent = 0
        self._last_received = self.opened_at
        self._keepalive_call: IDelayedCall | None = None
        self._measure_call: IDelayedCall | None = None
        self._credit_call: IDelayedCall | None = None

    def begin(self) -> None:
        """Start delivering and sending; called once, after ``on_stream`` is set."""
        if self._closed is not None:
            return
        self._keepalive_call = self.clock.callLater(self.config.keepalive_interval, self._keepalive)
        self._measure()
        self._carrier.start(self)

    # -- for everybody ---------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the session lives (it may be going away)."""
        return self._closed is None

    @property
    def is_going_away(self) -> bool:
        """Whether no new streams may be opened here."""
        return self._closed is not None or self.core.closing

    @property
    def stream_count(self) -> int:
        """How many streams live, of both ends."""
        return len(self._streams)

    @property
    def peer(self) -> object:
        """The far address of the connection."""
        return self._carrier.peer_address()

    @property
    def host(self) -> object:
        """Our address of the connection."""
        return self._carrier.host_address()

    def open(self, traffic: TrafficClass = TrafficClass.INFERENCE) -> Deferred[MuxStream]:
        """
        A new stream, as soon as the backlog of unaccepted ones allows.

        Cancelling gives the place in the queue up. Errs with ``SessionDead``, ``SessionClosing`` or ``TooManyStreams``.
        """
        if self._closed is not None:
            return fail(self._closed)
        try:
            if self.core.opened_here + len(self._waiting) >= self.config.max_streams:
                raise TooManyStreams(f"{self.config.max_streams} streams are open already")
            if self._waiting or (self.core.backlog_full and not self.core.closing):
                return self._waiting.join(traffic)
            return succeed(self._open_now(traffic))
        except LocalProtocolError:
            return fail()

    def when_closed(self) -> Deferred[SessionEnd]:
        """A Deferred of its own for each call, called back (never errbacked) once the session ended."""
        if self._closed is not None:
            return succeed(SessionEnd(self._closed))
        watcher: Deferred[SessionEnd] = Deferred(lambda d: self._close_watchers.remove(d))
        self._close_watchers.append(watcher)
        return watcher

    def go_away(self) -> None:
        """Take no new streams on either end; the open ones finish."""
        if self._closed is None:
            self.core.go_away()
            self._waiting.fail(Failure(SessionClosing("the session takes no new streams: it is going away")))
            self.schedule()

    def abort(self, reason: Exception) -> None:
        """Session death now: every stream gets it, the connection is dropped."""
        if self._closed is None:
            self._end(Failure(as_lost(reason)))
            self._carrier.abort()

    def close(self) -> None:
        """Go-away, flush, close the connection with code 1000; streams still open get session death."""
        if self._closed is None:
            self._finish(GoAway.NORMAL, Failure(SessionClosedHere("the session was closed here")), CLOSE_NORMAL)

    # -- called by the carrier -------------------------------------------------------------------------------------

    def bytes_received(self, data: bytes | memoryview) -> None:
        """Bytes of the peer arrived."""
        if not self.is_open:
            return
        self._last_received = now = self.clock.seconds()
        self._receiving = True
        try:
            for event in self.core.receive(data, now):
                self._on_event(event)
                if self._closed is not None:
                    return
        finally:
            self._receiving = False
        self._open_waiting()
        if self.core.has_something:
            self.schedule()

    def read_began(self) -> None:
        """What follows comes from one read of the connection: answer it all at once, at its end."""
        self._in_read = True

    def read_ended(self) -> None:
        """Send what the read asked for now: a turn of the reactor later costs a wake-up for each read."""
        self._in_read = False
        if self._flush_due:
            self._flush_due = False
            if self._carrier.pull:
                self._pump()
            else:
                self.schedule()

    def carrier_drained(self) -> None:
        """The transport's queue is empty: measure its rate, give it more."""
        if self._closed is not None:
            return
        if self._carrier.pull and self._held:
            self.core.sender.limit.drained(self._held, self.clock.seconds() - self._held_since)
        self._held, self._paused = 0, False
        if self._receiving or self._pumping:
            self.schedule()
        else:
            self._pump()

    def carrier_paused(self) -> None:
        """The transport's buffer is full."""
        self._paused = True

    def carrier_lost(self, reason: Failure) -> None:
        """The connection is gone: whatever the reason, it is no clean end for a stream."""
        if self._closed is None:
            lost = SessionLost(f"the connection was lost: {reason.getErrorMessage()}")
            lost.__cause__ = reason.value
            self._end(Failure(lost))

    # -- called by streams -----------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Flush once in this reactor turn."""
        if self._in_read:
            self._flush_due = True
        elif self._flush_call is None and self._closed is None and not self._pumping:
            self._flush_call = self.clock.callLater(0, self._flush)

    def consumed(self, stream: Stream, count: int) -> None:
        """The application of ``stream`` took so many bytes."""
        if self._closed is None:
            self.core.consumed(stream, count, self.clock.seconds())
            if self.core.credit_due:
                self.schedule()
            elif self.core.credit_withheld and self._credit_call is None:
                self._credit_call = self.clock.callLater(CREDIT_TIME, self._release_credit)

    def stream_gone(self, stream: MuxStream) -> None:
        """``stream`` has nothing left in either direction; its place is free."""
        if self._streams.pop(stream.id, None) is not None and not self._streams and self.on_idle is not None:
            self.on_idle()

    # -- events ----------------------------------------------------------------------------------------------------

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.DataReceived():
                self._streams[event.stream.id].bytes_arrived(event.data)
            case events.StreamFinished():
                self._streams[event.stream.id].finish_arrived()
            case events.StreamCut():
                if event.stream.id in self._streams:  # else it left with its FIN just before
                    self._streams[event.stream.id].cut_arrived(event.violation, event.after_fin)
            case events.StreamOpened():
                self._on_opened(event.stream)
            case events.StreamAccepted():
                pass  # the waiting opens are looked at after every batch of events
            case events.PongReceived(round_trip):
                self.rtt = round_trip
            case events.GoAwayReceived():
                self._on_go_away()
            case events.SessionFailed(error, code):
                self._on_failed(error, code)
            case _:
                assert_never(event)

    def _on_opened(self, stream: Stream) -> None:
        shell = self._adopt(stream)
        if self.on_stream is None:
            shell.abortConnection()
            return
        try:
            self.on_stream(shell)
        except Exception:  # noqa: BLE001 - one stream's trouble must not end the session
            self._log.failure("serving stream {stream_id} failed", stream_id=stream.id)
            shell.abortConnection()

    def _on_go_away(self) -> None:
        self._waiting.fail(Failure(SessionClosing("the peer takes no new streams: it is going away")))
        if self.on_go_away is not None:
            self.on_go_away()

    def _on_failed(self, error: RemoteProtocolError | SessionDead, code: GoAway | None) -> None:
        lost = SessionLost(str(error))
        lost.__cause__ = error
        if code is None:
            self._end(Failure(lost))
            self._carrier.close(CLOSE_NORMAL, "")
        else:
            self._finish(code, Failure(lost), CLOSE_PROTOCOL_ERROR)

    # -- opening ---------------------------------------------------------------------------------------------------

    def _adopt(self, stream: Stream) -> MuxStream:
        shell = self._streams[stream.id] = MuxStream(self, stream)
        return shell

    def _open_now(self, traffic: TrafficClass) -> MuxStream:
        shell = self._adopt(self.core.open(traffic))
        self.schedule()
        return shell

    def _open_waiting(self) -> None:
        while self._waiting and not self.core.backlog_full and not self.core.closing:
            self._waiting.serve()

    # -- sending ---------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        self._flush_call = None
        if not self._carrier.pull and not self._paused:
            self._held = 0  # the transport had a turn to write and did not complain
        self._pump()
        more = not self._carrier.pull and not self._paused and not self.core.sender.idle
        if more and self.core.sender.limit.limit <= self._held:
            self.schedule()

    def _pump(self) -> None:
        """Send while there is something that may go; streams refill as they are served."""
        self._pumping = True
        try:
            while self._closed is None and not self._paused and self.core.has_something:
                now = self.clock.seconds()
                batch = self.core.next_batch(now, self._held)
                if not batch.parts:
                    break
                if not self._held:
                    self._held_since = now
                self._held += batch.size
                self._carrier.send(batch.parts)
                for stream in batch.served:
                    if stream.id in self._streams:  # else the application of one before it ended the session
                        self._streams[stream.id].served()
        finally:
            self._pumping = False
        if self._carrier.flush():
            self._held = 0
        if self._closed is None and self.core.flooded:
            self.abort(SessionDead("the peer makes us answer it and does not read"))
        if self._measure_call is None and self._closed is None and self.core.bulk_under_way:
            self._measure()

    def _release_credit(self) -> None:
        self._credit_call = None
        self.core.release_credit()
        self.schedule()

    # -- time ------------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Ping a few times at the start, and then as long as bulk moves."""
        self._measure_call = None
        if self._pings_sent >= FIRST_PINGS and not self.core.bulk_under_way:
            return
        if self.core.sender.delay.pings_out < PINGS_OUT:
            self._ping()
        self._measure_call = self.clock.callLater(PING_INTERVAL, self._measure)

    def _ping(self) -> None:
        self._pings_sent += 1
        self.core.ping(self.clock.seconds())
        self.schedule()

    def _keepalive(self) -> None:
        silent = self.clock.seconds() - self._last_received
        if silent >= self.config.keepalive_timeout:
            self.abort(SessionSilent(f"nothing was received for {silent:.1f} s"))
            return
        if silent >= self.config.keepalive_interval:
            self._ping()
            wait = min(self.config.keepalive_interval, self.config.keepalive_timeout - silent)
        else:
            wait = self.config.keepalive_interval - silent
        self._keepalive_call = self.clock.callLater(max(wait, 0.001), self._keepalive)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _finish(self, code: GoAway, reason: Failure, close_code: int) -> None:
        self.core.go_away(code)
        now = self.clock.seconds()
        while (batch := self.core.next_batch(now, self._held)).parts:
            self._held += batch.size
            self._carrier.send(batch.parts)
        self._end(reason)
        self._carrier.close(close_code, reason.getErrorMessage())

    def _end(self, reason: Failure) -> None:
        self._closed = reason
        for call in (self._flush_call, self._keepalive_call, self._measure_call, self._credit_call):
            if call is not None and call.active():
                call.cancel()
        self._flush_call = self._keepalive_call = self._measure_call = self._credit_call = None
        self._waiting.fail(reason)
        for stream in list(self._streams.values()):
            stream.session_ended(reason)
        self._streams.clear()
        watchers, self._close_watchers = self._close_watchers, []
        for watcher in watchers:
            watcher.callback(SessionEnd(reason))


__all__ = ["MuxSession", "SessionConfig", "SessionEnd"]
