"""Connections by way of an HTTP proxy."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor as untyped_reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.interfaces import IProtocolFactory, IStreamClientEndpoint
from twisted.internet.protocol import Factory
from twisted.internet.ssl import Certificate, CertificateOptions, trustRootFromCertificates
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer
from zope.interface.verify import verifyObject

from localai_dist.mux.classes import TrafficClass
from localai_dist.net.errors import DialFailed
from localai_dist.net.proxy import ANSWER_WITHIN, LARGEST_HEAD, ConnectEndpoint, ProxyFailed
from localai_dist.settings.proxies import Proxies, Proxy, parse_proxies
from localai_dist.testing.memory import Recorder, SlowTransport
from localai_dist.testing.streams import Source
from localai_dist.units import MiB
from tests.net.test_websocket import Finished, WebSocketCase
from tests.net.test_websocket_tls import make_certificate
from tests.support.connect_proxy import ConnectProxy

reactor: Any = untyped_reactor
SECRET = "s3cret"
PROXY = Proxy("HTTPS_PROXY", "proxy.example", 3128, "Basic am9lOnMzY3JldA==")
ABOUT = "the proxy proxy.example:3128 of HTTPS_PROXY"


@implementer(IStreamClientEndpoint)
class There:
    """The way to the proxy, which the test opens."""

    def __init__(self) -> None:
        self.opening: list[tuple[Any, Deferred[Any]]] = []

    def connect(self, factory: IProtocolFactory) -> Deferred[Any]:
        """Wait for the test."""
        opening: Deferred[Any] = Deferred()
        self.opening.append((factory, opening))
        return opening


class AskingTests(SynchronousTestCase):
    """One connection, on a test's clock."""

    def setUp(self) -> None:
        self.clock, self.there = Clock(), There()
        self.endpoint = ConnectEndpoint(self.there, PROXY, "front.example:443", clock=self.clock)

    def tearDown(self) -> None:
        """Nothing is left to happen, once what was dropped has ended."""
        self.clock.advance(0)
        self.assertEqual([call for call in self.clock.getDelayedCalls() if call.active()], [])

    def connect(self) -> tuple[Deferred[Any], SlowTransport]:
        """A connection on which the proxy has just been asked."""
        connecting = self.endpoint.connect(Factory.forProtocol(Recorder))
        factory, opening = self.there.opening[-1]
        transport = SlowTransport(self.clock)
        asking = factory.buildProtocol(None)
        transport.connect(asking)
        opening.callback(asking)
        return connecting, transport

    def failure(self, connecting: Deferred[Any]) -> str:
        """Why it failed; the credentials are not in it."""
        text = str(self.failureResultOf(connecting, ProxyFailed).value)
        for secret in (SECRET, "joe", "Basic", "am9l"):
            self.assertNotIn(secret, text)
        return text

    def test_it_is_an_endpoint(self) -> None:
        """Whoever uses it can't tell it from TCP."""
        verifyObject(IStreamClientEndpoint, self.endpoint)

    def test_what_is_asked(self) -> None:
        """The proxy is asked for the name, which is not resolved here, with the credentials."""
        _, transport = self.connect()
        head = transport.drain().decode()
        self.assertEqual(head.split("\r\n"), [
            "CONNECT front.example:443 HTTP/1.1", "Host: front.example:443", "User-Agent: localai-dist",
            f"Proxy-Authorization: {PROXY.authorization}", "", "",
        ])  # fmt: skip
        transport.deliver(b"HTTP/1.1 200 OK\r\n\r\n")

    def test_bytes_after_the_head(self) -> None:
        """However the answer is cut, the byte after its head is the far end's first, and the way is free."""
        answer = b"HTTP/1.0 200 Connection established\r\nContent-Length: 5\r\nX: y\r\n\r\n"
        for step in (1, 7, len(answer), 500):
            connecting, transport = self.connect()
            transport.drain()
            sent = answer + b"server speaks first"
            for start in range(0, len(sent), step):
                transport.deliver(sent[start : start + step])
            inner = self.successResultOf(connecting)
            self.assertEqual(bytes(inner.data), b"server speaks first")
            self.assertIs(inner.transport, transport)
            self.assertIs(transport.protocol, inner, "nothing stands between the transport and its user")
            inner.transport.write(b"and we answer")
            self.assertEqual(transport.drain(), b"and we answer")
            self.assertFalse(transport.disconnected)

    def test_refusals(self) -> None:
        """407 says what to do, any other status is told in the proxy's own words; the connection is dropped."""
        for answer, told in (
            (b"HTTP/1.1 407 Proxy Authentication Required\r\nX: y\r\n\r\n<html>", "credentials, the right ones (407)"),
            (b"HTTP/1.1 403 Forbidden\r\n\r\n", "does not lead to front.example:443: it answers 403 Forbidden"),
            (b"HTTP/1.1 502 \x1b[31m\xff" + b"x" * 999 + b"\r\n\r\n", "it answers 502 [31m"),
            (b"HTTP/1.1 503\r\n\r\n", "it answers 503"),
            (b"HTTP/1.1 302 Found\r\nLocation: http://login\r\n\r\n", "it answers 302 Found"),
        ):
            connecting, transport = self.connect()
            transport.deliver(answer)
            text = self.failure(connecting)
            self.assertIn(ABOUT, text)
            self.assertIn(told, text)
            self.assertLess(len(text), 300)
            self.assertTrue(transport.aborted)

    def test_garbage(self) -> None:
        """What is no HTTP, or does not end, is told as that at once."""
        endless = b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * (LARGEST_HEAD // 6 + 1)
        for answer in (b"SSH-2.0-OpenSSH\r\n", b"\x16\x03\x01", b"HTTP/1.1 2xx\r\n\r\n", b"HTTP/1.1\r\n\r\n", endless):
            connecting, transport = self.connect()
            transport.deliver(answer)
            self.assertIn(f"{ABOUT} is none", self.failure(connecting))
            transport.deliver(b"more of it")
            self.assertTrue(transport.aborted)

    def test_silence(self) -> None:
        """A proxy that says nothing, or not enough, is given up after its time."""
        connecting, transport = self.connect()
        transport.deliver(b"HTTP/1.1 200 OK\r\n")
        self.clock.advance(ANSWER_WITHIN - 0.1)
        self.assertNoResult(connecting)
        self.clock.advance(0.2)
        self.assertIn(f"{ABOUT} did not answer within 8 s", self.failure(connecting))
        self.assertTrue(transport.aborted)

    def test_early_close(self) -> None:
        """A proxy that closes without an answer, or in the middle of one."""
        for early in (b"", b"HTTP/1.1 200 OK\r\n"):
            connecting, transport = self.connect()
            transport.deliver(early)
            transport.end_of_data()
            self.assertIn(f"{ABOUT} closed the connection", self.failure(connecting))

    def test_out_of_reach(self) -> None:
        """A proxy that can't be connected to is named with its variable."""
        connecting = self.endpoint.connect(Factory.forProtocol(Recorder))
        self.there.opening[-1][1].errback(ConnectionRefusedError())
        self.assertIn(f"{ABOUT} can't be reached: Connection was refused", self.failure(connecting))

    def test_cancelled(self) -> None:
        """Given up while it is connected to, or while it thinks: the connection is dropped, no timer is left."""
        connecting = self.endpoint.connect(Factory.forProtocol(Recorder))
        connecting.cancel()
        self.failureResultOf(connecting, CancelledError)
        connecting, transport = self.connect()
        connecting.cancel()
        self.failureResultOf(connecting, CancelledError)
        self.assertTrue(transport.aborted)
        transport.lose(ConnectionRefusedError())

    def test_nobody_to_connect(self) -> None:
        """A factory that declines drops the connection."""

        class Declining(Factory):
            def buildProtocol(self, addr: object) -> None:
                return None

        connecting = self.endpoint.connect(Declining())
        factory, opening = self.there.opening[-1]
        transport, asking = SlowTransport(self.clock), factory.buildProtocol(None)
        transport.connect(asking)
        opening.callback(asking)
        transport.deliver(b"HTTP/1.1 200 OK\r\n\r\n")
        self.failureResultOf(connecting, ProxyFailed)
        self.assertTrue(transport.aborted)


class SocketTests(WebSocketCase):
    """Sessions through a real proxy, at a name that only the proxy knows."""

    def through(self, scheme: str, credentials: str = f"joe:{SECRET}") -> tuple[ConnectProxy, Proxies]:
        """A proxy that leads to the test's site, and what a node knows of it."""
        port = self.port.getHost().port
        self.url = f"{scheme}://front.invalid:{port}/api/cluster/connect?id=n1"
        proxy = ConnectProxy({f"front.invalid:{port}": port}, f"joe:{SECRET}")
        proxy.__enter__()
        self.addCleanup(proxy.__exit__, None, None, None)
        address = f"http://{credentials}@127.0.0.1:{proxy.port}"
        return proxy, parse_proxies({"HTTP_PROXY": address, "HTTPS_PROXY": address})

    async def carry(self, **options: Any) -> None:
        """Dial, and move some megabytes."""
        there = Finished()
        self.root.on_stream = lambda stream: stream.start(there)
        session = await self.dial(**options)
        stream = await session.open(TrafficClass.BULK)
        stream.start(Finished())
        Source(stream, 5 * MiB, closing=True).begin()
        await there.done
        self.assertEqual(len(there.data), 5 * MiB)

    async def test_a_session(self) -> None:
        """A tunnel over plain WebSockets goes through the proxy, by the frontend's name."""
        proxy, proxies = self.through("http")
        await self.carry(proxies=proxies)
        self.assertEqual((len(proxy.asked), proxy.carried), (1, 1))

    async def test_a_session_over_tls(self) -> None:
        """TLS is with the frontend, not with the proxy: the certificate is that of the frontend's name."""
        await self.port.stopListening()
        key, certificate = make_certificate("front.invalid")
        options = CertificateOptions(privateKey=key, certificate=certificate)
        self.port = reactor.listenSSL(0, self.site(), options, interface="127.0.0.1")
        proxy, proxies = self.through("https")
        await self.carry(proxies=proxies, tls_trust=trustRootFromCertificates([Certificate(certificate)]))
        self.assertEqual(proxy.carried, 1)

    async def test_wrong_credentials(self) -> None:
        """The dial fails with the proxy's name and the remedy, and without the credentials."""
        proxy, proxies = self.through("ws", "joe:wr0ng")
        with self.assertRaises(DialFailed) as caught:
            await self.dial(proxies=proxies)
        self.assertIn(f"the proxy 127.0.0.1:{proxy.port} of HTTP_PROXY wants credentials", str(caught.exception))
        self.assertNotIn("wr0ng", str(caught.exception))
        self.assertEqual(proxy.refused, 1)
