"""What frontends tell each other over the bus of a real PostgreSQL, and what they find out without it."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred

from localai_dist.bus.service import Bus
from localai_dist.ids import InstanceId, NodeId
from localai_dist.loads.fleet import Fleet
from localai_dist.loads.service import Loads
from localai_dist.loads.tools import LoadSettings
from localai_dist.registry.instances import Instances
from localai_dist.registry.nodes import Nodes
from localai_dist.registry.ownership import Ownership
from localai_dist.registry.records import Registration
from localai_dist.registry.replicas import Replicas
from localai_dist.registry.scheduling import Scheduling
from localai_dist.relay.forward import Forwarder
from localai_dist.relay.routes import ViaPeer
from localai_dist.roles.notices import Notices
from localai_dist.store.pool import Pool
from localai_dist.tunnel.held import HeldTunnels
from localai_dist.tunnel.identities import IdentityWatch
from localai_dist.wire.credentials import digest
from tests.db.case import DatabaseTestCase, until
from tests.loads.doubles import Workers, make_model
from tests.tunnel.doubles import ASession, session


class Frontend:
    """What of one frontend hears and speaks."""

    def __init__(self, url: str, pool: Pool, instance: str, workers: Workers) -> None:
        self.nodes = Nodes(pool)
        self.ownership = Ownership(pool, live_window=30.0)
        self.held = HeldTunnels(self.ownership, InstanceId(instance), clock=reactor)
        self.forwarder = Forwarder(self.held, None, self.ownership, clock=reactor, grace=90.0)
        self.identities = IdentityWatch(self.held, self.nodes.still_theirs, clock=reactor)
        self.bus = Bus(url, pool, reactor=reactor)
        self.loads = Loads(
            pool,
            Fleet(self.nodes, Replicas(pool), Scheduling(pool), self.ownership, 90.0),
            workers,
            workers,
            workers.connect,
            clock=reactor,
            instance=InstanceId(instance),
            settings=LoadSettings(poll=1000.0),
        )
        self.notices = Notices(
            self.bus.publisher,
            self.bus.subscriber,
            identities=self.identities,
            forwarder=self.forwarder,
            look_at_load=self.loads.look_now,
            look_at_loads=self.loads.look_all_now,
        )
        self.loads.on_ended = self.notices.load_ended

    async def start(self) -> None:
        """On the bus."""
        await self.bus.start()
        await self.notices.subscribe()

    async def stop(self) -> None:
        """Gone."""
        self.identities.stop()
        await self.loads.stop()
        await self.held.release_all()
        await self.bus.stop()

    async def hold(self, node: NodeId, token: str) -> ASession:
        """A tunnel of ``node``, admitted by ``token``, held here; told to the others."""
        tunnel = session()
        await self.held.attach(node, tunnel, credential=digest(token))
        self.notices.claimed(node)
        return tunnel

    def believes(self, node: NodeId, owner: str) -> None:
        """It has asked for the owner of ``node`` a moment ago."""
        route = ViaPeer(InstanceId(owner), "h:1")
        self.forwarder._owners[node] = (route, reactor.seconds() + 1000)


class BusFrontendCase(DatabaseTestCase):
    """Frontends of one database, on the bus; a test sets ``pool_`` and ``workers`` first."""

    pool_: Pool
    workers: Workers

    async def frontend(self, instance: str) -> Frontend:
        """One frontend."""
        await Instances(self.pool_, live_window=30.0).register(InstanceId(instance), "h:1", "1", "")
        frontend = Frontend(self.url, self.pool_, instance, self.workers)
        self.addCleanup(lambda: Deferred.fromCoroutine(frontend.stop()))
        await frontend.start()
        return frontend

    async def quiet(self) -> None:
        """Until no statement is under way: the look at an identity right after its attach is over."""
        await until(lambda: len(self.pool_._idle) == len(self.pool_._open) > 0, "nothing is asked any more")


class NoticesTests(BusFrontendCase):
    """Two frontends."""

    async def begin(self) -> tuple[Frontend, Frontend]:
        """Both on the bus, no node known."""
        self.pool_ = await self.pool(size=4)
        for table in ("node_connections", "model_load_jobs", "node_models", "backend_nodes"):
            await self.pool_.execute(f"delete from {table}")
        self.workers = Workers()
        return await self.frontend("one"), await self.frontend("two")

    async def register(self, nodes: Nodes, name: str, token: str | None = None) -> Any:
        """Register ``name``."""
        return await nodes.register(Registration(name), auto_approve=True, presented_token=token)

    async def test_a_swapped_identity_loses_its_tunnel_wherever_it_is_held(self) -> None:
        """
        Approving a newcomer at one frontend ends the old worker's tunnel at the other within seconds; other nodes'
        tunnels and the newcomer's own stay (CLUS-8).
        """
        one, two = await self.begin()
        old = await self.register(one.nodes, "a")
        other = await self.register(one.nodes, "b")
        assert old.token and other.token
        tunnel, bystander = await two.hold(old.node.id, old.token), await two.hold(other.node.id, other.token)
        newcomer = await self.register(one.nodes, "a")
        self.assertTrue(newcomer.parked)
        one.notices.identity_changed(old.node.id)
        await one.nodes.approve(old.node.id)
        one.notices.identity_changed(old.node.id)
        await until(lambda: tunnel.closed_here, "the old worker's tunnel ends", within=5.0)
        its_own = await one.hold(old.node.id, newcomer.token)
        two.notices.identity_changed(old.node.id)
        heard = one.bus.publisher.published.inline
        one.notices.identity_changed(other.node.id)
        await until(lambda: one.bus.publisher.published.inline > heard, "a later notice is sent")
        self.assertEqual((its_own.closed_here, bystander.closed_here), (False, False))

    async def test_a_removed_node_loses_its_tunnel(self) -> None:
        """Removing a node at one frontend ends its tunnel at the other (CLUS-8)."""
        one, two = await self.begin()
        node = await self.register(one.nodes, "a")
        tunnel = await two.hold(node.node.id, node.token)
        await one.nodes.remove(node.node.id)
        one.notices.identity_changed(node.node.id)
        await until(lambda: tunnel.closed_here, "its tunnel ends", within=5.0)

    async def test_what_was_missed_is_looked_at(self) -> None:
        """An identity that changed hands while the LISTEN connection was lost is found after it is back (CLUS-15)."""
        one, two = await self.begin()
        node = await self.register(one.nodes, "a")
        tunnel = await two.hold(node.node.id, node.token)
        await self.quiet()
        two.believes(NodeId("n"), "one")
        await one.nodes.remove(node.node.id)
        await self.deafen(two)
        await until(lambda: tunnel.closed_here, "its tunnel ends", within=10.0)
        self.assertEqual(two.forwarder._owners, {})

    async def test_a_tunnel_whose_identity_went_during_its_dial(self) -> None:
        """A tunnel that was admitted a moment before its node was removed is ended as soon as it is held."""
        one, _ = await self.begin()
        node = await self.register(one.nodes, "a")
        await one.nodes.remove(node.node.id)
        tunnel = await one.hold(node.node.id, node.token)
        await until(lambda: tunnel.closed_here, "its tunnel ends", within=5.0)

    async def test_tokens_of_stock_workers_rotate(self) -> None:
        """In loose mode a new token is no new owner, so nothing is ended; a removed node is (CLUS-8)."""
        one, _ = await self.begin()
        node = (await self.register(one.nodes, "a")).node.id
        self.assertEqual(await one.nodes.still_theirs({node: "old"}), set())
        self.assertEqual(await one.nodes.still_theirs({node: "old"}, loose=True), {node})
        await one.nodes.remove(node)
        self.assertEqual(await one.nodes.still_theirs({node: "old"}, loose=True), set())

    async def test_a_claim_makes_others_forget_the_old_owner(self) -> None:
        """A tunnel that moved is looked for anew by the next request, without waiting for the cache (CLUS-2)."""
        one, two = await self.begin()
        node = await self.register(one.nodes, "a")
        two.believes(node.node.id, "gone")
        await one.hold(node.node.id, node.token)
        await until(lambda: not two.forwarder._owners, "what was believed is forgotten", within=5.0)

    async def test_waiters_elsewhere_wake_when_a_load_ends(self) -> None:
        """A request that waits for a load of another frontend wakes when it ends, long before its next look."""
        one, two = await self.begin()
        first, second = await self.load_and_wait(one, two)
        self.workers.gates["load"].callback(None)
        self.assertEqual((await first).address, (await second).address)
        self.assertEqual(self.workers.steps.count("load"), 1)

    async def test_waiters_look_again_when_they_may_have_missed_the_end(self) -> None:
        """The end of a load was said while nobody heard it: told so, whoever waits looks at once (CLUS-15)."""
        one, two = await self.begin()
        first, second = await self.load_and_wait(one, two)
        one.loads.on_ended = lambda model: None
        self.workers.gates["load"].callback(None)
        loaded = await first
        self.assertFalse(second.called)
        await self.deafen(two)
        await until(lambda: second.called, "the waiter looks", within=10.0)
        self.assertEqual((await second).address, loaded.address)

    async def deafen(self, frontend: Frontend) -> None:
        """End its LISTEN connection; it makes another one, and is told that it may have missed something."""
        await self.pool_.fetch(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %(name)s",
            {"name": frontend.bus.name},
        )

    async def load_and_wait(self, one: Frontend, two: Frontend) -> tuple[Deferred[Any], Deferred[Any]]:
        """A load that runs at one frontend until its gate opens, and a request at the other that waits for it."""
        node = await self.register(one.nodes, "a")
        await one.hold(node.node.id, node.token)
        self.workers.gates["load"] = Deferred()
        first = Deferred.fromCoroutine(one.loads.ensure(make_model(), wait=None))
        await until(lambda: "load" in self.workers.steps, "the load runs")
        second = Deferred.fromCoroutine(two.loads.ensure(make_model(), wait=None))
        await until(
            lambda: getattr(two.loads._flights.get("tiny"), "_pausing", None) is not None, "the other one waits"
        )
        return first, second
