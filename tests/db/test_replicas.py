"""Replicas and scheduling wishes."""

from __future__ import annotations

from localai_dist.ids import InstanceId, NodeId
from localai_dist.reach import Answer, Answered, NoRoute, Reconnecting, RegistryUnknown
from localai_dist.registry.instances import Instances
from localai_dist.registry.nodes import Nodes
from localai_dist.registry.records import Registration, Replica, SchedulingRow
from localai_dist.registry.replicas import Replicas
from localai_dist.registry.scheduling import Scheduling
from localai_dist.store.errors import StatementFailed
from localai_dist.store.pool import Pool
from tests.db.case import DatabaseTestCase


class ReplicaTests(DatabaseTestCase):
    """Loaded copies of models."""

    pool_: Pool
    replicas: Replicas

    async def begin(self, *names: str) -> list[NodeId]:
        """Connect and register nodes of these names."""
        self.pool_ = await self.pool()
        self.replicas = Replicas(self.pool_)
        nodes = Nodes(self.pool_)
        await self.pool_.execute("delete from backend_nodes")
        found = []
        for name in names or ("a",):
            result = await nodes.register(Registration(name), auto_approve=True, presented_token=None)
            found.append(result.node.id)
        return found

    async def put(
        self, node: NodeId, index: int = 0, *, port: int = 20000, state: str = "loaded", revision: str = "r1"
    ) -> Replica:
        """Record a replica of ``m``."""
        return await self.replicas.put(node, "m", index, f"127.0.0.1:{port}", "secret", "llama-cpp", state, revision)

    async def test_one_row_for_each_place(self) -> None:
        """Recording a replica again moves it; there is one row for each node, model and index."""
        (node,) = await self.begin()
        await self.put(node, state="loading")
        replica = await self.put(node, port=20001)
        self.assertEqual(
            (replica.address, replica.state, replica.backend_token), ("127.0.0.1:20001", "loaded", "secret")
        )
        self.assertNotIn("secret", repr(replica))
        self.assertEqual(await self.replicas.all(), [replica])
        self.assertEqual(await self.replicas.get(node, "m", 0), replica)
        self.assertIsNone(await self.replicas.get(node, "m", 1))
        self.assertEqual(await self.replicas.of_model("m"), [replica])

    async def test_only_loaded_replicas_are_offered(self) -> None:
        """A request is offered loaded replicas of the wanted revision, the least busy first."""
        one, two, three = await self.begin("one", "two", "three")
        await self.put(one)
        await self.put(two)
        await self.put(three, revision="r0")
        await self.put(one, 1, state="loading")
        await self.replicas.begin(one, "m", 0)
        self.assertEqual([r.node_id for r in await self.replicas.loaded("m", "r1")], [two, one])
        self.assertEqual(len(await self.replicas.loaded("m")), 3)

    async def test_health_does_not_hide_a_warm_replica(self) -> None:
        """
        A node that is unhealthy or was silent keeps its warm copy on offer, so that no second one is loaded inside the
        grace; a draining node, one that left and one that is not approved offer none.
        """
        (node,) = await self.begin()
        await self.put(node)
        shown = {
            "status = 'healthy'": 1,
            "status = 'unhealthy'": 1,
            "status = 'offline'": 1,
            "status = 'draining'": 0,
            "status = 'offline', left_at = now()": 0,
            "status = 'pending', approved_at = null, left_at = null": 0,
        }
        for change, count in shown.items():
            await self.pool_.execute(f"update backend_nodes set {change} where id = %(id)s", {"id": node})
            self.assertEqual(len(await self.replicas.loaded("m", "r1")), count, change)

    async def test_in_flight_counts(self) -> None:
        """Requests are counted up and down, never below zero, and only on the process they were counted on."""
        (node,) = await self.begin()
        await self.put(node)
        self.assertTrue(await self.replicas.begin(node, "m", 0, address="127.0.0.1:20000"))
        self.assertFalse(await self.replicas.begin(node, "m", 0, address="127.0.0.1:9"))
        self.assertTrue(await self.replicas.begin(node, "m", 0))
        self.assertEqual((await self.replicas.all())[0].in_flight, 2)
        for left in (1, 0, 0):
            self.assertTrue(await self.replicas.end(node, "m", 0))
            self.assertEqual((await self.replicas.all())[0].in_flight, left)
        await self.replicas.begin(node, "m", 0)
        moved = await self.put(node, port=20005)
        self.assertEqual(moved.in_flight, 0)
        self.assertFalse(await self.replicas.end(node, "m", 0, address="127.0.0.1:20000"))
        self.assertTrue(await self.replicas.set_state(node, "m", 0, "unloading"))
        self.assertFalse(await self.replicas.begin(node, "m", 0))
        self.assertFalse(await self.replicas.end(node, "m", 7))
        self.assertTrue(await self.replicas.touch(node, "m", 0))
        await self.assert_raises(ValueError, self.replicas.set_state(node, "m", 0, "flying"))

    async def test_in_flight_of_a_dead_frontend(self) -> None:
        """Requests of a frontend that was killed are taken off by the others' beat, or by its own next start."""
        one, two = InstanceId("front-1"), InstanceId("front-2")
        node, other = await self.begin("a", "b")
        await self.put(node)
        await self.put(other)
        mine, theirs = Replicas(self.pool_, caller=one), Replicas(self.pool_, caller=two)
        await self.pool_.execute("delete from instances")
        instances = Instances(self.pool_, live_window=30)
        for each in (one, two):
            await instances.arrive(each, None, "1", "hash")
        for caller, where in ((mine, node), (theirs, node), (theirs, node), (theirs, other)):
            self.assertTrue(await caller.begin(where, "m", 0))
        await instances.beat(one, retention=300)
        self.assertEqual(await self.counts(), {node: 3, other: 1})

        await instances.arrive(two, None, "1", "hash")
        self.assertEqual(await self.counts(), {node: 1, other: 0})
        await theirs.begin(node, "m", 0)
        await theirs.begin(node, "m", 0)
        old = "update instances set last_seen = last_seen - interval '60 s' where id = 'front-2'"
        await self.pool_.execute(old)
        self.assertEqual((await instances.beat(one, retention=300)).swept, [two])
        await instances.beat(one, retention=300)
        self.assertEqual(await self.counts(), {node: 1, other: 0})

        # the one taken for dead lives: its ends take nothing off that was taken off already
        self.assertTrue(await theirs.end(node, "m", 0))
        self.assertEqual(await self.counts(), {node: 1, other: 0})
        await mine.begin(node, "m", 0)
        for left in (1, 0, 0):
            self.assertTrue(await mine.end(node, "m", 0))
            self.assertEqual((await self.counts())[node], left)

    async def counts(self) -> dict[NodeId, int]:
        """Requests in flight on each node's replica."""
        return {row.node_id: row.in_flight for row in await self.replicas.all()}

    async def test_removal_is_of_that_very_process(self) -> None:
        """A replica is forgotten only if its address is still the expected one."""
        (node,) = await self.begin()
        await self.put(node)
        self.assertFalse(await self.replicas.remove(node, "m", 0, "127.0.0.1:9"))
        self.assertTrue(await self.replicas.remove(node, "m", 0, "127.0.0.1:20000"))
        self.assertFalse(await self.replicas.remove(node, "m", 0))

    async def test_reaping_asks_the_outcome(self) -> None:
        """A replica's row goes only on an outcome that permits it."""
        (node,) = await self.begin()
        replica = await self.put(node)
        for outcome in (
            Reconnecting(node),
            RegistryUnknown("x"),
            NoRoute(node, departed=False),
            Answered(Answer.ERROR),
        ):
            self.assertFalse(await self.replicas.reap(replica, outcome))
        self.assertEqual(len(await self.replicas.all()), 1)
        self.assertTrue(await self.replicas.reap(replica, Answered(Answer.MODEL_NOT_LOADED)))
        self.assertEqual(await self.replicas.all(), [])

    async def test_no_replica_on_a_removed_node(self) -> None:
        """A replica can't be recorded on a node that is gone."""
        await self.begin()
        await self.assert_raises(StatementFailed, self.put(NodeId("nobody")))


class SchedulingTests(DatabaseTestCase):
    """What admins want of models."""

    async def test_put_get_delete(self) -> None:
        """A wish is stored, replaced, listed and forgotten; a new wish is tried at once."""
        pool = await self.pool()
        scheduling = Scheduling(pool)
        wish = SchedulingRow("m", {"rack": "7"}, min_replicas=1, max_replicas=2, min_prefix_match=0.5)
        stored = await scheduling.put(wish)
        self.assertEqual((stored.node_selector, stored.min_replicas, stored.min_prefix_match), ({"rack": "7"}, 1, 0.5))
        await pool.execute("update model_scheduling_configs set unsatisfiable_until = now(), unsatisfiable_ticks = 3")
        again = await scheduling.put(SchedulingRow("m", spread_all=True))
        self.assertEqual((again.id, again.unsatisfiable_until, again.unsatisfiable_ticks), (stored.id, None, 0))
        self.assertEqual(await scheduling.get("m"), again)
        self.assertEqual(await scheduling.all(), [again])
        self.assertIsNone(await scheduling.get("n"))
        self.assertTrue(await scheduling.delete("m"))
        self.assertFalse(await scheduling.delete("m"))
