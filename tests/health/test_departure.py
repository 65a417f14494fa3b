"""Who is told that a node departed, when, and how often."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.health.departure import ROUTES, SUBSCRIBERS, Departure, Departures
from localai_dist.health.monitor import HealthMonitor
from localai_dist.ids import Epoch, NodeId
from localai_dist.registry.presence import Presence, PresenceState
from localai_dist.registry.records import Node
from tests.health.test_monitor import MemoryRegistry

A, B = NodeId("a"), NodeId("b")


def node(id: str = "a", node_type: str = "backend", status: str = "healthy") -> Node:
    """A registered node."""
    return Node(NodeId(id), f"node-{id}", node_type, status, True)


def at(state: PresenceState, epoch: int = 1) -> Presence:
    """A presence, by the claim of that epoch."""
    return Presence(state, epoch=None if state is PresenceState.NEVER_DIALLED else Epoch(epoch))


class DeparturesTests(SynchronousTestCase):
    """The announcement point."""

    def setUp(self) -> None:
        self.told: list[Departure] = []
        self.departures = Departures({ROUTES: self.told.append})

    def look(self, state: PresenceState, epoch: int = 1, **facts: str) -> int:
        """One look at one node; how many announcements there were by now."""
        self.departures.look([(node(**facts), at(state, epoch))])
        return len(self.told)

    def test_the_set_of_subscribers_is_closed(self) -> None:
        """A frontend starts with exactly the subscribers that are named, no more and no fewer (CLUS-27)."""
        self.assertIn("missing ['routes']", str(self.assertRaises(ValueError, Departures, {})))
        both = {ROUTES: self.told.append, "else": self.told.append}
        self.assertIn("unknown ['else']", str(self.assertRaises(ValueError, Departures, both)))
        self.assertEqual(SUBSCRIBERS, {"routes"})

    def test_once_per_edge_and_again_after_a_return(self) -> None:
        """A departure is told once however long it lasts, and the next one after a return again (CLUS-27)."""
        for kind in ("backend", "agent"):
            self.told.clear()
            epoch = 1 if kind == "backend" else 100
            self.assertEqual(self.look(PresenceState.CONNECTED, epoch, node_type=kind), 0)
            self.assertEqual(self.look(PresenceState.RECONNECTING, epoch, node_type=kind), 0)
            for _ in range(3):
                self.assertEqual(self.look(PresenceState.DEPARTED, epoch, node_type=kind), 1)
            self.assertEqual(self.told, [Departure(A, "node-a", kind)])
            self.assertEqual(self.look(PresenceState.CONNECTED, epoch + 1, node_type=kind), 1)
            self.assertEqual(self.look(PresenceState.DEPARTED, epoch + 1, node_type=kind), 2)

    def test_a_return_nobody_saw(self) -> None:
        """A node that came back and departed again between two looks departed twice: its epoch says so (CLUS-27)."""
        self.assertEqual(self.look(PresenceState.DEPARTED, 1), 1)
        self.assertEqual(self.look(PresenceState.DEPARTED, 2), 2)

    def test_nothing_else_is_a_departure(self) -> None:
        """Not a loss inside the grace, a node that never dialled, a connected one, in whatever status (CLUS-27)."""
        for status in ("healthy", "unhealthy", "offline", "draining", "pending"):
            for state in (PresenceState.NEVER_DIALLED, PresenceState.CONNECTED, PresenceState.RECONNECTING):
                self.assertEqual(self.look(state, status=status), 0)
        self.assertEqual(self.look(PresenceState.DEPARTED, status="offline"), 1)

    def test_subscribers_are_isolated(self) -> None:
        """One that fails is logged, and the others are told all the same."""
        told: list[Departure] = []
        departures = Departures({"bad": lambda departure: 1 // 0, "good": told.append}, names={"bad", "good"})  # type: ignore[dict-item]
        departures.look([(node(), at(PresenceState.DEPARTED))])
        self.assertEqual(len(told), 1)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_what_is_remembered_is_bounded_by_the_pass(self) -> None:
        """Nodes that are gone from the list are not remembered (CLUS-27)."""
        self.departures.look([(node(), at(PresenceState.DEPARTED)), (node("b"), at(PresenceState.DEPARTED, 2))])
        self.assertEqual(len(self.departures._announced), 2)
        self.departures.look([(node("b"), at(PresenceState.DEPARTED, 2))])
        self.assertEqual((list(self.departures._announced), len(self.told)), ([B], 2))


class MonitorTests(SynchronousTestCase):
    """The tick that announces."""

    def setUp(self) -> None:
        self.registry = MemoryRegistry()
        self.told: list[str] = []
        self.monitor = HealthMonitor(
            self.registry,
            self.registry,
            Departures({ROUTES: lambda departure: self.told.append(departure.name)}),
            clock=Clock(),
        )

    def look(self) -> None:
        """One tick."""
        self.successResultOf(Deferred.fromCoroutine(self.monitor.look()))

    def test_a_tick_tells_of_departures_and_of_nothing_else(self) -> None:
        """
        Both node types are told once by the tick; a loss inside the grace, a node that never dialled, a silent
        heartbeat with a connected tunnel, and a registry that does not answer tell nothing and forget nothing
        (CLUS-27).
        """
        self.registry.add("worker", "healthy", PresenceState.DEPARTED)
        self.registry.nodes.append(Node(NodeId("agent"), "agent", "agent", "healthy", True))
        self.registry.presences[NodeId("agent")] = Presence(PresenceState.DEPARTED)
        self.registry.add("lost", "healthy", PresenceState.RECONNECTING)
        self.registry.add("new", "healthy", None)
        self.registry.add("silent", "offline", PresenceState.CONNECTED)
        self.registry.away = True
        self.look()
        self.assertEqual(self.told, [])
        self.registry.away = False
        self.look()
        self.assertEqual(self.told, ["worker", "agent"])
        self.registry.away = True
        self.look()
        self.registry.away = False
        self.look()
        self.assertEqual(self.told, ["worker", "agent"])

    def test_a_demotion_that_fails_does_not_silence_it(self) -> None:
        """What was read is told even when the database goes away right after."""
        self.registry.add("worker", "healthy", PresenceState.DEPARTED)
        self.registry.away_for_writes = True
        self.look()
        self.assertEqual(self.told, ["worker"])
