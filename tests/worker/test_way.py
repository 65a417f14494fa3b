"""HTTP calls to a frontend by way of a proxy, over real loopback sockets."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.ssl import CertificateOptions
from twisted.trial.unittest import TestCase
from twisted.web.resource import Resource
from twisted.web.server import Site

from localai_dist.settings.proxies import parse_proxies
from localai_dist.worker.errors import NotReached
from localai_dist.worker.frontends import FrontendAnswer, Frontends
from tests.net.test_websocket_tls import make_certificate
from tests.support.connect_proxy import ConnectProxy
from tests.tunnel.sockets import no_connection_left, reactor


class Door(Resource):
    """Says who asked."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def render_POST(self, request: Any) -> bytes:
        self.asked.append(request.getHeader("host"))
        request.setHeader("connection", "close")
        return b'{"message": "you are in"}'


class WayTests(TestCase):
    timeout = 120

    async def setUp(self) -> None:
        self.door = Door()
        self.leads: dict[str, int] = {}
        self.proxy = ConnectProxy(self.leads, "joe:s3cret")
        self.proxy.__enter__()
        self.addCleanup(self.proxy.__exit__, None, None, None)

    def listen(self, tls: bool) -> int:
        """The frontend's port; the proxy leads to it by a name that nobody else knows."""
        site = Site(self.door)
        if tls:
            key, certificate = make_certificate("front.invalid")
            options = CertificateOptions(privateKey=key, certificate=certificate)
            listening = reactor.listenSSL(0, site, options, interface="127.0.0.1")
        else:
            listening = reactor.listenTCP(0, site, interface="127.0.0.1")
        self.addCleanup(no_connection_left)
        self.addCleanup(listening.stopListening)
        port: int = listening.getHost().port
        self.leads |= {f"front.invalid:{port}": port}
        return port

    def post(self, url: str, credentials: str = "joe:s3cret") -> Deferred[FrontendAnswer]:
        """One call, with the proxy for both schemes."""
        address = f"http://{credentials}@127.0.0.1:{self.proxy.port}"
        frontends = Frontends(
            reactor=reactor,
            urls=[url],
            registration_token="reg",
            proxies=parse_proxies({"HTTP_PROXY": address, "HTTPS_PROXY": address}),
        )
        return Deferred.fromCoroutine(frontends.post("/api/node/register", {"a": 1}))

    async def test_a_call(self) -> None:
        """The frontend is asked by its name, which only the proxy knows; ``ws`` in its address means the same."""
        port = self.listen(tls=False)
        for scheme in ("http", "ws"):
            answer = await self.post(f"{scheme}://front.invalid:{port}")
            self.assertEqual((answer.status, answer.text), (200, "you are in"))
        self.assertEqual(self.proxy.asked, [f"front.invalid:{port}"] * 2)
        self.assertEqual(self.door.asked, [f"front.invalid:{port}"] * 2)

    async def test_tls_is_with_the_frontend(self) -> None:
        """With ``https`` or ``wss`` the certificate is asked of the frontend, behind the proxy; a wrong one is told."""
        port = self.listen(tls=True)
        for scheme in ("https", "wss"):
            with self.assertRaises(NotReached) as caught:
                await self.post(f"{scheme}://front.invalid:{port}")
            self.assertIn("certificate verify failed", str(caught.exception))
        self.assertEqual(self.proxy.asked, [f"front.invalid:{port}"] * 2)
        self.assertEqual(self.door.asked, [])

    async def test_a_refusal_names_the_proxy(self) -> None:
        """What the proxy did not let through is told by its name, without its password."""
        for credentials, url, told in (
            ("joe:wr0ng", f"http://front.invalid:{self.listen(tls=False)}", "wants credentials, the right ones (407)"),
            ("joe:s3cret", "http://other.invalid:80", "does not lead to other.invalid:80: it answers 403 Forbidden"),
        ):
            with self.assertRaises(NotReached) as caught:
                await self.post(url, credentials)
            text = str(caught.exception)
            self.assertIn(f"{url}: the proxy 127.0.0.1:{self.proxy.port} of HTTP_PROXY {told}", text)
            self.assertNotIn("wr0ng", text)
