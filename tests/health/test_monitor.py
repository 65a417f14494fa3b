"""The tick over all nodes."""

from collections.abc import Mapping, Sequence

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.health.departure import Departures
from localai_dist.health.monitor import HealthMonitor
from localai_dist.ids import NodeId
from localai_dist.reach import NoRoute, Outcome
from localai_dist.registry.presence import Presence, PresenceState
from localai_dist.registry.records import Node
from localai_dist.store.errors import StoreUnavailable


class MemoryRegistry:
    """Nodes and presences in memory; what was asked of them is kept."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.presences: dict[NodeId, Presence] = {}
        self.acts: list[tuple[str, NodeId]] = []
        self.outcomes: list[Outcome] = []
        self.away = False
        self.away_for_writes = False

    def add(self, name: str, status: str, state: PresenceState | None) -> None:
        self.nodes.append(Node(NodeId(name), name, "backend", status, True))
        if state is not None:
            self.presences[NodeId(name)] = Presence(state)

    async def all(self) -> Sequence[Node]:
        if self.away:
            raise StoreUnavailable("gone")
        return self.nodes

    async def mark_stale_offline(self, stale_after: float) -> Sequence[NodeId]:
        if self.away:
            raise StoreUnavailable("gone")
        self.acts.append(("stale", NodeId("")))
        return []

    async def mark_unhealthy(self, node_id: NodeId, outcome: Outcome) -> bool:
        if self.away_for_writes:
            raise StoreUnavailable("gone")
        self.acts.append(("unhealthy", node_id))
        self.outcomes.append(outcome)
        return True

    async def mark_healthy(self, node_id: NodeId, *, fresh_within: float) -> bool:
        self.acts.append(("healthy", node_id))
        return True

    async def presence_many(self, nodes: Sequence[NodeId], grace: float) -> Mapping[NodeId, Presence]:
        return self.presences


class MonitorTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.registry = MemoryRegistry()
        self.monitor = HealthMonitor(
            self.registry, self.registry, Departures({}, names=()), clock=self.clock, interval=15.0
        )

    def test_a_departed_node_leaves_placement(self) -> None:
        """
        A node whose tunnel outlived the grace is demoted, on the routing fact and nothing else.
        """
        self.registry.add("gone", "healthy", PresenceState.DEPARTED)
        self.registry.add("back-soon", "healthy", PresenceState.RECONNECTING)
        self.registry.add("new", "healthy", None)
        self.registry.add("again", "unhealthy", PresenceState.CONNECTED)
        self.successResultOf(Deferred.fromCoroutine(self.monitor.look()))
        self.assertEqual(
            self.registry.acts, [("stale", ""), ("unhealthy", NodeId("gone")), ("healthy", NodeId("again"))]
        )
        self.assertEqual(self.registry.outcomes, [NoRoute("gone", departed=True)])

    def test_it_looks_at_intervals_and_outlives_the_database(self) -> None:
        """
        A registry that can't be read changes nothing, and the next tick looks again.
        """
        self.monitor.start()
        self.registry.away = True
        self.clock.advance(15.0)
        self.assertEqual(self.registry.acts, [])
        self.registry.away = False
        self.clock.pump([15.0, 15.0])
        self.assertEqual(self.registry.acts, [("stale", "")])
        self.successResultOf(Deferred.fromCoroutine(self.monitor.stop()))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_nobody_is_called_silent_right_after_an_outage(self) -> None:
        """
        While the database was away no heartbeat could be written, so the first look afterwards judges no silence.
        """
        look = self.monitor.look
        self.successResultOf(Deferred.fromCoroutine(look()))
        self.registry.acts.clear()
        self.registry.away = True
        for _ in range(3):
            self.successResultOf(Deferred.fromCoroutine(look()))
        self.registry.away = False
        self.successResultOf(Deferred.fromCoroutine(look()))
        self.assertEqual(self.registry.acts, [])
        self.successResultOf(Deferred.fromCoroutine(look()))
        self.assertEqual(self.registry.acts, [("stale", "")])
