"""Other people's protocols over tunnel streams, unchanged: they can't tell them from TCP (MUX-11)."""

from __future__ import annotations

from io import BytesIO
from typing import Any, Final

from autobahn.twisted.websocket import (
    WebSocketClientFactory,
    WebSocketClientProtocol,
    WebSocketServerFactory,
    WebSocketServerProtocol,
)
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.task import Cooperator
from twisted.web.client import Agent, FileBodyProducer, HTTPConnectionPool, readBody
from twisted.web.iweb import IAgentEndpointFactory
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site
from zope.interface import implementer

from localai_dist.net.stream import MuxStream
from localai_dist.relay.forward import Forwarder, GrpcTarget
from localai_dist.units import KiB, MiB
from tests.relay.mesh import OWNED_THERE, MeshCase, N

TARGET: Final = GrpcTarget("127.0.0.1:20001")


@implementer(IAgentEndpointFactory)
class ToNode:
    """Every URI leads to the node."""

    def __init__(self, forwarder: Forwarder) -> None:
        self.forwarder = forwarder
        self.connects = 0

    def endpointForURI(self, uri: Any) -> IStreamClientEndpoint:
        """The tunnel endpoint."""
        self.connects += 1
        return self.forwarder.endpoint(N, TARGET)


class Echo(Resource):
    """POST: the body comes back. GET /big: 5 MiB in pieces, as fast as they are taken. GET /later: when it is told."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Any] = []
        self.gone: list[Any] = []

    def render_POST(self, request: Any) -> bytes:
        body: bytes = request.content.read()
        return body

    def render_GET(self, request: Any) -> Any:
        if request.path == b"/later":
            self.waiting.append(request)
            request.notifyFinish().addErrback(self.gone.append)
            return NOT_DONE_YET
        pieces = Pieces(request)
        request.registerProducer(pieces, True)
        pieces.resumeProducing()
        return NOT_DONE_YET


class Pieces:
    """A push producer of 5 MiB."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.left = 5 * MiB
        self.paused = False

    def resumeProducing(self) -> None:
        """Until it is paused."""
        self.paused = False
        while self.left and not self.paused:
            self.left -= 64 * KiB
            self.request.write(b"p" * 64 * KiB)
        if not self.left:
            self.request.unregisterProducer()
            self.request.finish()

    def pauseProducing(self) -> None:
        """Wait."""
        self.paused = True

    def stopProducing(self) -> None:
        """Nobody reads."""
        self.left = 0


class EchoingWebSocket(WebSocketServerProtocol):  # type: ignore[misc]
    """Sends each message back."""

    def onMessage(self, payload: bytes, isBinary: bool) -> None:
        self.sendMessage(payload, isBinary)


class TalkingWebSocket(WebSocketClientProtocol):  # type: ignore[misc]
    """Says three things, keeps the answers, says goodbye."""

    SAID: Final = [("text", b"hello"), ("bytes", bytes(range(256)) * 1000), ("text", b"")]

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, bytes]] = []
        self.ended: Deferred[tuple[bool, int, str]] = Deferred()

    def onOpen(self) -> None:
        for kind, payload in self.SAID:
            self.sendMessage(payload, kind == "bytes")

    def onMessage(self, payload: bytes, isBinary: bool) -> None:
        self.heard.append(("bytes" if isBinary else "text", payload))
        if len(self.heard) == len(self.SAID):
            self.sendClose(4000, "enough")

    def onClose(self, wasClean: bool, code: int, reason: str) -> None:
        self.ended.callback((wasClean, code, reason))


class OwnTunnelTests(MeshCase):
    """Over the tunnel that ends here."""

    def setUp(self) -> None:
        super().setUp()
        self.connect()
        self.echo = Echo()
        site = Site(self.echo, reactor=self.clock)
        site.timeOut = None
        site.noisy = False
        self.worker.on_joined = lambda stream: self.attach(stream, site)
        self.way = ToNode(self.forwarder)
        self.pool_of_connections = HTTPConnectionPool(self.clock)
        self.agent = Agent.usingEndpointFactory(self.clock, self.way, self.pool_of_connections)

    def tearDown(self) -> None:
        self.pool_of_connections.closeCachedConnections()
        self.settle()
        super().tearDown()

    def connect(self) -> None:
        """Where the tunnel ends."""
        self.tunnel(self.here)

    def attach(self, stream: MuxStream, factory: Any) -> None:
        """The worker gives the stream to a server's protocol."""
        protocol = factory.buildProtocol(stream.getPeer())
        protocol.callLater = self.clock.callLater
        stream.start(protocol)

    def asked(self, method: bytes, path: bytes, body: bytes | None = None) -> bytes:
        """A request's whole answer."""
        cooperator = self.cooperator()
        producer = None if body is None else FileBodyProducer(BytesIO(body), cooperator=cooperator)
        asking = self.agent.request(method, b"http://node" + path, bodyProducer=producer)
        self.settle()
        reading = readBody(self.successResultOf(asking))
        self.settle()
        return self.successResultOf(reading)

    def cooperator(self) -> Any:
        """One that turns on the test's clock."""
        return Cooperator(scheduler=lambda step: self.clock.callLater(0, step), started=True)

    def test_agent_and_site(self) -> None:
        """An Agent posts 3 MiB and reads 5 MiB from a Site, twice on one persistent connection (MUX-11)."""
        body = bytes(range(256)) * (3 * MiB // 256)
        for _ in range(2):
            self.assertEqual(self.asked(b"POST", b"/", body), body)
            self.assertEqual(len(self.asked(b"GET", b"/big")), 5 * MiB)
        self.assertEqual(self.way.connects, 4)
        self.assertEqual(len(self.worker.streams), 1)

    def test_an_agent_that_gives_up(self) -> None:
        """A cancelled request of an Agent is seen as a lost client by the Site's request (MUX-11)."""
        asking = self.agent.request(b"GET", b"http://node/later")
        asking.addErrback(lambda failure: None)
        self.settle()
        self.assertEqual(len(self.echo.waiting), 1)
        asking.cancel()
        self.settle()
        self.assertEqual(len(self.echo.gone), 1)

    def test_websocket(self) -> None:
        """A WebSocket client and server talk over a stream, close code and all (MUX-11)."""
        server = WebSocketServerFactory(reactor=self.clock)
        server.protocol = EchoingWebSocket
        server.setProtocolOptions(echoCloseCodeReason=True)
        self.worker.on_joined = lambda stream: stream.start(server.buildProtocol(stream.getPeer()))
        client = WebSocketClientFactory("ws://node/", reactor=self.clock)
        client.protocol = TalkingWebSocket
        connecting = self.forwarder.endpoint(N, TARGET).connect(client)
        self.settle()
        talking: Any = self.successResultOf(connecting)
        self.assertEqual(talking.heard, TalkingWebSocket.SAID)
        self.assertEqual(self.successResultOf(talking.ended), (True, 4000, "enough"))
        # Its own timers of the handshakes run out.
        self.pass_time(30)


class RelayedTests(OwnTunnelTests):
    """The same over another frontend's tunnel."""

    def connect(self) -> None:
        """There."""
        self.tunnel(self.there)
        self.registry.fact = OWNED_THERE
