"""Nodes: whose name it is, approval, heartbeat, status, labels."""

from __future__ import annotations

from dataclasses import replace

from twisted.internet.defer import Deferred, gatherResults

from localai_dist.ids import InstanceId, NodeId
from localai_dist.reach import NoRoute, PeerUnreachable, Reconnecting
from localai_dist.registry.errors import NotApproved, NotDraining, NotPending, UnknownNode
from localai_dist.registry.identity import TokenCheck
from localai_dist.registry.newcomer import Holder
from localai_dist.registry.nodes import Nodes, RegisterResult
from localai_dist.registry.ownership import Ownership
from localai_dist.registry.records import Readings, Registration
from localai_dist.registry.replicas import Replicas
from localai_dist.store.pool import Pool
from localai_dist.units import GiB
from localai_dist.wire.credentials import digest
from tests.db.case import DatabaseTestCase

BOOT, OTHER_BOOT = "boot-1", "boot-2"


class NodeCase(DatabaseTestCase):
    """A pool, the nodes, and words for what tests do with them."""

    pool_: Pool
    nodes: Nodes
    replicas: Replicas

    async def begin(self) -> None:
        """Connect; every test has its own names, so nothing is cleaned."""
        self.pool_ = await self.pool()
        self.nodes = Nodes(self.pool_)
        self.replicas = Replicas(self.pool_)
        for table in ("node_connections", "backend_nodes"):
            await self.pool_.execute(f"delete from {table}")

    async def register(
        self,
        token: str | None = None,
        *,
        name: str = "gpu-1",
        approve: bool = True,
        loose: bool = False,
        **more: object,
    ) -> RegisterResult:
        """Register a worker."""
        registration = replace(Registration(name, boot_id=BOOT), **more)  # type: ignore[arg-type]
        return await self.nodes.register(registration, auto_approve=approve, presented_token=token, loose=loose)

    async def row(self, node_id: NodeId) -> dict[str, object]:
        """The node's whole row."""
        row = await self.pool_.fetch_one("select * from backend_nodes where id = %(id)s", {"id": node_id})
        assert row is not None
        return row

    async def load(self, node_id: NodeId, model: str = "tiny", index: int = 0) -> None:
        """Record a loaded replica."""
        await self.replicas.put(node_id, model, index, "127.0.0.1:20000", "secret", "llama-cpp", "loaded", "r1")

    async def status(self, node_id: NodeId) -> str:
        """The node's status."""
        node = await self.nodes.get(node_id)
        assert node is not None
        return node.status


class IdentityTests(NodeCase):
    """A name belongs to whoever holds the node's token."""

    async def test_a_new_name_gets_a_token_and_only_its_hash_is_stored(self) -> None:
        """A new worker gets a token once; the database has only the hash of it (WALK-9)."""
        await self.begin()
        result = await self.register(approve=False)
        assert result.token is not None
        row = await self.row(result.node.id)
        self.assertEqual(row["node_token_hash"], digest(result.token))
        self.assertNotIn(result.token, repr(row))
        self.assertNotIn(result.token, repr(result))
        self.assertEqual((result.node.status, result.node.approved, result.parked), ("pending", False, False))

    async def test_the_right_token_is_kept(self) -> None:
        """Registering again with the node's token keeps id and token, so a lost answer costs nothing."""
        await self.begin()
        first = await self.register()
        again = await self.register(first.token)
        self.assertEqual((again.node.id, again.token, again.parked), (first.node.id, first.token, False))
        self.assertEqual(await self.nodes.authenticate(first.node.id, first.token), TokenCheck.OK)

    async def test_a_newcomer_changes_nothing(self) -> None:
        """A known name without its token: a pending newcomer; the real node's row and models stay (CLUS-8)."""
        await self.begin()
        first = await self.register(total_vram=8 * GiB)
        await self.load(first.node.id)
        before = await self.row(first.node.id)
        for token in (None, "", "wrong"):
            newcomer = await self.register(token, total_vram=80 * GiB, boot_id=OTHER_BOOT, labels={"evil": "yes"})
            self.assertTrue(newcomer.parked)
            self.assertEqual(newcomer.node.id, first.node.id)
            self.assertNotEqual(newcomer.token, first.token)
            self.assertEqual(await self.nodes.authenticate(first.node.id, newcomer.token), TokenCheck.PENDING)
            self.assertEqual(await self.nodes.check_token(first.node.id, newcomer.token), TokenCheck.WRONG)
        after = await self.row(first.node.id)
        changed = {key for key in before if before[key] != after[key]}
        self.assertEqual(changed, {"parked_token_hash", "parked_at"})
        self.assertNotIn("evil", await self.nodes.labels(first.node.id))
        self.assertEqual(len(await self.replicas.for_node(first.node.id)), 1)
        self.assertEqual(await self.nodes.authenticate(first.node.id, first.token), TokenCheck.OK)

    async def test_a_waiting_newcomer_keeps_its_token(self) -> None:
        """A parked newcomer that asks again waits under the same token."""
        await self.begin()
        await self.register()
        newcomer = await self.register("wrong")
        again = await self.register(newcomer.token)
        self.assertEqual((again.token, again.parked), (newcomer.token, True))

    async def test_approving_the_newcomer_swaps_the_identity(self) -> None:
        """After approval the newcomer's token is the node's, and the old one admits nobody (CLUS-8)."""
        await self.begin()
        first = await self.register()
        newcomer = await self.register("wrong", boot_id=OTHER_BOOT)
        approval = await self.nodes.approve(first.node.id)
        node = approval.node
        self.assertIsNotNone(approval.replaced)
        self.assertEqual((node.status, node.newcomer_waiting), ("healthy", False))
        self.assertEqual(await self.nodes.authenticate(node.id, newcomer.token), TokenCheck.OK)
        self.assertEqual(await self.nodes.authenticate(node.id, first.token), TokenCheck.WRONG)

    async def test_what_a_replaced_worker_had_loaded_is_gone(self) -> None:
        """What is loaded on a node ends with the hand-over of its name, and with no other approval."""
        await self.begin()
        first = await self.register(approve=False)
        await self.load(first.node.id)
        await self.register("wrong", approve=False, boot_id=OTHER_BOOT)
        for left in (1, 0):
            await self.nodes.approve(first.node.id)
            self.assertEqual(len(await self.replicas.for_node(first.node.id)), left)

    async def test_where_both_came_from_is_known(self) -> None:
        """Of a node and of the newcomer under its name the address is kept; an approval tells whom it replaced."""
        await self.begin()
        first = await self.register(seen_from="10.0.0.5")
        newcomer = await self.register("wrong", seen_from="10.0.0.7")
        self.assertEqual((newcomer.node.registered_from, newcomer.node.newcomer_from), ("10.0.0.5", "10.0.0.7"))
        self.assertIsNotNone(newcomer.node.newcomer_since)
        approval = await self.nodes.approve(first.node.id)
        before = Holder("healthy", "10.0.0.5", first.node.last_heartbeat)
        self.assertEqual(approval.replaced, before)
        self.assertEqual((approval.node.registered_from, approval.node.newcomer_from), ("10.0.0.7", ""))
        self.assertIsNone(approval.node.newcomer_since)
        again = await self.register(newcomer.token, seen_from="10.0.0.8")
        self.assertEqual((again.parked, again.node.registered_from), (False, "10.0.0.8"))

    async def test_an_approved_newcomer_of_a_node_that_left_is_healthy(self) -> None:
        """A worker that lost its identity after a clean stop is healthy once approved, and stays so."""
        await self.begin()
        first = await self.register()
        await self.nodes.deregister(first.node.id)
        old = "update backend_nodes set last_heartbeat = now() - interval '1 hour'"
        await self.pool_.execute(old)
        newcomer = await self.register(None, boot_id=OTHER_BOOT)
        self.assertTrue(newcomer.parked)
        node = (await self.nodes.approve(first.node.id)).node
        self.assertEqual((node.status, node.left_at), ("healthy", None))
        self.assertEqual(await self.nodes.mark_stale_offline(60.0), [])
        await self.pool_.execute(old)
        self.assertEqual(await self.nodes.mark_stale_offline(60.0), [node.id])
        await self.nodes.heartbeat(node.id, Readings())
        self.assertEqual(await self.status(node.id), "healthy")

    async def test_who_came_first_is_approved_first(self) -> None:
        """A newcomer never slips in under the approval that was meant for the pending node."""
        await self.begin()
        first = await self.register(approve=False)
        newcomer = await self.register("wrong", approve=False)
        approval = await self.nodes.approve(first.node.id)
        node = approval.node
        self.assertEqual((node.newcomer_waiting, approval.replaced), (True, None))
        self.assertEqual(await self.nodes.authenticate(node.id, first.token), TokenCheck.OK)
        self.assertEqual(await self.nodes.authenticate(node.id, newcomer.token), TokenCheck.PENDING)

    async def test_automatic_approval_never_hands_a_name_over(self) -> None:
        """Nodes being approved by themselves does not let a newcomer take a known name."""
        await self.begin()
        first = await self.register(approve=True)
        newcomer = await self.register(None, approve=True)
        self.assertTrue(newcomer.parked)
        self.assertEqual(await self.nodes.authenticate(first.node.id, first.token), TokenCheck.OK)

    async def test_loose_identity_believes_the_name(self) -> None:
        """In loose mode a stock worker gets a new token at each registration, under the same id."""
        await self.begin()
        first = await self.register(loose=True)
        again = await self.register(loose=True)
        self.assertEqual((again.node.id, again.parked), (first.node.id, False))
        self.assertNotEqual(again.token, first.token)
        self.assertEqual(await self.nodes.authenticate(first.node.id, first.token), TokenCheck.WRONG)

    async def test_every_answer_of_the_token_check(self) -> None:
        """Unknown node, no token on record, wrong, pending and right are told apart."""
        await self.begin()
        result = await self.register(approve=False)
        node = result.node.id
        self.assertEqual(await self.nodes.authenticate(NodeId("nobody"), "x"), TokenCheck.UNKNOWN_NODE)
        self.assertEqual(await self.nodes.check_token(NodeId("nobody"), "x"), TokenCheck.UNKNOWN_NODE)
        for nothing in (None, "", "wrong"):
            self.assertEqual(await self.nodes.authenticate(node, nothing), TokenCheck.WRONG)
        self.assertEqual(await self.nodes.authenticate(node, result.token), TokenCheck.PENDING)
        self.assertEqual(await self.nodes.check_token(node, result.token), TokenCheck.OK)
        await self.pool_.execute("update backend_nodes set node_token_hash = ''")
        self.assertEqual(await self.nodes.authenticate(node, ""), TokenCheck.NO_TOKEN)

    async def test_two_at_once_make_one_node(self) -> None:
        """Two workers register a new name at the same moment: one node, one of them owns it."""
        await self.begin()
        results = await gatherResults([Deferred.fromCoroutine(self.register()) for _ in range(2)])
        self.assertEqual(len({result.node.id for result in results}), 1)
        self.assertEqual(sorted(result.parked for result in results), [False, True])


class ApprovalTests(NodeCase):
    """Pending ends by approval, and by nothing else."""

    async def test_pending_never_becomes_healthy_by_anything_else(self) -> None:
        """Drain, resume, heartbeat, good-bye and registering again leave a pending node pending (CLUS-8)."""
        await self.begin()
        result = await self.register(approve=False)
        node = result.node.id
        await self.assert_raises(NotApproved, self.nodes.drain(node))
        await self.assert_raises(NotApproved, self.nodes.resume(node))
        self.assertIs(await self.nodes.heartbeat(node, Readings()), False)
        self.assertTrue(await self.nodes.deregister(node))
        self.assertIs(await self.nodes.heartbeat(node, Readings()), False)
        self.assertFalse(await self.nodes.mark_healthy(node, fresh_within=60))
        self.assertFalse(await self.nodes.mark_unhealthy(node, NoRoute(node, departed=True)))
        await self.register(result.token, approve=False, boot_id=OTHER_BOOT)
        await self.pool_.execute("update backend_nodes set last_heartbeat = now() - interval '1 hour'")
        self.assertEqual(await self.nodes.mark_stale_offline(60), [])
        self.assertEqual(await self.status(node), "pending")
        self.assertEqual((await self.nodes.approve(node)).node.status, "healthy")

    async def test_approving_twice_is_refused(self) -> None:
        """Approving what nobody waits for is an error, as is a node that does not exist."""
        await self.begin()
        result = await self.register()
        await self.assert_raises(NotPending, self.nodes.approve(result.node.id))
        await self.assert_raises(UnknownNode, self.nodes.approve(NodeId("nobody")))


class StatusTests(NodeCase):
    """What moves a node that is approved."""

    async def test_silence_and_its_end(self) -> None:
        """A silent node goes offline; its warm replicas stay on offer, and its next heartbeat brings it back."""
        await self.begin()
        node = (await self.register()).node.id
        await self.load(node)
        self.assertEqual(await self.nodes.mark_stale_offline(60), [])
        await self.pool_.execute("update backend_nodes set last_heartbeat = now() - interval '61 seconds'")
        self.assertEqual(await self.nodes.mark_stale_offline(60), [node])
        self.assertEqual(await self.nodes.mark_stale_offline(60), [])
        self.assertEqual(len(await self.replicas.loaded("tiny")), 1)
        self.assertIs(await self.nodes.heartbeat(node, Readings()), False)
        self.assertEqual(await self.status(node), "healthy")
        self.assertEqual(len(await self.replicas.loaded("tiny")), 1)

    async def test_a_heartbeat_learns_whether_the_tunnel_is_owned(self) -> None:
        """A frontend owns the node's tunnel, or none does: never dialled, released, or its owner swept."""
        await self.begin()
        node = (await self.register()).node.id
        owner, ownership = InstanceId("front-x"), Ownership(self.pool_, live_window=30.0)
        heard = [await self.nodes.heartbeat(node, Readings())]
        epoch = await ownership.claim(node, owner)
        heard.append(await self.nodes.heartbeat(node, Readings()))
        await ownership.release(node, owner, epoch)
        heard.append(await self.nodes.heartbeat(node, Readings()))
        self.assertEqual(heard, [False, True, False])
        self.assertIsNone(await self.nodes.heartbeat(NodeId("nobody"), Readings()))

    async def test_a_good_bye_lasts_until_it_registers(self) -> None:
        """A worker that said good-bye stays offline whatever beats late, and its replicas are forgotten."""
        await self.begin()
        result = await self.register()
        node = result.node.id
        await self.load(node)
        self.assertTrue(await self.nodes.deregister(node))
        self.assertEqual(await self.replicas.for_node(node), [])
        await self.nodes.heartbeat(node, Readings())
        self.assertEqual(await self.status(node), "offline")
        await self.register(result.token)
        self.assertEqual(await self.status(node), "healthy")
        self.assertFalse(await self.nodes.deregister(NodeId("nobody")))

    async def test_drain_and_resume(self) -> None:
        """A drained node takes no work but keeps what it has; the same process registering again keeps it drained."""
        await self.begin()
        result = await self.register()
        node = result.node.id
        await self.load(node)
        self.assertEqual((await self.nodes.drain(node)).status, "draining")
        self.assertEqual(await self.replicas.loaded("tiny"), [])
        self.assertEqual(len(await self.replicas.for_node(node)), 1)
        await self.register(result.token)
        self.assertEqual(await self.status(node), "draining")
        self.assertEqual((await self.nodes.resume(node)).status, "healthy")
        self.assertEqual((await self.nodes.resume(node)).status, "healthy")
        await self.nodes.deregister(node)
        await self.assert_raises(NotDraining, self.nodes.resume(node))
        await self.nodes.drain(node)
        self.assertEqual((await self.nodes.resume(node)).status, "offline")  # its worker has left
        await self.assert_raises(UnknownNode, self.nodes.drain(NodeId("nobody")))

    async def test_only_a_departed_route_demotes(self) -> None:
        """A node is marked unhealthy on a departed route, never on a reconnecting one or an unreachable peer."""
        await self.begin()
        node = (await self.register()).node.id
        for outcome in (Reconnecting(node), PeerUnreachable("f2", "refused"), NoRoute(node, departed=False)):
            self.assertFalse(await self.nodes.mark_unhealthy(node, outcome))
        self.assertEqual(await self.status(node), "healthy")
        self.assertTrue(await self.nodes.mark_unhealthy(node, NoRoute(node, departed=True)))
        await self.nodes.heartbeat(node, Readings())
        self.assertEqual(await self.status(node), "unhealthy")
        self.assertTrue(await self.nodes.mark_healthy(node, fresh_within=60))

    async def test_a_route_that_is_back_demotes_nobody(self) -> None:
        """A node whose tunnel came back between a look at it and the look's verdict stays healthy."""
        await self.begin()
        node, frontend = (await self.register()).node.id, InstanceId("f1")
        departed = NoRoute(node, departed=True)
        ownership = Ownership(self.pool_, live_window=30)
        epoch = await ownership.claim(node, frontend)
        self.assertFalse(await self.nodes.mark_unhealthy(node, departed))
        self.assertEqual(await self.status(node), "healthy")
        await ownership.release(node, frontend, epoch)
        self.assertTrue(await self.nodes.mark_unhealthy(node, departed))

    async def test_replicas_live_as_long_as_the_process(self) -> None:
        """Registering again drops the replicas' rows only if the worker restarted, or does not say (CLUS-8)."""
        await self.begin()
        result = await self.register()
        node = result.node.id
        for boot, kept in ((BOOT, 1), (OTHER_BOOT, 0), (OTHER_BOOT, 1), ("", 0), ("", 0)):
            await self.load(node)
            again = await self.register(result.token, boot_id=boot)
            self.assertEqual((len(await self.replicas.for_node(node)), again.dropped), (kept, not kept), boot)

    async def test_removal_takes_everything(self) -> None:
        """An admin removes a node: row, labels, replicas and connection are gone."""
        await self.begin()
        node = (await self.register()).node.id
        await self.load(node)
        await self.pool_.execute("insert into node_connections values (%(n)s, 'f1', 1, now(), null)", {"n": node})
        self.assertTrue(await self.nodes.remove(node))
        self.assertFalse(await self.nodes.remove(node))
        left = await self.pool_.fetch_one(
            "select (select count(*) from node_models) + (select count(*) from node_labels)"
            " + (select count(*) from node_connections) as n"
        )
        self.assertEqual(left, {"n": 0})


class ReadingsTests(NodeCase):
    """What a node has, and how it is called."""

    async def test_readings_update_what_they_name(self) -> None:
        """A heartbeat updates the readings it carries, a full disk included, and keeps the others."""
        await self.begin()
        node = (await self.register(total_vram=8 * GiB, total_disk=100, available_disk=50)).node.id
        await self.pool_.execute("update backend_nodes set reserved_vram = 7")
        await self.nodes.heartbeat(node, Readings(available_disk=0))
        found = await self.nodes.get(node)
        assert found is not None
        self.assertEqual((found.total_disk, found.available_disk, found.reserved_vram), (100, 0, 7))
        await self.nodes.heartbeat(node, Readings(available_vram=5))
        found = await self.nodes.get(node)
        assert found is not None
        self.assertEqual((found.available_vram, found.reserved_vram), (5, 0))
        self.assertFalse(await self.nodes.heartbeat(NodeId("nobody"), Readings()))

    async def test_a_budget_caps_free_memory(self) -> None:
        """A VRAM budget caps what placement may count on, at registration and at each heartbeat."""
        await self.begin()
        result = await self.register(total_vram=10 * GiB, vram_budget="50%")
        self.assertEqual((result.node.available_vram, result.node.vram_budget_bytes), (5 * GiB, 5 * GiB))
        await self.nodes.heartbeat(result.node.id, Readings(available_vram=9 * GiB))
        found = await self.nodes.get(result.node.id)
        assert found is not None
        self.assertEqual(found.available_vram, 5 * GiB)

    async def test_what_an_admin_set_stays(self) -> None:
        """An admin's replica limit and budget survive a registration."""
        await self.begin()
        result = await self.register(total_vram=10 * GiB)
        await self.pool_.execute(
            "update backend_nodes set max_replicas_per_model = 3, max_replicas_per_model_manually_set = true,"
            " vram_budget = '20%%', vram_budget_manually_set = true where true",
            {},
        )
        again = await self.register(result.token, total_vram=10 * GiB, vram_budget="80%", max_replicas_per_model=1)
        self.assertEqual((again.node.max_replicas_per_model, again.node.vram_budget), (3, "20%"))
        self.assertEqual(again.node.vram_budget_bytes, 2 * GiB)

    async def test_labels(self) -> None:
        """A node labels itself; an admin's labels survive its registration; put replaces, patch merges."""
        await self.begin()
        result = await self.register(total_vram=24 * GiB, gpu_vendor="nvidia", labels={"rack": "7"})
        node = result.node.id
        own = {"gpu.vendor": "nvidia", "gpu.vram": "24GB", "node.name": "gpu-1", "node.replica-slots": "1", "rack": "7"}
        self.assertEqual(await self.nodes.labels(node), own)
        self.assertEqual(await self.nodes.patch_labels(node, {"tier": "gold"}), {**own, "tier": "gold"})
        again = await self.register(result.token, labels={"rack": "8"})
        self.assertEqual((again.node.labels["tier"], again.node.labels["rack"]), ("gold", "8"))
        self.assertEqual(await self.nodes.put_labels(node, {"only": "this"}), {"only": "this"})
        self.assertTrue(await self.nodes.delete_label(node, "only"))
        self.assertFalse(await self.nodes.delete_label(node, "only"))
        await self.assert_raises(UnknownNode, self.nodes.put_labels(NodeId("nobody"), {}))

    async def test_listing(self) -> None:
        """All nodes come by name, with labels and counts; one is found by name."""
        await self.begin()
        await self.register(name="b")
        first = await self.register(name="a")
        await self.load(first.node.id)
        self.assertTrue(await self.replicas.begin(first.node.id, "tiny", 0))
        found = await self.nodes.all()
        self.assertEqual([(n.name, n.model_count, n.in_flight_count) for n in found], [("a", 1, 1), ("b", 0, 0)])
        self.assertEqual(await self.nodes.by_name("a"), found[0])
        self.assertIsNone(await self.nodes.by_name("c"))
