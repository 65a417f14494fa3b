"""
Transports and carriers without sockets; time comes from a ``task.Clock``.

``SlowTransport`` takes N bytes and then pauses its producer until the test drains it. ``TransportPair`` joins two
such. The mux sessions joined by memory are in ``sessions`` and come along.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IConsumer, IHalfCloseableProtocol, IPushProducer, IReactorTime, ITCPTransport
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from localai_dist.testing.sessions import ADDRESS, CarrierPair, MemoryCarrier, SessionPair
from localai_dist.units import KiB


@implementer(ITCPTransport, IConsumer, IPushProducer)
class SlowTransport:
    """
    A transport that takes ``capacity`` bytes and then pauses its producer, until ``drain``.

    Attributes:
        buffer: written and not drained.
        reading: whether the protocol may be given bytes.
        disconnected: the protocol was told ``connectionLost``.
    """

    def __init__(self, clock: IReactorTime, capacity: int = 64 * KiB) -> None:
        self.clock = clock
        self.capacity = capacity
        self.buffer = bytearray()
        self.protocol: Any = None
        self.producer: Any = None
        self.reading = True
        self.disconnecting = False
        self.disconnected = False
        self.aborted = False
        self.write_closed = False
        self.written = 0
        self._streaming = False
        self._producer_paused = False
        self._incoming: deque[bytes | None] = deque()
        self._delivering = False

    # -- for the test ------------------------------------------------------------------------------------------------

    def connect(self, protocol: Any) -> None:
        """Attach ``protocol`` and tell it."""
        self.protocol = protocol
        protocol.makeConnection(self)

    def drain(self, count: int | None = None) -> bytes:
        """Take up to ``count`` written bytes (all of them), resuming the producer when none are left."""
        taken = bytes(self.buffer[:count])
        del self.buffer[: len(taken)]
        if not self.buffer:
            if self.producer is not None and (not self._streaming or self._producer_paused):
                self._producer_paused = False
                self.producer.resumeProducing()
            if not self.buffer:
                self._finish_closing()
        return taken

    def deliver(self, data: bytes) -> None:
        """Bytes from the far side; they wait while reading is paused."""
        self._incoming.append(data)
        self._read()

    def end_of_data(self) -> None:
        """The far side closed."""
        self._incoming.append(None)
        self._read()

    def lose(self, error: Exception) -> None:
        """The connection is gone."""
        if not self.disconnected:
            self.disconnected = True
            producer, self.producer = self.producer, None
            if producer is not None:
                producer.stopProducing()
            self.protocol.connectionLost(Failure(error))

    def _read(self) -> None:
        if self._delivering or self.protocol is None:
            return
        self._delivering = True
        half_closes = IHalfCloseableProtocol.providedBy(self.protocol)
        try:
            while self._incoming and self.reading and not self.disconnected:
                data = self._incoming.popleft()
                if data is not None:
                    self.protocol.dataReceived(data)
                elif half_closes and not self.disconnecting:
                    self.protocol.readConnectionLost()
                else:
                    self.lose(ConnectionDone())
        finally:
            self._delivering = False

    def _finish_closing(self) -> None:
        if self.disconnecting and not self.buffer and self.producer is None and not self.disconnected:
            self.clock.callLater(0, self.lose, ConnectionDone())

    # -- ITCPTransport -----------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Take ``data``, pausing the producer above the capacity."""
        if self.disconnected or self.aborted or self.write_closed or (self.disconnecting and self.producer is None):
            return
        self.buffer += data
        self.written += len(data)
        if len(self.buffer) > self.capacity and self._streaming and self.producer and not self._producer_paused:
            self._producer_paused = True
            self.producer.pauseProducing()

    def writeSequence(self, data: Any) -> None:
        """Take all of ``data``."""
        self.write(b"".join(data))

    def loseConnection(self) -> None:
        """Close once drained and the producer is done."""
        if not self.disconnecting:
            self.disconnecting = True
            self._finish_closing()

    def abortConnection(self) -> None:
        """Drop everything now."""
        if not self.aborted and not self.disconnected:
            self.aborted = True
            self.buffer.clear()
            self.clock.callLater(0, self.lose, ConnectionAborted())

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """As on TCP."""
        if self.producer is not None:
            raise RuntimeError("a producer is registered already")
        if self.disconnected:
            producer.stopProducing()
            return
        self.producer, self._streaming, self._producer_paused = producer, streaming, False
        if not streaming:
            producer.resumeProducing()

    def unregisterProducer(self) -> None:
        """As on TCP."""
        self.producer = None
        self._finish_closing()

    def pauseProducing(self) -> None:
        """Give the protocol nothing."""
        self.reading = False

    def resumeProducing(self) -> None:
        """Give the protocol what waits, and go on."""
        self.reading = True
        self._read()

    def stopProducing(self) -> None:
        """As ``loseConnection``."""
        self.loseConnection()

    def loseWriteConnection(self) -> None:
        """End our direction once drained."""
        self.write_closed = True

    def getPeer(self) -> IPv4Address:
        """A made-up address."""
        return ADDRESS

    def getHost(self) -> IPv4Address:
        """A made-up address."""
        return ADDRESS

    def setTcpNoDelay(self, enabled: bool) -> None:
        """Nothing to do."""

    def getTcpNoDelay(self) -> bool:
        """Always true."""
        return True

    def setTcpKeepAlive(self, enabled: bool) -> None:
        """Nothing to do."""

    def getTcpKeepAlive(self) -> bool:
        """Always true."""
        return True


class TransportPair:
    """Two ``SlowTransport`` whose written bytes reach each other when ``pump`` is called."""

    def __init__(self, clock: Clock, capacity: int = 64 * KiB) -> None:
        self.clock = clock
        self.a, self.b = SlowTransport(clock, capacity), SlowTransport(clock, capacity)
        self._told = {id(self.a): False, id(self.b): False}

    def pump(self) -> bool:
        """Move what can move once; True if something did."""
        moved = False
        for source, sink in ((self.a, self.b), (self.b, self.a)):
            # A reader that stopped leaves its sender's bytes where they are, as a full socket does.
            if source.buffer and sink.reading and sink.protocol is not None:
                sink.deliver(source.drain())
                moved = True
            if source.aborted and source.disconnected and not sink.disconnected:
                sink.lose(ConnectionLost())
                moved = True
            over = source.disconnected or (source.write_closed and not source.buffer)
            if over and not self._told[id(source)]:
                self._told[id(source)] = moved = True
                sink.end_of_data()
        return moved


class Recorder(Protocol):
    """
    A protocol that keeps what happened.

    Attributes:
        data: received bytes.
        lost: the reason of ``connectionLost``, or None.
    """

    def __init__(self, on_data: Callable[[bytes], None] | None = None) -> None:
        self.data = bytearray()
        self.lost: Failure | None = None
        self._on_data = on_data

    def dataReceived(self, data: bytes) -> None:
        """Keep ``data``."""
        self.data += data
        if self._on_data is not None:
            self._on_data(data)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        """Keep ``reason``."""
        self.lost = reason


__all__ = [
    "ADDRESS",
    "CarrierPair",
    "MemoryCarrier",
    "Recorder",
    "SessionPair",
    "SlowTransport",
    "TransportPair",
]
