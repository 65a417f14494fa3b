"""The tunnels a frontend holds."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import Epoch, InstanceId, NodeId
from localai_dist.mux.errors import SessionDead
from localai_dist.store.errors import StoreUnavailable
from localai_dist.tunnel.held import RECONCILE_AFTER, RELEASE_TIMEOUT, Attachment, HeldTunnels
from tests.tunnel.doubles import Rows, session

T = TypeVar("T")
N = NodeId("n-1")
HERE, THERE = InstanceId("here"), InstanceId("there")


def begin(work: Coroutine[Any, Any, T]) -> Deferred[T]:
    """Start ``work``."""
    return Deferred.fromCoroutine(work)


class HeldTunnelsTests(SynchronousTestCase):
    """Attach, detach, reclaim."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.rows = Rows()
        self.held = HeldTunnels(self.rows, HERE, clock=self.clock)

    def tearDown(self) -> None:
        """Nothing is left behind: no timer, no gate."""
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(self.held._gates, {})

    def test_claims_before_it_stores(self) -> None:
        """A tunnel is found here only once the database says that it is ours."""
        self.rows.hold = []
        tunnel = session()
        attaching = begin(self.held.attach(N, tunnel))
        self.assertIsNone(self.held.get(N))
        self.rows.hold.pop().callback(None)
        self.successResultOf(attaching)
        self.assertIs(self.held.get(N), tunnel)
        self.assertEqual(self.rows.rows[N], (HERE, 1))

    def test_a_failed_claim_holds_nothing(self) -> None:
        """Without the database's word no tunnel is held, and what the claim may have left is cleaned up later."""
        self.rows.down = True
        self.failureResultOf(begin(self.held.attach(N, session())), StoreUnavailable)
        self.assertIsNone(self.held.get(N))
        self.rows.down = False
        self.successResultOf(begin(self.rows.claim(N, HERE)))  # it had been made, only the answer was lost
        self.clock.advance(RECONCILE_AFTER)
        self.assertEqual(self.rows.rows, {})

    def test_a_session_that_ended_during_its_claim_is_not_held(self) -> None:
        """The claim of a tunnel that is gone already is released at once."""
        self.rows.hold = []
        tunnel = session()
        attaching = begin(self.held.attach(N, tunnel))
        tunnel.end()
        self.rows.hold.pop().callback(None)
        self.rows.hold.pop().callback(None)
        self.failureResultOf(attaching, SessionDead)
        self.assertEqual((self.rows.rows, self.rows.released), ({}, [N]))

    def test_a_newer_tunnel_replaces_the_older_which_is_closed_after_the_swap(self) -> None:
        """A node that dials again is reached over its newer tunnel; the older one is closed, and only then."""
        older, newer = session(), session()
        self.successResultOf(begin(self.held.attach(N, older)))
        older.when_closed().addCallback(lambda _: self.assertIs(self.held.get(N), newer))
        self.successResultOf(begin(self.held.attach(N, newer)))
        self.assertTrue(older.closed_here)
        self.assertFalse(newer.closed_here)

    def test_a_late_detach_of_the_older_touches_nothing(self) -> None:
        """The end of a replaced tunnel neither drops nor releases the newer one."""
        old = self.successResultOf(begin(self.held.attach(N, session())))
        newer = session()
        self.successResultOf(begin(self.held.attach(N, newer)))
        self.successResultOf(begin(self.held.detach(old)))
        self.assertIs(self.held.get(N), newer)
        self.assertEqual(self.rows.rows[N], (HERE, 2))

    def test_detach_releases_exactly_its_claim(self) -> None:
        """A lost tunnel is released; a claim another frontend made meanwhile stays."""
        attachment = self.successResultOf(begin(self.held.attach(N, session())))
        self.successResultOf(begin(self.rows.claim(N, THERE)))
        self.successResultOf(begin(self.held.detach(attachment)))
        self.assertIsNone(self.held.get(N))
        self.assertEqual(self.rows.rows[N], (THERE, 2))

    def test_detach_twice(self) -> None:
        """A second detach does nothing."""
        attachment = self.successResultOf(begin(self.held.attach(N, session())))
        self.successResultOf(begin(self.held.detach(attachment)))
        self.successResultOf(begin(self.held.detach(attachment)))
        self.assertEqual(self.rows.released, [N])

    def test_a_dead_session_is_not_given_out(self) -> None:
        """Between a session's death and its detach nobody is given it."""
        tunnel = session()
        self.successResultOf(begin(self.held.attach(N, tunnel)))
        tunnel.end()
        self.assertIsNone(self.held.get(N))

    def test_release_without_an_answer_is_bounded_and_made_good(self) -> None:
        """A release the database does not answer ends after 5 s; the row is released once it answers again."""
        attachment = self.successResultOf(begin(self.held.attach(N, session())))
        self.rows.hold = []
        detaching = begin(self.held.detach(attachment))
        self.clock.advance(RELEASE_TIMEOUT)
        self.successResultOf(detaching)
        self.rows.hold.clear()
        self.rows.hold = None
        self.rows.down = True
        self.clock.advance(RECONCILE_AFTER)
        self.assertIn(N, self.rows.rows)
        self.rows.down = False
        self.clock.advance(RECONCILE_AFTER)
        self.assertEqual(self.rows.rows, {})

    def test_reconciling_leaves_a_tunnel_that_is_being_attached(self) -> None:
        """A claim whose tunnel is stored a moment later is not taken for one left behind."""
        self.rows.hold = []
        tunnel = session()
        attaching = begin(self.held.attach(N, tunnel))
        claiming = self.rows.hold.pop()
        self.rows.hold = None
        self.rows.rows[N] = (HERE, Epoch(0))  # what an earlier process of the same id, or an unanswered claim, left
        reconciling = begin(self.held.reconcile())
        self.assertNoResult(reconciling)
        claiming.callback(None)
        self.successResultOf(attaching)
        self.successResultOf(reconciling)
        self.assertEqual(self.rows.rows[N], (HERE, 1))
        self.assertIs(self.held.get(N), tunnel)

    def test_reclaim_moves_the_epoch_and_keeps_the_attachment(self) -> None:
        """After this frontend was swept it owns what it still holds again, and the old attachment still ends it."""
        attachment = self.successResultOf(begin(self.held.attach(N, session())))
        dead = session()
        self.successResultOf(begin(self.held.attach(NodeId("n-2"), dead)))
        dead.end()
        self.rows.rows.clear()
        self.successResultOf(begin(self.held.reclaim()))
        self.assertEqual(self.rows.rows, {N: (HERE, 3)})
        self.successResultOf(begin(self.held.detach(attachment)))
        self.assertEqual(self.rows.rows, {})

    def test_reclaim_takes_no_tunnel_that_moved(self) -> None:
        """A frontend that was frozen and wakes up leaves a node alone that has another owner by now (CLUS-21)."""
        attached = begin(self.held.attach(N, left := session()))
        attachment = self.successResultOf(attached)
        elsewhere = self.successResultOf(begin(self.rows.claim(N, InstanceId("elsewhere"))))
        self.successResultOf(begin(self.held.reclaim()))
        self.assertEqual(self.rows.rows, {N: ("elsewhere", elsewhere)})
        self.assertTrue(left.closed_here)
        self.successResultOf(begin(self.held.detach(attachment)))
        self.assertEqual(self.rows.rows, {N: ("elsewhere", elsewhere)})

    def test_a_living_tunnel_never_counts_as_lost(self) -> None:
        """
        A second tunnel of the node that came and went at another frontend does not make this one count as lost.

        What another frontend owns, and what is on its way out, is left alone (CLUS-2).
        """
        attachment = self.successResultOf(begin(self.held.attach(N, session())))
        elsewhere = self.successResultOf(begin(self.rows.claim(N, THERE)))
        self.successResultOf(begin(self.held.adopt_lost()))
        self.assertEqual(self.rows.rows, {N: (THERE, elsewhere)})
        self.successResultOf(begin(self.rows.release(N, THERE, elsewhere)))
        self.successResultOf(begin(self.held.adopt_lost()))
        self.assertEqual(self.rows.rows[N][0], HERE)
        self.successResultOf(begin(self.held.detach(attachment)))
        self.assertEqual(self.rows.rows, {})

    def test_a_detach_during_a_reclaim_releases_the_new_claim(self) -> None:
        """A tunnel lost while it is claimed anew leaves no row behind."""
        attachment = self.successResultOf(begin(self.held.attach(N, session())))
        self.rows.hold = []
        reclaiming = begin(self.held.reclaim())
        detaching = begin(self.held.detach(attachment))
        claiming = self.rows.hold.pop()
        self.rows.hold = None
        claiming.callback(None)
        self.successResultOf(reclaiming)
        self.successResultOf(detaching)
        self.assertEqual(self.rows.rows, {})

    def test_go_away_is_spread(self) -> None:
        """A draining frontend tells its workers one after the other, over the time it was given."""
        tunnels = [session() for _ in range(4)]
        for index, tunnel in enumerate(tunnels):
            self.successResultOf(begin(self.held.attach(NodeId(f"n-{index}"), tunnel)))
        self.held.go_away(8.0)
        told: list[int] = []
        for _ in range(4):
            self.clock.advance(0 if not told else 2.0)
            told.append(sum(tunnel.told for tunnel in tunnels))
        self.assertEqual(told, [1, 2, 3, 4])
        self.assertEqual(len(self.held.sessions()), 4)

    def test_end_closes_the_tunnel_of_one_node(self) -> None:
        """A node whose identity changed hands loses its tunnel here; one that is elsewhere is not ours to end."""
        tunnel, newer = session(), session()
        old = self.successResultOf(begin(self.held.attach(N, tunnel, credential="d")))
        self.assertEqual(self.held.credentials(), {old: "d"})
        self.assertTrue(self.held.end(old))
        self.assertTrue(tunnel.closed_here)
        self.assertEqual(self.held.credentials(), {})
        self.successResultOf(begin(self.held.attach(N, newer)))
        self.assertFalse(self.held.end(old))
        self.assertFalse(self.held.end(Attachment(NodeId("n-2"), 1)))
        self.assertFalse(newer.closed_here)

    def test_release_all(self) -> None:
        """A frontend that stops closes every tunnel, releases every claim and takes no further one."""
        tunnels = [session(), session()]
        for index, tunnel in enumerate(tunnels):
            self.successResultOf(begin(self.held.attach(NodeId(f"n-{index}"), tunnel)))
        self.held.go_away(10.0)
        self.successResultOf(begin(self.held.release_all()))
        self.assertTrue(all(tunnel.closed_here for tunnel in tunnels))
        self.assertEqual(self.rows.rows, {})
        self.failureResultOf(begin(self.held.attach(N, session())), SessionDead)
        self.assertEqual(self.rows.rows, {})
