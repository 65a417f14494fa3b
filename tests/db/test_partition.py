"""A database that is there and does not answer: what a frontend still says, and when it notices."""

from __future__ import annotations

from statistics import median
from typing import Any

from twisted.internet import reactor as real_reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock, LoopingCall, deferLater

from localai_dist.httpapi.readiness import Readiness
from localai_dist.ids import InstanceId, NodeId
from localai_dist.registry.instances import Instances
from localai_dist.registry.membership import Membership
from localai_dist.registry.nodes import Nodes
from localai_dist.registry.ownership import Ownership
from localai_dist.store.errors import StoreError
from localai_dist.store.pool import Pool
from tests.db.case import DatabaseTestCase, until
from tests.db.frontends import monitor_of
from tests.db.link import Link
from tests.httpapi.doubles import World
from tests.tunnel.sockets import reactor

F2 = InstanceId("front-2")


class SilentDatabaseTests(DatabaseTestCase):
    """The link to PostgreSQL swallows everything; no FIN ever comes."""

    async def begin(self) -> tuple[Link, Pool, Membership, Readiness]:
        """A frontend behind a link that can be frozen, with short patience."""
        link = Link(self.url)
        self.addCleanup(lambda: Deferred.fromCoroutine(link.close()))
        pool = await self.pool(link.url, statement_timeout=1.0, patience=0.5)
        await pool.execute("delete from instances")
        member = Membership(
            Instances(pool, live_window=30.0),
            id=F2,
            address="10.0.0.1:1",
            version="1",
            peer_token_hash="h",
            grace=90.0,
            reclaim=_nothing,
            clock=real_reactor,
            beat=0.1,
        )
        await member.join()
        member.startService()
        self.addCleanup(member.stopService)
        return link, pool, member, Readiness("database", "membership", clock=reactor)

    async def test_it_is_noticed_and_heals(self) -> None:
        """A frontend notices within a bound that its database is silent, says so in readiness, and heals (BR-023)."""
        link, pool, member, readiness = await self.begin()
        await until(lambda: pool.healthy and member.problem is None, "all is well")
        readiness.note("database", True, "")
        readiness.note("membership", True, "")
        link.freeze()
        await until(lambda: not pool.healthy, "the silence is noticed", within=30)
        await until(lambda: member.problem is not None, "membership says so", within=30)
        readiness.note("database", pool.healthy, pool.problem or "")
        readiness.note("membership", not member.problem, member.problem or "")
        world = World(readiness=readiness)
        got = world.send("GET", "/readyz")
        self.assertEqual((got.status, got.json["status"]), (503, "degraded"))
        self.assertFalse(got.json["checks"]["database"]["ok"])
        self.assertTrue(got.json["checks"]["database"]["reason"])
        self.assertEqual(world.send("GET", "/healthz").status, 200)
        link.thaw()
        await until(lambda: pool.healthy, "the pool is back", within=30)
        await until(lambda: member.problem is None, "membership is back", within=30)
        self.assertIsNotNone(await Instances(pool, live_window=30.0).live(F2))

    async def test_nothing_is_decided_meanwhile(self) -> None:
        """While nothing is known nobody is demoted, and a request says that the registry does not answer (BR-023)."""
        link, pool, _, _ = await self.begin()
        nodes = Nodes(pool)
        direct = await self.pool()
        await direct.execute(
            "insert into backend_nodes (id, name, status, approved_at, last_heartbeat)"
            " values ('n', 'n', 'healthy', now(), now()) on conflict (name) do nothing"
        )
        await direct.execute("insert into node_connections values ('n', '', 1, now(), now() - interval '2 minutes')")
        monitor = monitor_of(nodes, Ownership(pool, live_window=30.0), clock=Clock())
        link.freeze()
        await monitor.look()
        found = await direct.fetch_one("select status from backend_nodes where id = 'n'")
        self.assertEqual(found, {"status": "healthy"})
        link.thaw()
        await until(lambda: pool.healthy, "the pool is back", within=30)

        async def demoted() -> bool:
            await monitor.look()
            return await direct.fetch_one("select status from backend_nodes where id = 'n'") == {"status": "unhealthy"}

        await until(demoted, "the control: once it is known, the node is demoted")

    async def test_liveness_and_the_reactor_do_not_wait_for_it(self) -> None:
        """While the database hangs /healthz answers at once and nothing holds the reactor for 50 ms (BR-106)."""
        link, pool, member, _ = await self.begin()
        nodes, ownership = Nodes(pool), Ownership(pool, live_window=30.0)
        link.freeze()
        gaps: list[float] = []
        last = [reactor.seconds()]

        def tick() -> None:
            now = reactor.seconds()
            gaps.append(now - last[0])
            last[0] = now

        ticker = LoopingCall(tick)
        ticking = ticker.start(0.01)
        asked = [
            Deferred.fromCoroutine(_settled(work))
            for work in (
                nodes.all(),
                ownership.route(NodeId("n"), grace=90.0),
                member.beat(),
                nodes.mark_stale_offline(60),
            )
        ]
        world = World(nodes=nodes, ownership=ownership)
        answers: list[float] = []
        for _ in range(20):
            began = reactor.seconds()
            self.assertEqual(world.send("GET", "/healthz", key=None).status, 200)
            answers.append(reactor.seconds() - began)
            await deferLater(reactor, 0)
        for each in asked:
            await each
        ticker.stop()
        await ticking
        for times, bound in ((answers, 0.1), (gaps, 0.05)):
            self.assertLess(median(times), bound)  # the middle one: this machine runs other things too
        link.thaw()
        await until(lambda: pool.healthy, "the pool is back", within=30)


class IdleTests(DatabaseTestCase):
    """A cluster in which nothing happens."""

    async def test_statements_of_an_idle_frontend(self) -> None:
        """An idle frontend's membership and health together ask at most two statements a second (BR-105)."""
        pool = await self.pool()
        sent: list[str] = []
        counting: Any = _Counting(pool, sent)
        clock = Clock()
        member = Membership(
            Instances(counting, live_window=30.0),
            id=F2,
            address=None,
            version="1",
            peer_token_hash="h",
            grace=90.0,
            reclaim=_nothing,
            clock=clock,
        )
        await member.join()
        member.startService()
        monitor = monitor_of(Nodes(counting), Ownership(counting, live_window=30.0), clock=clock)
        monitor.start()
        sent.clear()
        for _ in range(600):
            clock.advance(1.0)
            await until(lambda: counting.running == 0, "the statements are done")
        per_second = len(sent) / 600
        self.assertGreater(per_second, 0.1)
        self.assertLessEqual(per_second, 1.0)  # the sweep of loads and the bus have the rest
        await monitor.stop()
        await member.stopService()

    async def test_a_frontend_has_no_more_connections_than_it_says(self) -> None:
        """A pool of four never holds more than four connections, also after all of them were killed (BR-105)."""
        pool = await self.pool(size=4, application_name="idle-frontend")
        watcher = await self.pool()
        killed: list[int] = []  # on their way out, which the server may take its time for

        async def count() -> int:
            row = await watcher.fetch_one(
                "select count(*) as n from pg_stat_activity"
                " where application_name = 'idle-frontend' and pid <> all(%(killed)s::int[])",
                {"killed": killed},
            )
            assert row is not None
            return int(row["n"])

        self.assertLessEqual(await count(), 4)
        await until(lambda: len(pool._open) == 4, "all four are open")
        for _ in range(3):
            before = set(pool._open)
            rows = await watcher.fetch(
                "select pid, pg_terminate_backend(pid) from pg_stat_activity where application_name = 'idle-frontend'"
            )
            killed += [row["pid"] for row in rows]
            self.assertGreaterEqual(len(rows), 4)
            working = [Deferred.fromCoroutine(_settled(pool.fetch("select pg_sleep(0.01)"))) for _ in range(20)]
            for each in working:
                await each
                self.assertLessEqual(await count(), 4)
            await until(lambda: len(pool._open) == 4 and not pool._open & before, "it healed")  # noqa: B023
            self.assertEqual(await pool.fetch("select 1 as one"), [{"one": 1}])
            self.assertLessEqual(await count(), 4)


class _Counting:
    """A pool that notes what is sent, and how much of it is on its way."""

    def __init__(self, pool: Pool, sent: list[str]) -> None:
        self._pool = pool
        self._sent = sent
        self.running = 0

    async def _noted(self, name: str, statement: str, params: Any) -> Any:
        self._sent.append(statement)
        self.running += 1
        try:
            return await getattr(self._pool, name)(statement, params or {})
        finally:
            self.running -= 1

    async def fetch(self, statement: str, params: Any = None) -> Any:
        return await self._noted("fetch", statement, params)

    async def fetch_one(self, statement: str, params: Any = None) -> Any:
        return await self._noted("fetch_one", statement, params)

    async def execute(self, statement: str, params: Any = None) -> Any:
        return await self._noted("execute", statement, params)


async def _settled(work: Any) -> None:
    try:
        await work
    except StoreError:
        pass


async def _nothing() -> None:
    pass
