"""Outages as a worker meets them: every way in which a dial can fail, and a whole fleet that comes back at once."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any, cast

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IHostnameResolver, IHostResolution
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.logger import ILogObserver, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface import implementer

from localai_dist.backoff import Backoff
from localai_dist.ids import NodeId
from localai_dist.net.errors import DialFailed, DialRefused
from localai_dist.net.request import StreamingSite
from localai_dist.net.session import SessionConfig
from localai_dist.tunnel import dialer
from localai_dist.tunnel.acceptor import ConnectResource
from localai_dist.tunnel.dialer import TunnelClient
from localai_dist.tunnel.held import HeldTunnels
from tests.tunnel.doubles import ASession, Rows
from tests.tunnel.sockets import Nodes, cluster_root, no_connection_left, reactor, until

N = NodeId("n-1")

CAUSES: list[Exception] = [
    DialFailed("front:8080: connection reset"),
    DialFailed("front:8080: no WebSocket handshake within 10 s"),
    DialRefused(400, {}, "front:8080 answered 400"),
    DialRefused(404, {}, "front:8080 answered 404"),
    DialRefused(502, {}, "front:8080 answered 502"),
    DialRefused(503, {"retry-after": "7"}, "front:8080 answered 503"),
    DialFailed("front:8080: TLS alert: handshake failure"),
    DialFailed("front: DNS lookup failed"),
    DialRefused(301, {"location": "https://elsewhere/"}, "front:8080 answered 301"),
]


class Warnings:
    """What the tunnel logs at warning level, while a test runs."""

    def __init__(self, case: SynchronousTestCase | TestCase) -> None:
        self.lines: list[str] = []
        observer = cast(ILogObserver, self._observe)
        globalLogPublisher.addObserver(observer)
        case.addCleanup(globalLogPublisher.removeObserver, observer)

    def _observe(self, event: Any) -> None:
        if event["log_level"].name == "warn" and event["log_namespace"].startswith("localai_dist.tunnel"):
            self.lines.append(event["log_format"].format(**event))


class LongOutageTests(SynchronousTestCase):
    """A worker on a clock."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.warnings = Warnings(self)
        self.dials: list[float] = []
        self.cause: Exception | None = None
        self.sessions: list[ASession] = []
        self.open = 0
        self.client = TunnelClient(
            name="box",
            reactor=self.clock,
            urls=["http://front"],
            node_id=lambda: N,
            token=lambda: "t",
            on_stream=lambda stream: None,
            chance=random.Random(3).random,
            dial=self.dial,
        )

    def tearDown(self) -> None:
        """Nothing is left."""
        self.successResultOf(self.client.stopService())
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def dial(self, reactor: Any, url: str, **options: Any) -> Deferred[Any]:
        """Answered at once, as the outage has it."""
        self.assertEqual(self.open, 0, "two dial loops are alive")
        self.dials.append(self.clock.seconds())
        if self.cause is not None:
            return fail(self.cause)
        self.sessions.append(ASession(self.clock.seconds()))
        return succeed(self.sessions[-1])

    def test_each_kind_of_outage_for_two_minutes(self) -> None:
        """
        Through every kind of failure the worker keeps trying, capped and jittered, one warning per cause, and is back
        within one longest wait of the recovery (BR-024).
        """
        for cause in CAUSES:
            self.cause = cause
            self.dials.clear()
            before = len(self.warnings.lines)
            if not self.client.running:
                self.client.startService()
            self.clock.pump([0.25] * 480)
            self.assertGreaterEqual(len(self.dials), 4, cause)  # never given up
            waits = [later - earlier for earlier, later in zip(self.dials, self.dials[1:], strict=False)]
            self.assertLessEqual(max(waits), 30.25, cause)
            self.assertEqual(len(self.warnings.lines) - before, 1, cause)
            self.assertFalse(self.client.connected)
        self.cause = None
        self.clock.pump([0.25] * 121)
        self.assertTrue(self.client.connected)
        self.assertEqual(len(self.sessions), 1)

    def test_retry_after_is_honoured(self) -> None:
        """A frontend that asks for 7 s is not dialled before; a longer wish than our longest wait is cut (BR-024)."""
        for asked, least, most in (("7", 7.0, 7.51), ("3600", 30.0, 30.01), ("soon", 0.25, 0.51), ("", 0.25, 0.51)):
            self.cause = DialRefused(503, {"retry-after": asked}, "busy")
            self.client.startService()
            self.clock.pump([0.01] * 3100)
            self.assertGreaterEqual(self.dials[1] - self.dials[0], least - 0.01, asked)
            self.assertLessEqual(self.dials[1] - self.dials[0], most + 0.01, asked)
            self.tearDown()
            self.setUp()

    def test_a_cause_that_comes_back_is_told_again(self) -> None:
        """Causes that take turns are each told when they come; a recovery forgets them all (BR-024)."""
        self.client.startService()
        self.assertTrue(self.client.connected)
        for turn in range(2):
            for cause in CAUSES[:2]:
                self.cause = cause
                if self.sessions[-1].is_open:
                    self.sessions[-1].end()
                self.clock.pump([1.0] * 60)
            self.assertEqual(len(self.warnings.lines), 2 * (turn + 1))
        self.cause = None
        self.clock.pump([1.0] * 31)
        self.assertTrue(self.client.connected)
        self.cause = CAUSES[1]
        self.sessions[-1].end()
        self.clock.pump([1.0] * 60)
        self.assertEqual(len(self.warnings.lines), 5)

    def test_ten_minutes_without_anybody(self) -> None:
        """After a night's outage there is one dial loop, and the worker is back within one longest wait (BR-035)."""
        self.client.startService()
        self.sessions[-1].end()
        self.cause = DialFailed("front: DNS lookup failed")
        self.clock.pump([0.5] * 1200)
        self.dials.clear()
        self.clock.pump([0.5] * 120)
        self.assertLessEqual(len(self.dials), 5)  # two loops would dial twice as often
        self.cause = None
        self.clock.pump([0.5] * 61)
        self.assertTrue(self.client.connected)
        self.assertEqual(len(self.sessions), 2)


class FleetTests(SynchronousTestCase):
    """Many workers, one frontend that dies."""

    WORKERS = 200
    DOWN = 5.0

    def test_two_hundred_workers_come_back_spread(self) -> None:
        """
        200 workers that lost the same frontend in the same moment are back within a longest wait, each dials at most a
        handful of times, and no tenth of a second sees more than a tenth of them come (BR-103).
        """
        clock, chance = Clock(), random.Random(11).random
        sessions: list[list[ASession]] = [[] for _ in range(self.WORKERS)]
        state = {"up": True}
        connects: list[float] = []
        dials: Counter[int] = Counter()

        def dial_of(worker: int) -> Any:
            def dial(reactor: Any, url: str, **options: Any) -> Deferred[Any]:
                dials[worker] += 1
                if not state["up"]:
                    return fail(DialFailed("refused"))
                connects.append(clock.seconds())
                sessions[worker].append(ASession(clock.seconds()))
                return succeed(sessions[worker][-1])

            return dial

        clients = [
            TunnelClient(
                name="box",
                reactor=clock,
                urls=["http://front"],
                node_id=lambda: N,
                token=lambda: "t",
                on_stream=lambda stream: None,
                chance=chance,
                dial=dial_of(worker),
            )
            for worker in range(self.WORKERS)
        ]
        for client in clients:
            client.startService()
        clock.advance(60)
        connects.clear()
        dials.clear()
        began, state["up"] = clock.seconds(), False
        for each in sessions:
            each[-1].end()
        clock.pump([0.02] * int(self.DOWN / 0.02))
        state["up"] = True
        back = clock.seconds()
        clock.pump([0.02] * int(60 / 0.02))
        self.assertTrue(all(client.connected for client in clients))
        self.assertEqual(len(connects), self.WORKERS)
        self.assertLess(max(connects) - began, 90)
        self.assertLessEqual(max(dials.values()), 7)
        span = max(connects) - back
        tenths = Counter(int((at - back) * 10) for at in connects)
        self.assertGreater(span, 2.0)  # not one wave
        self.assertLessEqual(max(tenths.values()), self.WORKERS // 10)
        for client in clients:
            self.successResultOf(client.stopService())


class Hostile(Protocol):
    """A server that does one wrong thing to whoever connects."""

    def __init__(self, how: str, met: Counter[str]) -> None:
        self._how = how
        self._met = met

    def connectionMade(self) -> None:
        """The wrong thing."""
        transport: Any = self.transport
        self._met[self._how] += 1
        if self._how == "reset":
            transport.abortConnection()
        elif self._how == "garbage":
            transport.write(b"\x15\x03\x01\x00\x02\x02\x28")  # a TLS alert to somebody who speaks no TLS
            transport.loseConnection()
        elif self._how.isdigit():
            more = b"Location: http://elsewhere.invalid/\r\n" if self._how == "302" else b""
            transport.write(b"HTTP/1.1 " + self._how.encode() + b" So It Is\r\nContent-Length: 0\r\n" + more + b"\r\n")
            transport.loseConnection()


class RealOutageTests(TestCase):
    """A worker and real sockets."""

    timeout = 60

    def setUp(self) -> None:
        self.patch(dialer, "DIAL_TIMEOUT", 0.3)
        self.met: Counter[str] = Counter()
        self.warnings = Warnings(self)
        self.held = HeldTunnels(Rows(), "here", clock=reactor)  # type: ignore[arg-type]

    def listen(self, factory: Any, port: int = 0, interface: str = "127.0.0.1") -> Any:
        """A listening port that closes with the test."""
        return reactor.listenTCP(port, factory, interface=interface)

    def site(self) -> StreamingSite:
        """A frontend's door."""
        door = ConnectResource(nodes=Nodes(), held=self.held, config=SessionConfig(), clock=reactor)
        return StreamingSite(cluster_root(connect=door), max_body=1024, reactor=reactor)

    def worker(self, url: str) -> TunnelClient:
        """A worker that redials fast."""
        return TunnelClient(
            name="box",
            reactor=reactor,
            urls=[url],
            node_id=lambda: N,
            token=lambda: "t",
            on_stream=lambda stream: None,
            chance=random.Random(5).random,
            backoff=Backoff(first=0.02, cap=0.05),
        )

    async def test_every_wrong_answer_in_turn(self) -> None:
        """Reset, silence, garbage, refusals, a redirect: the worker dials on, and is in when the door is (BR-024)."""
        how = {"now": "reset"}
        factory = Factory.forProtocol(lambda: Hostile(how["now"], self.met))
        port = self.listen(factory)
        number = port.getHost().port
        client = self.worker(f"http://127.0.0.1:{number}")
        client.startService()
        for kind in ("reset", "silence", "garbage", "302", "400", "404", "502", "503"):
            how["now"] = kind
            await until(lambda kind=kind: self.met[kind] >= 3, f"three dials met {kind}")  # type: ignore[misc]
            self.assertFalse(client.connected)
        await port.stopListening()
        self.assertTrue(self.warnings.lines)
        for line, following in pairwise(self.warnings.lines):
            self.assertNotEqual(line, following, "a cause that lasts is told once")
        port = self.listen(self.site(), number)
        await until(lambda: client.connected and self.held.get(N) is not None, "the worker is in")
        await client.stopService()
        await self.held.release_all()
        await port.stopListening()
        await no_connection_left()

    async def test_a_name_that_moves_to_another_address(self) -> None:
        """The frontend's name is looked up on each dial, so one that moved is found (BR-035)."""
        first = self.listen(self.site(), interface="127.0.0.1")
        number = first.getHost().port
        resolver = Resolver("127.0.0.1")
        before = reactor.installNameResolver(resolver)
        self.addCleanup(reactor.installNameResolver, before)
        client = self.worker(f"http://front.test:{number}")
        client.startService()
        await until(lambda: client.connected and self.held.get(N) is not None, "the worker is in")
        await first.stopListening()
        second = self.listen(self.site(), number, "127.0.0.2")
        resolver.address = "127.0.0.2"
        for tunnel in self.held.sessions().values():
            tunnel.abort(Exception("the old machine is off"))
        await until(lambda: any(s.is_open for s in self.held.sessions().values()), "it is in at the new address")
        self.assertGreaterEqual(resolver.asked, 2)
        await client.stopService()
        await self.held.release_all()
        await second.stopListening()
        await no_connection_left()


@implementer(IHostnameResolver)
class Resolver:
    """One name for one address, which changes."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked = 0

    def resolveHostName(
        self, resolutionReceiver: Any, hostName: str, portNumber: int = 0, *_types: Any, **_more: Any
    ) -> Any:
        """Answer at once."""
        self.asked += 1

        @implementer(IHostResolution)
        class Resolution:
            name = hostName

            def cancel(self) -> None:
                """Too late."""

        resolution = Resolution()
        resolutionReceiver.resolutionBegan(resolution)
        resolutionReceiver.addressResolved(IPv4Address("TCP", self.address, portNumber))
        resolutionReceiver.resolutionComplete()
        return resolution
