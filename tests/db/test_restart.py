"""PostgreSQL restarted and crashed under a pool and a listener."""

from __future__ import annotations

import os

from twisted.internet.defer import CancelledError, Deferred

from localai_dist.store.errors import StoreUnavailable
from tests.db.case import DatabaseTestCase, OwnServerCase, until
from tests.db.link import Link


class RestartTests(OwnServerCase):
    """A server of its own, since it goes down."""

    async def test_five_restarts_heal(self) -> None:
        """Restarted five times: all works again each time, one LISTEN connection, no descriptor more (WALK-15)."""
        pool = await self.pool()
        listener = await self.listener(application_name="the-listener")
        heard: list[str] = []
        missed: list[int] = []
        await listener.listen("changes", heard.append)
        listener.on_reconnect(lambda: missed.append(listener.connects))
        await until(lambda: len(pool._open) == 2, "the pool is whole")
        descriptors = len(os.listdir("/proc/self/fd"))
        for round_ in range(5):
            if round_ % 2:
                self.server.kill()
                self.server.start()
            else:
                self.server.restart()
            await until(lambda: not (pool.healthy and listener.healthy), "the loss is noticed")
            await until(lambda: pool.healthy and listener.healthy, "everything is back")
            await until(lambda: len(pool._open) == 2, "the pool is whole")
            await pool.fetch("select pg_notify('changes', %(payload)s)", {"payload": f"round {round_}"})
            await until(lambda: len(heard) == round_ + 1, "the notification is heard")  # noqa: B023
            self.assertEqual(heard[-1], f"round {round_}")
            count = self.server.run("select count(*) from pg_stat_activity where application_name = 'the-listener'")
            self.assertEqual(count, [(1,)])
        self.assertEqual(missed, [2, 3, 4, 5, 6])
        self.assertLessEqual(len(os.listdir("/proc/self/fd")), descriptors)

    async def test_a_stopped_server_fails_statements_within_a_bound(self) -> None:
        """While PostgreSQL is down a statement fails within the pool's patience; once it is back the next one works."""
        pool = await self.pool(patience=0.2)
        self.server.stop()
        await self.assert_raises(StoreUnavailable, pool.fetch("select 1"))
        await until(lambda: not pool.healthy, "the loss is noticed")
        await self.assert_raises(StoreUnavailable, pool.fetch("select 1"))
        self.server.start()
        await until(lambda: pool.healthy, "the pool is back")
        self.assertEqual(await pool.fetch("select 1 as one"), [{"one": 1}])


class ListenerTests(DatabaseTestCase):
    """Notifications, and the ways to lose them."""

    async def test_notifications_arrive_in_order(self) -> None:
        """A thousand notifications of one transaction arrive once each and in order."""
        pool = await self.pool()
        listener = await self.listener()
        heard: list[str] = []
        await listener.listen("many", heard.append)
        await pool.fetch("select pg_notify('many', n::text) from generate_series(1, 1000) n")
        await until(lambda: len(heard) >= 1000, "all are heard")
        self.assertEqual(heard, [str(n) for n in range(1, 1001)])

    async def test_a_failing_callback_hurts_nobody_else(self) -> None:
        """What one subscriber raises is logged; the next one still hears."""
        pool = await self.pool()
        listener = await self.listener()
        heard: list[str] = []
        await listener.listen('odd "name"', lambda payload: 1 / 0)  # type: ignore[arg-type,return-value]
        await listener.listen('odd "name"', heard.append)
        await pool.fetch("select pg_notify(%(channel)s, 'x')", {"channel": 'odd "name"'})
        await until(lambda: heard == ["x"], "the second one hears")
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    async def test_a_silent_link_is_noticed_and_replaced(self) -> None:
        """A frozen link is noticed in its silence; after the thaw LISTEN is in force and subscribers are told."""
        link = Link(self.url)
        self.addCleanup(lambda: Deferred.fromCoroutine(link.close()))
        pool = await self.pool()
        listener = await self.listener(link.url, beat=0.1, beat_timeout=1.0, connect_timeout=0.3)
        heard: list[str] = []
        told: list[str] = []
        await listener.listen("silent", heard.append)
        listener.on_reconnect(lambda: told.append("maybe missed something"))
        link.freeze()
        await until(lambda: not listener.healthy, "the silence is noticed")
        link.thaw()
        await until(lambda: listener.healthy, "it listens again")
        self.assertEqual(told, ["maybe missed something"])
        await pool.fetch("select pg_notify('silent', 'after')")
        await until(lambda: heard == ["after"], "the notification is heard")

    async def test_one_who_gives_up_listening(self) -> None:
        """A caller that leaves while LISTEN is under way hears nothing, and the connection goes on working."""
        pool = await self.pool()
        listener = await self.listener(beat=0.05)
        given_up: list[str] = []
        heard: list[str] = []
        leaving = Deferred.fromCoroutine(listener.listen("left", given_up.append))
        leaving.cancel()
        await self.assert_raises(CancelledError, leaving)
        await listener.listen("left", heard.append)
        await pool.fetch("select pg_notify('left', 'x')")
        await until(lambda: heard == ["x"], "the other one hears")
        self.assertEqual((given_up, listener.connects), ([], 1))

    async def test_nobody_can_listen_while_the_database_is_away(self) -> None:
        """Subscribing without a connection fails within a bound and registers nothing."""
        link = Link(self.url)
        self.addCleanup(lambda: Deferred.fromCoroutine(link.close()))
        listener = await self.listener(link.url, beat=0.1, beat_timeout=1.0, connect_timeout=0.2)
        link.freeze()
        await until(lambda: not listener.healthy, "the silence is noticed")
        heard: list[str] = []
        await self.assert_raises(StoreUnavailable, listener.listen("late", heard.append))
        link.thaw()
        await until(lambda: listener.healthy, "it is back")
        pool = await self.pool()
        await pool.fetch("select pg_notify('late', 'x')")
        await listener.listen("late", heard.append)
        await pool.fetch("select pg_notify('late', 'y')")
        await until(lambda: heard == ["y"], "only what came after the subscription")
