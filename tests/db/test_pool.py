"""The pool and its connections on a real PostgreSQL."""

from __future__ import annotations

import os

from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred, gatherResults

from localai_dist.store.errors import StatementFailed, StoreUnavailable
from localai_dist.store.pool import Pool
from localai_dist.store.transaction import Transaction
from localai_dist.testing.databases import shared
from tests.db.case import DatabaseTestCase, until
from tests.db.link import Link


class StatementTests(DatabaseTestCase):
    """What the verbs give."""

    async def test_rows_are_dictionaries(self) -> None:
        """Rows come by column name, in the server's order, with Python's types."""
        pool = await self.pool()
        rows = await pool.fetch("select n, n * %(by)s as product from generate_series(1, 3) n", {"by": 2})
        self.assertEqual(rows, [{"n": 1, "product": 2}, {"n": 2, "product": 4}, {"n": 3, "product": 6}])
        self.assertIsNone(await pool.fetch_one("select 1 where false"))

    async def test_a_statement_without_rows_has_a_count(self) -> None:
        """A change answers with how many rows it changed, and gives no rows."""
        pool = await self.pool()
        await pool.execute("create table t (n int)")
        self.assertEqual(await pool.execute("insert into t select generate_series(1, 5)"), 5)
        self.assertEqual(await pool.fetch("delete from t where n > 3"), [])

    async def test_a_refused_statement_leaves_the_connection_usable(self) -> None:
        """An error of the database carries its code; the next statement works on the same connection."""
        pool = await self.pool(size=1)
        before = await pool.fetch_one("select pg_backend_pid() as pid")
        error = await self.assert_raises(StatementFailed, pool.fetch("select 1/0 as x"))
        self.assertEqual(error.sqlstate, "22012")
        self.assertEqual(await pool.fetch_one("select pg_backend_pid() as pid"), before)

    async def test_a_missing_parameter_is_our_own_mistake(self) -> None:
        """A forgotten parameter is a KeyError, not a broken database."""
        pool = await self.pool(size=1)
        await self.assert_raises(KeyError, pool.fetch("select %(a)s", {}))
        self.assertTrue(pool.healthy)

    async def test_many_at_once_share_the_connections(self) -> None:
        """Fifty statements over two connections all get their own answer."""
        pool = await self.pool()
        answers = await gatherResults(
            [Deferred.fromCoroutine(pool.fetch_one("select %(n)s as n", {"n": n})) for n in range(50)]
        )
        self.assertEqual([answer["n"] for answer in answers], list(range(50)))

    async def test_a_slow_statement_is_given_up(self) -> None:
        """A statement over its limit fails as unavailable; the connection lives on, because the server ended it."""
        pool = await self.pool(size=1, statement_timeout=0.2)
        error = await self.assert_raises(StoreUnavailable, pool.fetch("select pg_sleep(30)"))
        self.assertIn("statement timeout", str(error))
        self.assertEqual(await pool.fetch("select 1 as one"), [{"one": 1}])

    async def test_cancelling_answers_at_once_and_harms_nobody(self) -> None:
        """A cancelled caller is told at once; its connection is lent again when the statement has ended."""
        pool = await self.pool(size=1)
        running = Deferred.fromCoroutine(pool.fetch("select pg_sleep(0.2), pg_backend_pid() as pid"))
        waiting = Deferred.fromCoroutine(pool.fetch("select 2 as two"))
        abandoned = Deferred.fromCoroutine(pool.fetch("select 3 as three"))
        abandoned.cancel()
        running.cancel()
        self.failureResultOf(running, CancelledError)
        self.failureResultOf(abandoned, CancelledError)
        self.assertEqual(await waiting, [{"two": 2}])

    async def test_a_full_pool_refuses_within_a_bound(self) -> None:
        """When every connection is in use for longer than the limit, the next statement fails and says so."""
        pool = await self.pool(size=1, statement_timeout=0.3)
        held: Deferred[None] = Deferred()

        async def hold(transaction: Transaction) -> None:
            await transaction.fetch("select 1")
            await held

        holding = Deferred.fromCoroutine(pool.transaction(hold))
        error = await self.assert_raises(StoreUnavailable, pool.fetch("select 1"))
        self.assertIn("every connection is in use", str(error))
        held.callback(None)
        await holding
        self.assertEqual(await pool.fetch("select 1 as one"), [{"one": 1}])


class TransactionTests(DatabaseTestCase):
    """All or nothing."""

    async def _table(self, size: int = 1) -> Pool:
        pool = await self.pool(size=size)
        await pool.execute("drop table if exists t")
        await pool.execute("create table t (n int unique)")
        return pool

    async def _content(self, pool: Pool) -> list[int]:
        return [row["n"] for row in await pool.fetch("select n from t order by n")]

    async def test_a_coroutine_is_awaited_and_committed(self) -> None:
        """Every statement of the coroutine is in the transaction, and its result comes back."""
        pool = await self._table()

        async def work(transaction: Transaction) -> str:
            await transaction.execute("insert into t values (1)")
            await transaction.execute("insert into t values (2)")
            return "done"

        self.assertEqual(await pool.transaction(work), "done")
        self.assertEqual(await self._content(pool), [1, 2])

    async def test_an_exception_rolls_back(self) -> None:
        """Whatever the coroutine raises comes out, and nothing it did stays."""
        pool = await self._table()

        async def work(transaction: Transaction) -> None:
            await transaction.execute("insert into t values (1)")
            raise ZeroDivisionError

        await self.assert_raises(ZeroDivisionError, pool.transaction(work))
        self.assertEqual(await self._content(pool), [])

    async def test_a_swallowed_failure_is_not_a_commit(self) -> None:
        """A transaction one of whose statements failed never counts as committed, even if the failure was caught."""
        pool = await self._table()

        async def work(transaction: Transaction) -> None:
            await transaction.execute("insert into t values (1)")
            await self.assert_raises(StatementFailed, transaction.execute("insert into t values (1)"))

        await self.assert_raises(StatementFailed, pool.transaction(work))
        self.assertEqual(await self._content(pool), [])

    async def test_cancelling_in_the_middle_rolls_back(self) -> None:
        """A cancelled transaction leaves nothing behind, and the pool heals."""
        pool = await self._table()
        reached: Deferred[None] = Deferred()

        async def work(transaction: Transaction) -> None:
            await transaction.execute("insert into t values (1)")
            reactor.callLater(0, reached.callback, None)  # type: ignore[attr-defined]
            await transaction.execute("select pg_sleep(30)")

        running = Deferred.fromCoroutine(pool.transaction(work))
        await reached
        running.cancel()
        self.failureResultOf(running, CancelledError)
        await until(lambda: pool.healthy, "the pool has a connection again")
        self.assertEqual(await self._content(pool), [])


class LossTests(DatabaseTestCase):
    """The connection goes, in every way it can."""

    async def _link(self) -> Link:
        link = Link(self.url)
        self.addCleanup(lambda: Deferred.fromCoroutine(link.close()))
        return link

    async def test_terminated_connections_come_back(self) -> None:
        """Every connection ended by the server: the pool is whole again without a restart and without a traceback."""
        pool = await self.pool(size=3, application_name="loss")
        await until(lambda: len(pool._open) == 3, "all three are open")
        before = set(pool._open)
        shared().server.run("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'loss'")
        await until(lambda: not pool._open & before, "each loss is noticed")
        await until(lambda: len(pool._open) == 3, "the pool is whole again")
        self.assertEqual(await pool.fetch("select 1 as one"), [{"one": 1}])

    async def test_only_live_connections_are_lent(self) -> None:
        """One of three connections ended: every statement afterwards works."""
        pool = await self.pool(size=3)
        await until(lambda: len(pool._open) == 3, "all three are open")
        row = await pool.fetch_one("select pg_backend_pid() as pid")
        assert row is not None
        shared().server.run(f"select pg_terminate_backend({row['pid']})")
        await until(lambda: len(pool._open) < 3, "the loss is noticed")
        for _ in range(12):
            self.assertEqual(await pool.fetch("select 1 as one"), [{"one": 1}])

    async def test_a_cut_link_fails_the_statement_and_heals(self) -> None:
        """A connection cut in the middle of a statement fails it as unavailable; the next one works again."""
        link = await self._link()
        pool = await self.pool(link.url, size=1)
        running = Deferred.fromCoroutine(pool.fetch("select pg_sleep(30)"))
        link.cut()
        await self.assert_raises(StoreUnavailable, running)
        await until(lambda: pool.healthy, "the pool is back")
        self.assertEqual(await pool.fetch("select 1 as one"), [{"one": 1}])

    async def test_a_frozen_link_fails_within_a_bound(self) -> None:
        """Nothing gets through in silence: statements and reconnections fail in time, and heal after the thaw."""
        link = await self._link()
        pool = await self.pool(link.url, size=1, statement_timeout=0.2, connect_timeout=0.3, patience=0.1)
        link.freeze()
        began = reactor.seconds()  # type: ignore[attr-defined]
        await self.assert_raises(StoreUnavailable, pool.fetch("select 1"))
        self.assertLess(reactor.seconds() - began, 0.2 + 1 + 1)  # type: ignore[attr-defined]
        error = await self.assert_raises(StoreUnavailable, pool.fetch("select 1"))
        self.assertIn("no connection to the database", str(error))
        self.assertFalse(pool.healthy)
        link.thaw()
        await until(lambda: pool.healthy, "the pool is back")
        self.assertEqual(await pool.fetch("select 1 as one"), [{"one": 1}])

    async def test_an_idle_frozen_connection_is_found_by_the_beat(self) -> None:
        """A link that died in silence while nobody asked anything is noticed, so that readiness can say so."""
        link = await self._link()
        pool = await self.pool(link.url, size=1, statement_timeout=0.1, connect_timeout=0.3, beat=0.1)
        link.freeze()
        await until(lambda: not pool.healthy, "the silence is noticed")
        self.assertIn("did not", str(pool.problem))

    async def test_a_dead_address_is_told_without_the_password(self) -> None:
        """A database that isn't there fails the start in one line that has no password in it (WALK-14, WALK-23)."""
        error = await self.assert_raises(
            StoreUnavailable, self.pool("postgresql://ann:hush-hush@127.0.0.1:1/x", connect_timeout=0.3)
        )
        self.assertIn("ann@127.0.0.1:1/x", str(error))
        self.assertNotIn("hush", str(error))
        self.assertNotIn("\n", str(error))

    async def test_stopping_fails_who_waits(self) -> None:
        """Stopping the pool answers everybody who still waits, and leaves no connection open."""
        pool = await self.pool(size=1, application_name="stopping")
        running = Deferred.fromCoroutine(pool.fetch("select pg_sleep(30)"))
        waiting = Deferred.fromCoroutine(pool.fetch("select 1"))
        await pool.stop()
        await self.assert_raises(StoreUnavailable, running)
        await self.assert_raises(StoreUnavailable, waiting)
        await self.assert_raises(StoreUnavailable, pool.fetch("select 1"))
        self.assertEqual([name for name in os.listdir("/proc/self/fd") if _is_gone(name)], [])


def _is_gone(name: str) -> bool:
    try:
        return "(deleted)" in os.readlink(f"/proc/self/fd/{name}") and "PGSQL" in os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        return False
