"""Tunnels end when their identity changes hands."""

from __future__ import annotations

from collections.abc import Mapping

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import LogEvent, Logger, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import InstanceId, NodeId
from localai_dist.store.errors import StoreUnavailable
from localai_dist.tunnel.held import HeldTunnels
from localai_dist.tunnel.identities import AGAIN, INTERVAL, IdentityWatch
from tests.tunnel.doubles import ASession, Rows, session

A, B = NodeId("a"), NodeId("b")


class IdentityWatchTests(SynchronousTestCase):
    """Two held tunnels and what the registry says of their tokens."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.held = HeldTunnels(Rows(), InstanceId("here"), clock=self.clock)
        self.tokens = {A: "one", B: "two"}
        self.down = False
        self.waiting: Deferred[None] | None = None
        self.asked: list[set[NodeId]] = []
        self.watch = IdentityWatch(self.held, self.still_theirs, clock=self.clock)
        self.a, self.b = self.hold(A, "one"), self.hold(B, "two")

    def tearDown(self) -> None:
        """No timer is left."""
        self.watch.stop()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def hold(self, node: NodeId, credential: str) -> ASession:
        """A tunnel that is held."""
        tunnel = session()
        self.successResultOf(Deferred.fromCoroutine(self.held.attach(node, tunnel, credential=credential)))
        return tunnel

    async def still_theirs(self, credentials: Mapping[NodeId, str]) -> set[NodeId]:
        """As the registry says."""
        self.asked.append(set(credentials))
        if self.waiting is not None:
            await self.waiting
        if self.down:
            raise StoreUnavailable("away")
        return {node for node, digest in credentials.items() if self.tokens.get(node) == digest}

    def test_the_log_names_the_node(self) -> None:
        """The line about a tunnel that was ended has the node's name, and its id to look for it elsewhere (CLUS-8)."""
        events: list[LogEvent] = []
        self.patch(IdentityWatch, "log", Logger(observer=events.append))
        self.held.names.learn(A, "worker-1")
        self.tokens[A] = "newcomer's"
        self.watch.check_soon(A)
        self.assertIn("ended the tunnel of node worker-1 (a)", formatEvent(events[-1]))

    def test_a_swapped_identity_and_a_removed_node(self) -> None:
        """Who lost its name, or its row, loses its tunnel; the others keep theirs (CLUS-8)."""
        self.watch.check_soon()
        self.assertEqual((self.a.closed_here, self.b.closed_here), (False, False))
        self.tokens[A] = "newcomer's"
        self.watch.check_soon(B)
        self.assertFalse(self.a.closed_here)
        self.watch.check_soon(A)
        self.assertEqual((self.a.closed_here, self.b.closed_here), (True, False))
        del self.tokens[B]
        self.watch.check_soon(B)
        self.assertTrue(self.b.closed_here)
        self.assertEqual(self.asked, [{A, B}, {B}, {A}, {B}])

    def test_nothing_held_is_nothing_asked(self) -> None:
        """A word about a node that is held elsewhere costs no statement."""
        self.watch.check_soon(NodeId("c"))
        self.assertEqual(self.asked, [])

    def test_the_newcomers_tunnel_is_not_ended_for_the_old_one(self) -> None:
        """A tunnel that was attached while the registry was asked about the older one stays."""
        waiting = self.waiting = Deferred()
        self.tokens[A] = "newcomer's"
        self.watch.check_soon(A)
        newer = self.hold(A, "newcomer's")
        self.waiting = None
        waiting.callback(None)
        self.assertFalse(newer.closed_here)

    def test_a_database_that_is_away_ends_nothing(self) -> None:
        """Without an answer every tunnel stays, and all are looked at as soon as there is one."""
        self.tokens[A] = "newcomer's"
        self.down = True
        self.watch.check_soon(A)
        self.watch.check_soon(A)
        self.assertFalse(self.a.closed_here)
        self.down = False
        self.clock.advance(AGAIN)
        self.assertEqual((self.a.closed_here, self.b.closed_here), (True, False))

    def test_what_nobody_heard_is_seen_within_a_minute(self) -> None:
        """A change that no message told of is found by the look of the minute."""
        self.watch.start()
        self.tokens[A] = "newcomer's"
        self.clock.advance(INTERVAL)
        self.assertTrue(self.a.closed_here)

    def test_stopped(self) -> None:
        """A frontend that stops looks no more."""
        self.down = True
        self.watch.check_soon()
        self.watch.stop()
        self.down = False
        del self.tokens[A]
        self.watch.check_soon()
        self.assertFalse(self.a.closed_here)

    def test_a_fault_of_ours_is_logged(self) -> None:
        """A defect is not swallowed, and ends nothing."""
        self.tokens = None  # type: ignore[assignment]
        self.watch.check_soon()
        self.assertEqual(len(self.flushLoggedErrors(AttributeError)), 1)
        self.assertFalse(self.a.closed_here)
