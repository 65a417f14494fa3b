"""
Two frontends and a worker in memory.

``here`` is the frontend under test, ``there`` the one that holds the worker's tunnel unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import Epoch, InstanceId, NodeId
from localai_dist.net.handshake import read_frame, write_frame
from localai_dist.net.session import MuxSession
from localai_dist.net.stream import MuxStream
from localai_dist.reach import Outcome, Unreached
from localai_dist.registry.presence import NEVER_DIALLED, Presence, PresenceState, RouteFact
from localai_dist.relay.forward import Forwarder
from localai_dist.relay.peers import PeerPool
from localai_dist.relay.serve import RelayService
from localai_dist.store.errors import StoreUnavailable
from localai_dist.testing.memory import SessionPair

T = TypeVar("T")

N = NodeId("n-1")
HERE, THERE = InstanceId("here"), InstanceId("there")
OWNED_THERE = RouteFact(Presence(PresenceState.CONNECTED, THERE, Epoch(1)), THERE, "10.0.0.2:8080", Epoch(1))
OWNED_HERE = RouteFact(Presence(PresenceState.CONNECTED, HERE, Epoch(1)), HERE, "10.0.0.1:8080", Epoch(1))


def without(state: PresenceState, grace_left: float | None = None) -> RouteFact:
    """Nobody holds the tunnel."""
    return RouteFact(Presence(state, grace_left=grace_left), None, None, None)


class Held:
    """The tunnels one frontend holds."""

    def __init__(self, instance: InstanceId) -> None:
        self.instance = instance
        self.tunnels: dict[NodeId, MuxSession] = {}

    def get(self, node: NodeId) -> MuxSession | None:
        """An open one."""
        session = self.tunnels.get(node)
        return session if session is not None and session.is_open else None


class Registry:
    """What PostgreSQL says of the route, how often it was asked, and how long it takes."""

    def __init__(self) -> None:
        self.fact = RouteFact(NEVER_DIALLED, None, None, None)
        self.down = False
        self.asked = 0
        self.hang: Deferred[None] | None = None

    async def route(self, node: NodeId, *, grace: float) -> RouteFact:
        """One reading."""
        self.asked += 1
        if self.hang is not None:
            await self.hang
        if self.down:
            raise StoreUnavailable("the database is away")
        return self.fact


class Worker:
    """The worker's end of its tunnel: answers opening frames with ``reply``, then echoes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.reply: bytes | None = b"ok"
        self.requests: list[bytes] = []
        self.streams: list[MuxStream] = []
        self.on_joined: Callable[[MuxStream], None] = lambda stream: None

    def serve(self, stream: MuxStream) -> None:
        """One stream."""
        stream.accept()
        self.streams.append(stream)
        Deferred.fromCoroutine(self._serve(stream)).addErrback(lambda failure: None)

    async def _serve(self, stream: MuxStream) -> None:
        self.requests.append(await read_frame(stream, clock=self.clock, timeout=15))
        if self.reply is None:
            return
        write_frame(stream, self.reply)
        if self.reply == b"ok":
            self.on_joined(stream)
        else:
            stream.loseConnection()


class MeshCase(SynchronousTestCase):
    """Two frontends, a worker, one clock."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1000)
        self.pairs: list[SessionPair] = []
        self.worker = Worker(self.clock)
        self.here, self.there = Held(HERE), Held(THERE)
        self.registry = Registry()
        self.dials: list[tuple[str, dict[str, Any]]] = []
        self.dial_error: Exception | None = None
        self.dial_hang: Deferred[None] | None = None
        self.links: list[SessionPair] = []
        self.relay = RelayService(self.there, clock=self.clock)
        self.serve_link: Callable[[MuxStream], None] = self.relay.serve
        self.pool = PeerPool(
            reactor=self.clock, instance=HERE, registration_token="shared", secret="mine", dial=self.dial
        )
        self.forwarder = Forwarder(self.here, self.pool, self.registry, clock=self.clock, grace=90.0)

    def tearDown(self) -> None:
        """Once every session is closed no timer is left."""
        self.pool.close()
        for pair in self.pairs:
            pair.close()
        self.settle()
        self.clock.advance(20)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def pair(self) -> SessionPair:
        """Two sessions on the common clock."""
        pair = SessionPair(clock=self.clock)
        self.pairs.append(pair)
        return pair

    def tunnel(self, held: Held, node: NodeId = N) -> SessionPair:
        """The worker's tunnel ends at ``held``: the frontend is the yamux server."""
        pair = self.pair()
        pair.client.on_stream = self.worker.serve
        held.tunnels[node] = pair.server
        return pair

    async def dial(self, reactor: Any, url: str, **options: Any) -> MuxSession:
        """``here`` dials its peer."""
        self.dials.append((url, options))
        if self.dial_hang is not None:
            await self.dial_hang
        if self.dial_error is not None:
            raise self.dial_error
        link = self.pair()
        link.server.on_stream = lambda stream: self.serve_link(stream)
        self.links.append(link)
        return link.client

    def settle(self) -> None:
        """Until nothing moves any more."""
        for _ in range(1000):
            self.clock.advance(0)
            moved = [pair.carriers.pump() for pair in self.pairs]  # all of them, not up to the first
            if not any(moved) and not self.due():
                return
        self.fail("still busy")

    def due(self) -> bool:
        """Whether a timer is due now."""
        return any(call.getTime() <= self.clock.seconds() for call in self.clock.getDelayedCalls())

    def pass_time(self, seconds: float) -> None:
        """Let time pass in small steps, so that keepalives are answered."""
        end = self.clock.seconds() + seconds
        while self.clock.seconds() < end - 1e-9:
            self.settle()
            self.clock.advance(min(1.0, end - self.clock.seconds()))
        self.settle()

    def begin(self, work: Coroutine[Any, Any, T]) -> Deferred[T]:
        """Start ``work`` and let it get as far as it can without time passing."""
        started = Deferred.fromCoroutine(work)
        self.settle()
        return started

    def result(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns at once."""
        return self.successResultOf(self.begin(work))

    def assert_outcome(self, outcome: Outcome, work: Deferred[Any]) -> None:
        """``work`` failed with exactly ``outcome``."""
        self.assertEqual(self.failureResultOf(work, Unreached).value.outcome, outcome)

    def outcome(self, work: Coroutine[Any, Any, Any]) -> Outcome:
        """The outcome with which ``work`` fails at once."""
        return self.failureResultOf(self.begin(work), Unreached).value.outcome
