"""Cold loads of two frontends over one real PostgreSQL, with the real registry; the workers are in memory."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, DeferredList, gatherResults

from localai_dist.ids import InstanceId, NodeId
from localai_dist.loads.errors import LoadCancelled, LoadFailed
from localai_dist.loads.fleet import Fleet
from localai_dist.loads.service import Loads
from localai_dist.loads.tools import LoadSettings
from localai_dist.reach import NoRoute, Unreached
from localai_dist.registry.instances import Instances
from localai_dist.registry.nodes import Nodes
from localai_dist.registry.ownership import Ownership
from localai_dist.registry.records import Registration, SchedulingRow
from localai_dist.registry.replicas import Replicas
from localai_dist.registry.scheduling import Scheduling
from localai_dist.store.pool import Pool
from localai_dist.wire.verbs import InstallReply
from tests.db.case import DatabaseTestCase, until
from tests.loads.doubles import Workers, make_model

QUICK = {"poll": 0.05, "beat": 0.05, "look": 0.05, "sweep": 0.1, "retire": 0.05, "route_wait": 0.2}


class LoadsTests(DatabaseTestCase):
    """Two frontends; node ``worker-1`` hangs on the first, ``worker-2`` on the second."""

    async def begin(self) -> tuple[Loads, Loads]:
        """Both frontends' loads over a cluster of two nodes and nothing loaded."""
        self.pool_: Pool = await self.pool(size=4)
        for table in (
            "model_load_jobs",
            "node_models",
            "model_scheduling_configs",
            "node_connections",
            "model_load_endings",
        ):
            await self.pool_.execute(f"delete from {table}")
        await self.pool_.execute("delete from backend_nodes")
        self.workers = Workers()
        self.model = make_model()
        self.nodes = Nodes(self.pool_)
        self.ownership = Ownership(self.pool_, live_window=30.0)
        self.replicas = Replicas(self.pool_)
        self.scheduling = Scheduling(self.pool_)
        self.ids: list[NodeId] = []
        for number, instance in ((1, "one"), (2, "two")):
            await Instances(self.pool_, live_window=30.0).register(InstanceId(instance), f"h:{number}", "1", "")
            labels = {"pin": str(number)}
            registered = await self.nodes.register(
                Registration(f"worker-{number}", labels=labels), auto_approve=True, presented_token=None
            )
            self.ids.append(registered.node.id)
            await self.ownership.claim(registered.node.id, InstanceId(instance))
        return self.frontend("one"), self.frontend("two")

    def frontend(self, instance: str, **settings: Any) -> Loads:
        """The loads of one frontend."""
        given = LoadSettings(**{**QUICK, **settings})
        loads = Loads(
            self.pool_,
            Fleet(self.nodes, self.replicas, self.scheduling, self.ownership, given.grace),
            self.workers,
            self.workers,
            self.workers.connect,
            clock=reactor,  # type: ignore[arg-type]
            instance=InstanceId(instance),
            settings=given,
            find_model=lambda name: self.model if name == self.model.name else None,
        )
        self.addCleanup(lambda: Deferred.fromCoroutine(loads.stop()))
        return loads

    def ensure(self, loads: Loads) -> Deferred[Any]:
        """A request that waits without end."""
        return Deferred.fromCoroutine(loads.ensure(self.model, wait=None))

    async def wait_here(self, loads: Loads, requests: int) -> None:
        """Until so many requests wait for the load: one that was only begun may still ask what is loaded."""
        await until(lambda: "tiny" in loads._flights and loads._flights["tiny"].waiting == requests, "all of them wait")

    async def watches(self, loads: Loads) -> None:
        """Until a frontend has seen the job that another one runs: one that was only asked has not."""
        await until(lambda: getattr(loads._flights.get("tiny"), "_pausing", None) is not None, "it watches the job")

    async def jobs(self) -> list[dict[str, Any]]:
        """The job rows."""
        return await self.pool_.fetch("select * from model_load_jobs")

    async def test_fifty_requests_on_two_frontends_are_one_load(self) -> None:
        """50 concurrent cold requests, half on each frontend, load once on the pinned node; all get it (LOAD-5)."""
        one, two = await self.begin()
        await self.scheduling.put(SchedulingRow("tiny", {"pin": "2"}))
        replicas = await gatherResults([self.ensure(loads) for loads in (one, two) * 25])
        self.assertEqual({(row.node_id, row.address) for row in replicas}, {(self.ids[1], "127.0.0.1:20000")})
        self.assertEqual(self.workers.steps, ["list", "install", "stage", "connect", "load", "close"])
        self.assertEqual(await self.jobs(), [])
        self.assertEqual(len(await self.replicas.all()), 1)

    async def test_a_failure_reaches_both_frontends(self) -> None:
        """All waiters on both frontends get the same cause, and the next request loads (LOAD-5)."""
        one, two = await self.begin()
        gate: Deferred[None] = Deferred()
        self.workers.gates["install"] = gate
        self.workers.install = InstallReply(False, error="no such backend")
        requests = [self.ensure(loads) for loads in (one, two) * 5]
        await until(lambda: "install" in self.workers.steps, "the install begins")
        for loads in (one, two):
            await self.wait_here(loads, 5)
        gate.callback(None)
        results = await DeferredList(requests, consumeErrors=True)
        self.assertEqual({result.type for _, result in results}, {LoadFailed})
        self.assertEqual(len({str(result.value) for _, result in results}), 1)
        self.workers.install = InstallReply(True, address="127.0.0.1:20000")
        await self.ensure(two)

    async def test_an_owner_that_dies_is_replaced(self) -> None:
        """The owner freezes while it stages: the other loads the model once; the thawed owner does nothing (LOAD-6)."""
        _, two = await self.begin()
        two.start()
        gate = self.workers.gates["stage"] = Deferred()
        mine = self.ensure(self.frontend("one", beat=1000.0))
        await until(lambda: "stage" in self.workers.steps, "the staging begins")
        self.workers.gates.clear()
        await self.pool_.execute("update model_load_jobs set last_progress = now() - interval '61 s'")
        await until(self.replicas.all, "the replica is there", within=30.0)
        gate.callback(None)
        self.assertEqual((await mine).address, "127.0.0.1:20000")
        self.assertEqual(self.workers.steps.count("load"), 1)
        self.assertEqual(await self.jobs(), [])

    async def test_no_second_copy_inside_the_grace(self) -> None:
        """
        A warm model whose node fell silent, or whose tunnel is lost, is not loaded a second time while the grace lasts,
        whatever the node's status says; once it departed, the other node gets it.
        """
        one, two = await self.begin()
        home = (await self.ensure(one)).node_id
        lost = "update node_connections set owner_instance_id = '', disconnected_at = now() - interval '{} s'"
        for status in ("healthy", "unhealthy", "offline"):
            await self.pool_.execute(
                "update backend_nodes set status = %(status)s where id = %(id)s", {"status": status, "id": home}
            )
            self.assertEqual((await self.ensure(two)).node_id, home)
        await self.pool_.execute(lost.format(60) + " where node_id = %(id)s", {"id": home})
        self.assertEqual((await self.ensure(two)).node_id, home)
        self.assertEqual(self.workers.steps.count("load"), 1)
        await self.pool_.execute(lost.format(91) + " where node_id = %(id)s", {"id": home})
        self.assertNotEqual((await self.ensure(two)).node_id, home)
        self.assertEqual(self.workers.steps.count("load"), 2)

    async def test_a_ghost_is_forgotten_by_the_next_load(self) -> None:
        """
        Loaded on two nodes, one of them killed: inside the grace its row stays. After it, with the other one unloaded
        on the first frontend, a request on the second dials no ghost: the model is loaded afresh, and the dead node's
        row is gone (BR-015).
        """
        one, two = await self.begin()
        alive = (await self.ensure(one)).node_id
        [dead] = [node for node in self.ids if node != alive]
        await self.replicas.put(dead, "tiny", 0, "127.0.0.1:20009", "", "llama-cpp", "loaded", self.model.revision)
        lost = "update node_connections set owner_instance_id = '', disconnected_at = now() - interval '{} s'"
        await self.pool_.execute(lost.format(60) + " where node_id = %(id)s", {"id": dead})
        self.assertEqual(len(await one.unload("tiny", alive)), 1)
        self.assertEqual((await self.ensure(two)).node_id, dead)  # the only copy, and it may come back: no second load
        self.assertEqual([row.node_id for row in await self.replicas.all()], [dead])
        await self.pool_.execute(lost.format(91) + " where node_id = %(id)s", {"id": dead})
        self.assertEqual((await self.ensure(two)).node_id, alive)
        self.assertEqual(self.workers.steps.count("load"), 2)
        self.assertEqual([row.node_id for row in await self.replicas.all()], [alive])

    async def test_departed_nodes_are_no_route(self) -> None:
        """With every tunnel gone for longer than the grace a cold request reads "no route" (WALK-16)."""
        one, _ = await self.begin()
        await self.pool_.execute(
            "update node_connections set owner_instance_id = '', disconnected_at = now() - interval '91 s'"
        )
        error = await self.assert_raises(Unreached, one.ensure(self.model, wait=None))
        self.assertIsInstance(error.outcome, NoRoute)
        self.assertTrue(error.outcome.departed)

    async def test_unload_takes_the_row_with_the_process(self) -> None:
        """After an unload the row is gone, and the next request loads again (WALK-21)."""
        one, two = await self.begin()
        await self.ensure(one)
        self.assertEqual(len(await two.unload("tiny")), 1)
        self.assertEqual(await self.replicas.all(), [])
        await self.ensure(two)
        self.assertEqual(self.workers.steps.count("load"), 2)

    async def test_a_cancel_on_the_other_frontend(self) -> None:
        """Cancelled on one frontend while the other stages: waiters on both are told, the rows are gone (LOAD-17)."""
        one, two = await self.begin()
        self.workers.gates["stage"] = Deferred()
        waiting = [self.ensure(one), self.ensure(one)]
        await until(lambda: "stage" in self.workers.steps, "the staging begins")
        waiting.append(self.ensure(two))
        await self.wait_here(one, 2)
        await self.watches(two)
        self.assertTrue(await two.cancel("tiny", "by ann"))
        results = await DeferredList(waiting, consumeErrors=True)
        self.assertEqual({result.type for _, result in results}, {LoadCancelled})
        self.assertEqual({"by ann" in str(result.value) for _, result in results}, {True})
        self.assertEqual((await self.jobs(), await self.replicas.all()), ([], []))
        self.assertEqual(self.workers.steps.count("install"), 1)

    async def test_killed_database_sessions_never_leave_two_loads(self) -> None:
        """Every session of the database is killed while a model is staged: one load, one replica (LOAD-9)."""
        one, two = await self.begin()
        gate = self.workers.gates["stage"] = Deferred()
        waiting = [self.ensure(one) for _ in range(3)]
        await until(lambda: "stage" in self.workers.steps, "the staging begins")
        waiting += [self.ensure(two) for _ in range(3)]
        for loads in (one, two):
            await self.wait_here(loads, 3)
        await self.watches(two)
        other = await self.pool(size=1)
        kill = (
            "select count(pg_terminate_backend(pid)) as n from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        self.assertGreater((await other.fetch(kill, {}))[0]["n"], 0)
        gate.callback(None)
        found = await gatherResults(waiting)
        self.assertEqual(len({row.address for row in found}), 1)
        self.assertEqual(self.workers.steps, ["list", "install", "stage", "connect", "load", "close"])
        self.assertEqual(len(await self.replicas.all()), 1)

    async def test_no_lock_is_held_while_a_model_loads(self) -> None:
        """While a load waits for its worker no transaction is open and no lock is held in the database (LOAD-9)."""
        one, two = await self.begin()
        gate = self.workers.gates["load"] = Deferred()
        slow = self.ensure(one)
        await until(lambda: "load" in self.workers.steps, "the load begins")
        other = await self.pool(size=1)
        busy = (
            "select count(*) as n from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
            " and state like 'idle in transaction%%'"
        )
        held = "select count(*) as n from pg_locks where locktype = 'advisory'"
        for question in (busy, held):
            self.assertEqual((await other.fetch(question, {}))[0]["n"], 0, question)
        self.workers.gates.clear()
        self.model = make_model("other")
        self.assertEqual((await self.ensure(two)).model_name, "other")
        gate.callback(None)
        await slow

    async def test_an_old_configuration_is_stopped_durably(self) -> None:
        """A changed model file: the old replica is stopped by whoever looks next, also after a failed try (LOAD-22)."""
        one, two = await self.begin()
        await self.ensure(one)
        self.workers.immortal = "it survived SIGKILL"
        self.model = make_model("tiny", context_size=64)
        one.start()
        await until(lambda: "stop" in self.workers.steps, "the first try")
        await until(
            lambda: self.pool_.fetch("select 1 from node_models where cleanup_error <> ''"), "its failure is recorded"
        )
        await one.stop()
        (row,) = await self.pool_.fetch("select * from node_models")
        self.assertEqual((row["state"], row["cleanup_attempts"]), ("unloading", 1))
        self.assertIn("it survived SIGKILL", row["cleanup_error"])
        self.assertEqual(await self.replicas.loaded("tiny"), [])
        self.workers.immortal = ""
        await self.pool_.execute("update node_models set cleanup_next_retry_at = now()")
        two.start()
        await until(self.none_left, "the old replica is gone")
        self.assertEqual(self.workers.processes, {})

    async def none_left(self) -> bool:
        """No replica's row is left."""
        return not await self.replicas.all()
