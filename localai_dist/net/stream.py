"""
One mux stream as an ordinary Twisted transport.

What is buffered, and its bound: received bytes nobody took stay here, at most the receive window; they are credited to
the peer only once the protocol took them, so a paused stream stops its sender. Written bytes stay in the pure
stream's queue; a registered producer is paused above 64 KiB, as by a TCP transport, that of a bulk stream above 256.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.interfaces import (
    IConsumer,
    IDelayedCall,
    IHalfCloseableProtocol,
    IProtocol,
    IPushProducer,
    ITCPTransport,
)
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from localai_dist.mux.classes import BULK, TrafficClass
from localai_dist.mux.errors import RemoteProtocolError
from localai_dist.mux.stream import LOCAL_CLOSED, Stream
from localai_dist.net.errors import SessionClosedHere, SessionLost, StreamCutShort, StreamEnded
from localai_dist.net.feed import BULK_HIGH_WATER, Feed
from localai_dist.net.socketless import Socketless

if TYPE_CHECKING:
    from localai_dist.net.session import MuxSession

LINGER: Final = 300.0
"""After our FIN the peer has this long (s) to end its direction too; then the stream is reset. Source: hashicorp yamux,
StreamCloseTimeout. While written bytes are still to be sent no time runs: a slow reader gets them all."""


@implementer(ITCPTransport, IConsumer, IPushProducer)
class MuxStream(Socketless):
    """
    One end of a stream.

    ``start(protocol)`` attaches a protocol; until then received bytes wait. A protocol that gets the far side's end of
    data without being ``IHalfCloseableProtocol`` is told ``connectionLost(ConnectionDone)``, as on TCP.

    Attributes:
        id: the stream's number.
        session: its session.
        disconnecting: ``loseConnection`` was called.
    """

    _log = Logger()

    def __init__(self, session: MuxSession, core: Stream) -> None:
        self.session = session
        self.id = core.id
        self.disconnecting = False
        self.protocol: Any = None  # an IProtocol, perhaps an IHalfCloseableProtocol
        self._core = core
        self._unread: deque[bytes] = deque()
        self._unread_size = 0
        self._returned = 0
        self._finish_seen = False
        self._half_closed_told = False
        self._lost: Failure | None = None
        self._paused = False
        self._aborted = False
        self._delivering = False
        self._reader: tuple[int, Deferred[bytes]] | None = None
        self._feed = Feed()
        self._linger_call: IDelayedCall | None = None

    def __repr__(self) -> str:
        """The stream's number, class and state."""
        return f"<MuxStream {self.id} {self.traffic.name.lower()} {self._core.state.name.lower()}>"

    # -- class and acceptance --------------------------------------------------------------------------------------

    @property
    def traffic(self) -> TrafficClass:
        """The class its bytes go out in."""
        return self._core.declared

    @traffic.setter
    def traffic(self, traffic: TrafficClass) -> None:
        self.session.core.set_traffic(self._core, traffic)
        self.session.schedule()

    def accept(self) -> None:
        """Tell the far side its stream is taken; calling again does nothing."""
        if self.session.is_open:
            self.session.core.accept(self._core)
            self.session.schedule()

    @property
    def is_live(self) -> bool:
        """Whether the stream has neither been lost nor finished by the far side."""
        return self._lost is None and not self._finish_seen

    def start(self, protocol: IProtocol) -> None:
        """
        Attach ``protocol``: ``makeConnection``, then what was received and not taken.

        May be called again to hand the stream over; the protocol before it hears nothing more.
        """
        if self._reader is not None:
            raise RuntimeError("a read_exactly is under way on this stream")
        self.accept()
        self.protocol = protocol
        self._half_closed_told = False
        self._paused = False
        protocol.makeConnection(self)
        self._deliver()

    # -- reading ---------------------------------------------------------------------------------------------------

    def read_exactly(self, count: int) -> Deferred[bytes]:
        """
        The next ``count`` bytes of a stream no protocol is attached to, and not one more.

        Errs with ``StreamEnded``, or with what ended the stream. Cancelling takes nothing. One read at a time;
        ``count`` must fit the receive window's 256 KiB.
        """
        if self.protocol is not None or self._reader is not None:
            raise RuntimeError("the stream has a reader already")
        waiter: Deferred[bytes] = Deferred(self._forget_reader)
        self._reader = (count, waiter)
        self._feed_reader()
        return waiter

    def give_back(self, data: bytes) -> None:
        """Un-read ``data``, the end of what ``dataReceived`` was called with, for the next protocol."""
        self._unread.appendleft(data)
        self._unread_size += len(data)
        self._returned += len(data)

    def pauseProducing(self) -> None:
        """Deliver nothing; the far side stops once its credit is used up."""
        self._paused = True

    def resumeProducing(self) -> None:
        """Deliver again, first what waited."""
        if self._paused:
            self._paused = False
            self._deliver()

    def stopProducing(self) -> None:
        """As ``loseConnection``."""
        self.loseConnection()

    def bytes_arrived(self, data: bytes) -> None:
        """Called by the session."""
        if self._lost is not None:
            self._consumed(len(data))  # nobody is left to read them
            return
        self._unread.append(data)
        self._unread_size += len(data)
        if self._reader is not None:
            self._feed_reader()
        else:
            self._deliver()

    def finish_arrived(self) -> None:
        """Called by the session: no more bytes follow."""
        self._finish_seen = True
        if self._lost is not None:
            self._settle()
        elif self._reader is not None:
            self._feed_reader()
        else:
            self._deliver()

    def cut_arrived(self, violation: RemoteProtocolError | None, after_fin: bool) -> None:
        """Called by the session: the stream was reset."""
        if self._lost is not None:
            self._settle()
        elif after_fin and violation is None and not self._core.queued and not self._core.finishing:
            # The peer had said everything, and we owe it nothing: what was read is whole.
            self._deliver()
            self._settle()
        else:
            text = f"the peer broke the stream's rules: {violation}" if violation else "the peer reset the stream"
            self._lose(Failure(StreamCutShort(text, remote=True)))

    def session_ended(self, reason: Failure) -> None:
        """Called by the session when it dies; bytes nobody took make even a plain shutdown of ours a loss."""
        if self._unread_size and reason.check(SessionClosedHere):
            reason = Failure(
                SessionLost(f"{reason.getErrorMessage()}, {self._unread_size} received bytes were not taken")
            )
        self._lose(reason)
        self._settle()

    def _forget_reader(self, waiter: Deferred[bytes]) -> None:
        self._reader = None

    def _feed_reader(self) -> None:
        assert self._reader is not None
        count, waiter = self._reader
        if self._unread_size >= count:
            self._reader = None
            waiter.callback(self._take(count))
        elif self._lost is not None or self._finish_seen:
            self._reader = None
            waiter.errback(self._lost or Failure(StreamEnded("the stream ended before a whole frame")))

    def _take(self, count: int) -> bytes:
        taken = b"".join(self._unread)
        self._unread.clear()
        if len(taken) > count:
            self._unread.append(taken[count:])
        self._unread_size -= count
        self._consumed(count)
        return taken[:count]

    def _deliver(self) -> None:
        if self._delivering or self.protocol is None:
            return
        self._delivering = True
        try:
            while self._unread and not self._paused and not self._aborted and self._lost is None:
                self._deliver_one(self._unread.popleft())
        finally:
            self._delivering = False
        self._deliver_ending()

    def _deliver_ending(self) -> None:
        if self._lost is not None:
            self._tell_lost()
        elif self._finish_seen and not self._unread and not self._paused and not self._aborted:
            self._tell_finished()

    def _deliver_one(self, data: bytes) -> None:
        self._unread_size -= len(data)
        self._returned = 0
        self._tell(self.protocol.dataReceived, data)
        self._consumed(len(data) - self._returned)

    def _consumed(self, count: int) -> None:
        if count:
            self.session.consumed(self._core, count)

    def _tell_finished(self) -> None:
        if self._half_closed_told:
            return
        self._half_closed_told = True
        protocol = self.protocol
        if IHalfCloseableProtocol.providedBy(protocol) and not self.disconnecting:
            self._tell(protocol.readConnectionLost)
        if not IHalfCloseableProtocol.providedBy(protocol) or self._all_said():
            self._end_cleanly()

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Queue ``data``; ignored once the connection is lost or being closed."""
        if not data or self._lost is not None or not self._core.writable:
            return
        session, core = self.session, self._core
        session.core.write(core, bytes(data), session.clock.seconds())
        session.schedule()
        if core.traffic is BULK:
            self._feed.high_water = BULK_HIGH_WATER
        self._feed.queue_grew(core.queued)

    def writeSequence(self, data: Any) -> None:
        """Queue all of ``data``."""
        self.write(b"".join(data))

    @property
    def queued(self) -> int:
        """Bytes written and not yet sent."""
        return self._core.queued

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Let ``producer`` fill the stream; pull producers are asked whenever the queue ran empty."""
        if self._lost is not None:
            producer.stopProducing()
        else:
            self._feed.register(producer, bool(streaming))

    def unregisterProducer(self) -> None:
        """The producer is done; a close that waited for it goes on."""
        self._feed.unregister()
        if self.disconnecting:
            self._finish_writing()

    def served(self) -> None:
        """Called by the session after bytes or a FIN of this stream were sent."""
        core = self._core
        if self._lost is not None:
            self._settle()
            return
        if not core.writable and not core.queued and not core.fin_due:
            self._fin_sent()
        elif self._feed.producer is not None:
            self._tell(self._feed.queue_shrank, core.queued)

    def loseWriteConnection(self) -> None:
        """Half-close: FIN after what was written; reading goes on."""
        if self._lost is None:
            self._finish_writing()

    def loseConnection(self) -> None:
        """Close after what was written was sent (and a registered producer is done)."""
        if self._lost is not None or self.disconnecting:
            return
        self.disconnecting = True
        if self._core.writable or self._core.fin_due or self._core.queued:
            if self._feed.producer is None:
                self._finish_writing()
        else:  # our FIN went before
            self.session.clock.callLater(0, self._end_cleanly)

    def abortConnection(self) -> None:
        """Reset the stream now; the protocol hears ``connectionLost`` in the next turn."""
        if self._lost is None and not self._aborted:
            self._aborted = True
            self._reset_core()
            self.session.clock.callLater(0, self._lose, Failure(ConnectionAborted()))

    def _reset_core(self) -> None:
        if self.session.is_open:
            self.session.core.reset(self._core)
            self.session.schedule()

    def _finish_writing(self) -> None:
        if self.session.is_open:
            self.session.core.finish(self._core)
            self.session.schedule()

    def _fin_sent(self) -> None:
        if not self.disconnecting and IHalfCloseableProtocol.providedBy(self.protocol):
            self._tell(self.protocol.writeConnectionLost)
        if self.disconnecting or (self._finish_seen and self._half_closed_told):
            self._end_cleanly()

    def _all_said(self) -> bool:
        """Whether both ends said everything; nobody waits for a FIN of ours that is still to be sent."""
        return self._finish_seen and (self._core.over or (self.disconnecting and self._core.fin_due))

    # -- the end ---------------------------------------------------------------------------------------------------

    def _end_cleanly(self) -> None:
        if self._lost is None:
            self._finish_writing()
            self._lose(Failure(ConnectionDone()))

    def _lose(self, reason: Failure) -> None:
        """The stream is over for its protocol, for ``reason``; what it did not take is dropped."""
        if self._lost is not None:
            return
        self._lost = reason
        self._drop_unread()
        self._tell(self._feed.stop)
        if self._reader is not None:
            self._feed_reader()
        self._settle()
        if not self._delivering:
            self._tell_lost()

    def _drop_unread(self) -> None:
        dropped, self._unread_size = self._unread_size, 0
        self._unread.clear()
        self._consumed(dropped)

    def _tell_lost(self) -> None:
        protocol, self.protocol = self.protocol, None  # which has us: a circle would wait for the garbage collector
        if protocol is not None:
            self._tell(protocol.connectionLost, self._lost)

    def _tell(self, what: Callable[..., Any], *arguments: Any) -> None:
        """Call the application; as with a Twisted transport its mistake is logged and costs this stream only."""
        try:
            what(*arguments)
        except Exception:  # noqa: BLE001 - one stream's trouble must not stop the others' turn
            self._log.failure("the application of {stream} failed", stream=self)
            self.abortConnection()

    def _settle(self) -> None:
        """Leave the session once nothing is left in either direction; linger for the peer's FIN, not for ever."""
        if self._core.over or not self.session.is_open:
            if self._linger_call is not None and self._linger_call.active():
                self._linger_call.cancel()
            self._linger_call = None
            self.session.stream_gone(self)
        elif self._linger_call is None and self._core.state is LOCAL_CLOSED:
            self._linger_call = self.session.clock.callLater(LINGER, self._linger_over)

    def _linger_over(self) -> None:
        self._linger_call = None
        self._reset_core()
        self._settle()
