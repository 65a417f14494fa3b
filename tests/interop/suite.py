"""What must work with any yamux peer, whichever end dials and whichever end opens the stream."""

from __future__ import annotations

from typing import Any, ClassVar

from twisted.internet import reactor as untyped_reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint, connectProtocol
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

from localai_dist.mux.errors import SessionClosing
from localai_dist.net.config import SessionConfig
from localai_dist.net.session import MuxSession
from localai_dist.net.stream import MuxStream
from tests.interop import peers
from tests.interop.tcp import TcpCarrier
from tests.tunnel.sockets import until

reactor: Any = untyped_reactor
CONFIG = SessionConfig()
MEGABYTE = 1_000_000


@implementer(IHalfCloseableProtocol)
class Conversation(Protocol):
    """
    One stream of ours: everything is written, its end too, then everything is read.

    Attributes:
        done: fires with what came, at the far side's end.
    """

    transport: Any

    def __init__(self, data: bytes, *, half_close: bool = True) -> None:
        self.data = data
        self.got = bytearray()
        self.done: Deferred[bytes] = Deferred()
        self._half_close = half_close

    def connectionMade(self) -> None:
        self.transport.write(self.data)
        if self._half_close:
            self.transport.loseWriteConnection()

    def dataReceived(self, data: bytes) -> None:
        self.got += data

    def readConnectionLost(self) -> None:
        self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        pass

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        if not self.done.called:
            if reason.check(ConnectionDone):
                self.done.callback(bytes(self.got))
            else:
                self.done.errback(reason)


@implementer(IHalfCloseableProtocol)
class Served(Protocol):
    """One stream of the peer's: ``e`` echoes, ``h`` counts."""

    transport: Any
    mode = b""
    held = 0

    def dataReceived(self, data: bytes) -> None:
        if not self.mode:
            self.mode, data = data[:1], data[1:]
        self.held += len(data)
        if self.mode == b"e":
            self.transport.write(data)

    def readConnectionLost(self) -> None:
        if self.mode == b"h":
            self.transport.write(b"%d" % self.held)
        self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        pass


class PeerSuite:
    """Mix into a trial ``TestCase`` that has ``command()`` and says who dials."""

    timeout = 120
    peer_dials: ClassVar[bool]
    half_closes: ClassVar[bool] = True

    def command(self) -> list[str]:
        """How the peer is started, ready to run."""
        raise NotImplementedError

    async def setUp(self: Any) -> None:
        command = self.command()
        if self.peer_dials:
            dialled: Deferred[TcpCarrier] = Deferred()
            factory = Factory()
            factory.noisy = False
            factory.buildProtocol = lambda address: _Told(dialled)  # type: ignore[method-assign]
            port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(factory)
            self.peer = peers.start(reactor, command, "dial", str(port.getHost().port))
            carrier = await dialled
            await port.stopListening()
        else:
            self.peer = peers.start(reactor, command, "listen")
            number = await self.peer.port
            carrier = await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", number), TcpCarrier())
        self.session = MuxSession(carrier, client=not self.peer_dials, config=CONFIG, clock=reactor)
        self.session.on_stream = lambda stream: stream.start(Served())
        self.session.begin()

    async def tearDown(self: Any) -> None:
        self.session.close()
        last = await self.peer.ended
        self.assertEqual(self.peer.errors, b"")
        self.assert_told_go_away(last)

    def assert_told_go_away(self, last: str) -> None:
        """Our close reached the peer as a go-away, by its last line."""
        raise NotImplementedError

    async def talk(self: Any, data: bytes, *, half_close: bool = True) -> bytes:
        """What the peer answers on a stream of its own."""
        stream: MuxStream = await self.session.open()
        conversation = Conversation(data, half_close=half_close)
        stream.start(conversation)
        return await conversation.done

    async def echoes(self: Any, count: int, size: int) -> None:
        """So many streams at once, each echoed whole."""
        sent = [b"e" + bytes((at * 11 + number) % 251 for at in range(251)) * (size // 251) for number in range(count)]
        got = await gatherResults([Deferred.fromCoroutine(self.talk(data)) for data in sent], consumeErrors=True)
        for data, answer in zip(sent, got, strict=True):
            self.assertEqual(answer, data[1:])
        self.assertEqual(self.session.stream_count, 0)

    async def test_echo(self: Any) -> None:
        """50 streams of 1 MB at once come back whole, opened by either end."""
        await self.echoes(50, MEGABYTE)
        self.assertEqual(await self.talk(b"o50 1000000\n", half_close=False), b"ok")

    async def test_500_streams(self: Any) -> None:
        """500 streams at once are all served, opened by either end, though no more than 256 may wait."""
        await self.echoes(500, 2510)
        self.assertEqual(await self.talk(b"o500 2500\n", half_close=False), b"ok")

    async def test_ping(self: Any) -> None:
        """Each end answers the other's pings."""
        self.assertEqual(await self.talk(b"p\n", half_close=False), b"ok")
        # A peer may answer our ping beside what it does for a stream, and so after it.
        await until(lambda: self.session.rtt is not None, "the answer to our ping")

    async def test_half_close(self: Any) -> None:
        """A stream half-closed by one end still carries the other's answer."""
        self.assertEqual(await self.talk(b"h" + bytes(MEGABYTE)), b"1000000")
        answer = await self.talk(b"b\n", half_close=False)
        self.assertEqual(answer, b"ok" if self.half_closes else b"unsupported")

    async def test_go_away_of_the_peer(self: Any) -> None:
        """The peer's go-away is heard, and no further stream is opened."""
        told: Deferred[None] = Deferred()
        self.session.on_go_away = lambda: told.callback(None)
        self.assertEqual(await self.talk(b"g\n", half_close=False), b"ok")
        await told
        self.failureResultOf(self.session.open(), SessionClosing)


class _Told(TcpCarrier):
    """Says when it is connected."""

    def __init__(self, connected: Deferred[TcpCarrier]) -> None:
        super().__init__()
        self._connected = connected

    def connectionMade(self) -> None:
        super().connectionMade()
        self._connected.callback(self)
