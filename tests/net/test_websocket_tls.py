"""Sessions over WebSockets over TLS."""

from __future__ import annotations

import datetime
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from OpenSSL.crypto import X509, PKey
from twisted.internet import reactor as untyped_reactor
from twisted.internet.ssl import Certificate, CertificateOptions, trustRootFromCertificates

from localai_dist.mux.classes import TrafficClass
from localai_dist.net.errors import DialFailed
from localai_dist.testing.streams import Source
from localai_dist.units import MiB
from tests.net.test_websocket import Finished, WebSocketCase, pause

reactor: Any = untyped_reactor


class TlsTests(WebSocketCase):
    """The same over TLS, where the transport only pushes (MUX-12)."""

    async def setUp(self) -> None:
        await super().setUp()
        await self.port.stopListening()
        key, self.certificate = make_certificate()
        options = CertificateOptions(privateKey=key, certificate=self.certificate)
        self.port = reactor.listenSSL(0, self.site(), options, interface="127.0.0.1")
        self.url = f"https://localhost:{self.port.getHost().port}/api/cluster/connect"

    async def test_transfer(self) -> None:
        """20 MiB arrive over wss, and nothing spins while the session is idle."""
        there = Finished()
        self.root.on_stream = lambda stream: stream.start(there)
        trust = trustRootFromCertificates([Certificate(self.certificate)])
        session = await self.dial(tls_trust=trust)
        stream = await session.open(TrafficClass.BULK)
        stream.start(Finished())
        Source(stream, 20 * MiB, closing=True).begin()
        await there.done
        self.assertEqual(len(there.data), 20 * MiB)
        turns = 0
        wait = reactor.doIteration

        def turn(seconds: float | None) -> None:
            nonlocal turns
            turns += 1
            wait(seconds)

        self.patch(reactor, "doIteration", turn)
        await pause(0.3)
        self.assertLess(turns, 300)

    async def test_untrusted(self) -> None:
        """A certificate nobody vouches for is a failed dial."""
        with self.assertRaises(DialFailed):
            await self.dial()


def make_certificate(host: str = "localhost") -> tuple[Any, Any]:
    """A key and a self-signed certificate for ``host``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return PKey.from_cryptography_key(key), X509.from_cryptography(certificate)
