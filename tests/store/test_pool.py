"""The pool's decisions, over fake connections and a clock."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.store.errors import StatementFailed, StoreUnavailable
from localai_dist.store.pool import MAX_WAITING, Pool
from localai_dist.store.transaction import Transaction
from tests.store.fakes import Makes

DSN = "postgresql://u:pw@h/d"


class PoolTests(SynchronousTestCase):
    """Two connections at most."""

    def setUp(self) -> None:
        """A pool that is starting."""
        self.clock = Clock()
        self.makes = Makes()
        self.pool = Pool(
            DSN,
            reactor=self.clock,
            size=2,
            statement_timeout=5,
            connect_timeout=5,
            patience=1,
            beat=5,
            chance=lambda: 0.0,
            make=self.makes,
        )
        self.starting = Deferred.fromCoroutine(self.pool.start())

    def started(self) -> None:
        """Both connections open."""
        for connection in self.makes.made:
            connection.succeed()
        self.successResultOf(self.starting)

    def stopped(self) -> None:
        """Stop; nothing may be left behind."""
        self.successResultOf(Deferred.fromCoroutine(self.pool.stop()))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def ask(self, sql: str = "select 1") -> Deferred[list[dict[str, Any]]]:
        """A statement."""
        return Deferred.fromCoroutine(self.pool.fetch(sql))

    def test_started_with_the_first_connection(self) -> None:
        """One open connection is enough to begin; statements are asked of it."""
        self.makes.made[1].succeed()
        self.successResultOf(self.starting)
        self.assertTrue(self.pool.healthy)
        self.assertIsNone(self.pool.problem)
        asked = self.ask()
        self.makes.made[1].answer({"n": 1})
        self.assertEqual(self.successResultOf(asked), [{"n": 1}])
        self.stopped()

    def test_a_start_without_database_fails_and_leaves_nothing(self) -> None:
        """No connection in time: the start fails with the cause, and nothing goes on in the background."""
        for _ in range(40):
            for connection in self.makes.made:
                if not connection.opening.called:
                    connection.fail("no route to host")
            self.clock.advance(0.25)
        error = self.failureResultOf(self.starting, StoreUnavailable)
        self.assertIn("no route to host", error.getErrorMessage())
        self.assertNotIn("pw", error.getErrorMessage())
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_reconnections_slow_down(self) -> None:
        """A database that refuses is asked at growing intervals, never more than two seconds apart without jitter."""
        times: list[float] = []
        for _ in range(1200):
            before = len(self.makes.made)
            for connection in list(self.makes.made):
                if not connection.opening.called:
                    connection.fail()
            self.clock.advance(0.01)
            if len(self.makes.made) > before:
                times.append(self.clock.seconds())
            if self.starting.called:
                break
        self.failureResultOf(self.starting, StoreUnavailable)
        gaps = [round(later - earlier, 1) for earlier, later in pairwise(times)]
        self.assertEqual(gaps[:4], [0.2, 0.4, 0.8, 1.0])

    def test_who_waits_is_served_in_order(self) -> None:
        """More statements than connections: the others wait their turn, first come first served."""
        self.started()
        asked = [self.ask(f"select {n}") for n in range(4)]
        one, two = self.makes.made
        order = []
        for connection in (two, one, two, one):
            order.append(connection.answer({"x": 1}).rsplit(" ", 1)[1])
        self.assertEqual(sorted(order[:2]) + order[2:], ["0", "1", "2", "3"])
        for each in asked:
            self.successResultOf(each)
        self.stopped()

    def test_waiting_is_bounded_in_time(self) -> None:
        """A statement that gets no connection fails after the statement timeout, and says why."""
        self.started()
        busy = [self.ask() for _ in range(2)]
        late = self.ask()
        self.clock.advance(5)
        self.assertIn("in use", self.failureResultOf(late, StoreUnavailable).getErrorMessage())
        self.stopped()
        for each in busy:
            self.failureResultOf(each, StoreUnavailable)

    def test_waiting_is_bounded_in_number(self) -> None:
        """Past a thousand waiting statements the next one is refused at once."""
        self.started()
        asked = [self.ask() for _ in range(MAX_WAITING + 2)]
        self.failureResultOf(self.ask(), StoreUnavailable)
        self.stopped()
        for each in asked:
            self.failureResultOf(each, StoreUnavailable)

    def test_nothing_open_means_little_patience(self) -> None:
        """While every connection is lost a statement waits one second only; one that comes back serves it."""
        self.started()
        for connection in list(self.makes.made):
            connection.drop(StoreUnavailable("server went away"))
        self.assertFalse(self.pool.healthy)
        self.assertEqual(self.pool.problem, "server went away")
        asked = self.ask()
        self.clock.advance(1)
        self.failureResultOf(asked, StoreUnavailable)
        asked = self.ask()
        self.makes.made[-1].succeed()
        self.makes.made[-1].answer()
        self.assertEqual(self.successResultOf(asked), [])
        self.stopped()

    def test_a_cancelled_place_in_the_queue_is_given_up(self) -> None:
        """Who stops waiting is skipped; the connection goes to the next."""
        self.started()
        running = [self.ask() for _ in range(2)]
        gone, next_ = self.ask("gone"), self.ask("next")
        gone.cancel()
        self.failureResultOf(gone, CancelledError)
        self.makes.made[0].answer()
        self.assertEqual(self.makes.made[0].statements[-1][0], "next")
        self.makes.made[0].answer()
        self.makes.made[1].answer()
        for each in (*running, next_):
            self.successResultOf(each)
        self.stopped()

    def test_a_cancelled_statement_keeps_its_connection_until_it_ends(self) -> None:
        """The caller is told at once; nobody else gets the connection while the statement still runs."""
        self.started()
        running = [self.ask() for _ in range(2)]
        waiting = self.ask("waiting")
        for each in running:
            each.cancel()
            self.failureResultOf(each, CancelledError)
        self.assertNoResult(waiting)
        self.makes.made[1].answer()
        self.makes.made[1].answer()
        self.successResultOf(waiting)
        self.stopped()

    def test_idle_connections_are_asked(self) -> None:
        """A connection idle for a whole beat is asked something; one that was just used is not."""
        self.started()
        self.clock.advance(4)
        asked = self.ask()
        used = next(connection for connection in self.makes.made if connection.busy)
        used.answer()
        self.successResultOf(asked)
        self.clock.advance(1)
        idle = next(connection for connection in self.makes.made if connection is not used)
        self.assertEqual((idle.busy, used.busy), (True, False))
        self.assertEqual(idle.answer(), "select 1")
        self.stopped()

    def test_connections_take_turns(self) -> None:
        """Statements go to the connection that was idle for longest, so that a busy pool needs no beat (BR-105)."""
        self.started()
        for _ in range(10):
            self.clock.advance(2)
            asked = self.ask("mine")
            [used] = [connection for connection in self.makes.made if connection.busy]  # no beat is under way
            self.assertEqual(used.answer(), "mine")
            self.successResultOf(asked)
        self.stopped()

    def test_stopping_while_opening_leaves_nothing(self) -> None:
        """A pool stopped before it was open goes away without a trace."""
        stopping = Deferred.fromCoroutine(self.pool.stop())
        self.successResultOf(stopping)
        self.failureResultOf(self.starting, StoreUnavailable)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_transaction_on_a_lost_connection(self) -> None:
        """A connection lost in a transaction fails it as unavailable; nothing is sent after that."""
        self.started()

        async def work(transaction: Transaction) -> None:
            await transaction.execute("insert")

        running = Deferred.fromCoroutine(self.pool.transaction(work))
        connection = next(each for each in self.makes.made if each.busy)
        connection.answer(tag="BEGIN")
        connection.drop(StoreUnavailable("gone"))
        self.failureResultOf(running, StoreUnavailable)
        self.assertEqual([sql for sql, _ in connection.statements], ["begin", "insert"])
        self.stopped()

    def test_a_failed_rollback_ends_the_connection(self) -> None:
        """If even the rollback fails, the connection is not lent again; the first error is the one that is told."""
        self.started()

        async def work(transaction: Transaction) -> None:
            await transaction.execute("insert")

        running = Deferred.fromCoroutine(self.pool.transaction(work))
        connection = next(each for each in self.makes.made if each.busy)
        connection.answer(tag="BEGIN")
        connection.answer(error=StatementFailed("duplicate", "23505"))
        connection.answer(error=StatementFailed("another command is already in progress", "55000"))
        self.failureResultOf(running, StatementFailed)
        self.assertFalse(connection.alive)
        self.stopped()
