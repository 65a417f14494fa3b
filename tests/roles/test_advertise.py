"""The address other frontends dial: found, refused, or only warned about."""

from __future__ import annotations

import socket
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.errors import UserMistake
from localai_dist.registry.membership import Membership
from localai_dist.roles import advertise
from localai_dist.roles.frontend import advertised
from localai_dist.settings.frontend import FrontendSettings
from localai_dist.settings.kinds import HostPort, parse_host_port

KNOB = "LOCALAI_DISTRIBUTED_ADVERTISE_ADDR"
DATABASE = "postgresql://user@db.example:5433/localai"

USELESS = [
    "127.0.0.1",
    "127.8.8.8",
    "::1",
    "::ffff:127.0.0.1",
    "169.254.7.7",
    "fe80::1",
    "fe80::1%eth0",
    "0.0.0.0",
    "::",
    "224.0.0.1",
]
"""Hosts no other machine can dial."""

USABLE = ["10.0.0.7", "192.168.1.2", "203.0.113.9", "2001:db8::7", "fd00::7"]


class FoundTests(SynchronousTestCase):
    """Nothing configured: a UDP connect toward the database tells."""

    def setUp(self) -> None:
        """What the connect tells is the test's."""
        self.asked: list[tuple[str, int]] = []
        self.found: str | Exception = "10.0.0.7"
        self.patch(advertise, "_toward", self._toward)

    def _toward(self, host: str, port: int) -> str:
        self.asked.append((host, port))
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def test_the_address_toward_the_database(self) -> None:
        """The local address that leads to the database is advertised with the frontend's own port (CLUS-5)."""
        for self.found in USABLE:
            address = advertise.discover(DATABASE, 8080)
            self.assertEqual((address.host, address.port), (self.found, 8080))
            self.assertEqual(parse_host_port(str(address)), address)
        self.assertEqual(set(self.asked), {("db.example", 5433)})

    def test_what_nobody_else_could_dial_is_refused_with_the_remedy(self) -> None:
        """Loopback, link-local, zoned, unspecified addresses are refused; the text names the knob (CLUS-5, BR-069)."""
        for self.found in USELESS:
            error = self.assertRaises(UserMistake, advertise.discover, DATABASE, 8080)
            self.assertIn(KNOB, str(error), self.found)
            self.assertIn(str(self.found), str(error))

    def test_a_port_nobody_could_dial_is_refused_with_the_remedy(self) -> None:
        """Port 0 and ports beyond 65535 are refused (CLUS-5, BR-069)."""
        for port in (0, -1, 70000):
            error = self.assertRaises(UserMistake, advertise.discover, DATABASE, port)
            self.assertIn(KNOB, str(error))
            self.assertIn(str(port), str(error))

    def test_no_way_to_the_database_is_refused_with_the_remedy(self) -> None:
        """A host that can't be looked up or routed to says so, and never the password (CLUS-5)."""
        for self.found in (OSError("no route"), socket.gaierror("no such host"), UnicodeError("label too long")):
            error = self.assertRaises(UserMistake, advertise.discover, "postgresql://u:secret@db.example/x", 8080)
            self.assertIn(KNOB, str(error))
            self.assertNotIn("secret", str(error))

    def test_where_the_database_is(self) -> None:
        """Every form of a database address that libpq reads is read the same way (CLUS-5)."""
        for url, asked in [
            ("postgresql://u@db.example/x", ("db.example", 5432)),
            ("postgresql://u@/x?host=db.example&port=7", ("db.example", 7)),
            ("postgresql://u@one.example:1,two.example:2/x", ("one.example", 1)),
            ("postgresql://u@[2001:db8::1]:6/x", ("2001:db8::1", 6)),
            ("host=db.example port=9 dbname=x", ("db.example", 9)),
            ("host=db.example hostaddr=10.1.1.1", ("10.1.1.1", 5432)),
            ("postgresql://u@/x?host=/run/postgresql", ("localhost", 5432)),
            ("dbname=x", ("localhost", 5432)),
        ]:
            self.asked.clear()
            advertise.discover(url, 8080)
            self.assertEqual(self.asked, [asked], url)

    def test_a_real_connect_toward_this_machine(self) -> None:
        """With the database on the same host the way there is loopback, which is refused (CLUS-5, BR-069)."""
        self.patch(advertise, "_toward", _REAL)
        for url in ("postgresql://u@127.0.0.1/x", "postgresql://u@localhost/x", "host=/run/postgresql"):
            error = self.assertRaises(UserMistake, advertise.discover, url, 8080)
            self.assertIn("this machine to everybody", str(error))


_REAL = advertise._toward


class ConfiguredTests(SynchronousTestCase):
    """An address the operator set."""

    def setUp(self) -> None:
        """Collect warnings."""
        self.warnings: list[str] = []

        def observe(event: Any) -> None:
            if event["log_level"].name == "warn" and "localai_dist.roles" in event["log_namespace"]:
                self.warnings.append(event["log_format"].format(**event))

        observer: Any = observe
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)

    def settings(self, configured: str | None, **more: Any) -> FrontendSettings:
        """A frontend's settings."""
        address = None if configured is None else parse_host_port(configured)
        return FrontendSettings(
            **{"auth_database_url": "host=/run/postgresql", "distributed_advertise_addr": address, **more}
        )

    def test_an_explicit_address_always_wins(self) -> None:
        """What is configured is advertised as it stands, useless or not; the database is not asked (CLUS-5, BR-069)."""
        self.patch(advertise, "_toward", lambda *args: self.fail("asked"))
        for host in [*USELESS, *USABLE, "frontend-1.example", "localhost"]:
            written = f"[{host}]:8080" if ":" in host else f"{host}:8080"
            self.warnings.clear()
            self.assertEqual(advertised(self.settings(written)), written)
            self.assertEqual(len(self.warnings), int(host in USELESS or host == "localhost"), host)
        self.warnings.clear()
        self.assertEqual(advertised(self.settings("10.0.0.7:0")), "10.0.0.7:0")
        self.assertEqual(len(self.warnings), 1)

    def test_one_without_a_host_is_a_mistake(self) -> None:
        """An address that names no host can't be meant (wire contract §0.6)."""
        error = self.assertRaises(UserMistake, advertised, self.settings(":8080"))
        self.assertIn(KNOB, str(error))

    def test_without_one_the_frontend_starts_and_says_the_remedy(self) -> None:
        """No usable address is no reason not to start: one warning that names the knob (CLUS-5, BR-069)."""
        self.patch(advertise, "_toward", lambda host, port: "127.0.0.1")
        self.assertIsNone(advertised(self.settings(None)))
        self.assertEqual(len(self.warnings), 1)
        self.assertIn(KNOB, self.warnings[0])
        self.patch(advertise, "_toward", lambda host, port: "10.0.0.7")
        self.assertEqual(advertised(self.settings(None, address=HostPort("", 8081))), "10.0.0.7:8081")


class WithoutAddressTests(SynchronousTestCase):
    """What a frontend without an address does in the cluster."""

    def test_it_is_registered_without_an_address(self) -> None:
        """Such a frontend has a row, so that its tunnels count as held, and in it no address (CLUS-5)."""
        rows: list[Any] = []

        class Instances:
            async def arrive(self, *row: Any) -> list[Any]:
                rows.append(row)
                return []

        instances: Any = Instances()
        member = Membership(
            instances,
            id="f1",  # type: ignore[arg-type]
            address=None,
            version="1",
            peer_token_hash="h",
            grace=90.0,
            reclaim=_nothing,
            clock=Clock(),
        )
        self.successResultOf(Deferred.fromCoroutine(member.join()))
        self.assertEqual(rows, [("f1", None, "1", "h")])


async def _nothing() -> None:
    pass
