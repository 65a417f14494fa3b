"""Who holds a tunnel: claims, releases, presence; frontends that live, die and come back."""

from __future__ import annotations

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import Clock

from localai_dist.ids import Epoch, InstanceId, NodeId, NodeNames
from localai_dist.reach import describe
from localai_dist.registry.instances import Instances
from localai_dist.registry.membership import Membership
from localai_dist.registry.nodes import Nodes
from localai_dist.registry.ownership import Ownership
from localai_dist.registry.presence import PresenceState, outcome_of
from localai_dist.registry.records import Registration
from localai_dist.registry.replicas import Replicas
from localai_dist.store.errors import FencedOut, StoreUnavailable
from localai_dist.store.pool import Pool
from tests.db.case import DatabaseTestCase

N1, N2, N3 = NodeId("node-1"), NodeId("node-2"), NodeId("node-3")
F1, F2, F3 = InstanceId("front-1"), InstanceId("front-2"), InstanceId("front-3")
WINDOW, GRACE, RETENTION = 30.0, 90.0, 450.0


class OwnershipCase(DatabaseTestCase):
    """A pool and the two tables, empty."""

    pool_: Pool
    ownership: Ownership
    instances: Instances

    async def begin(self, *live: InstanceId) -> None:
        """Connect, empty the tables, register these frontends."""
        self.pool_ = await self.pool(size=4)
        self.ownership = Ownership(self.pool_, live_window=WINDOW)
        self.instances = Instances(self.pool_, live_window=WINDOW)
        await self.pool_.execute("delete from node_connections")
        await self.pool_.execute("delete from instances")
        for instance in live:
            await self.instances.register(instance, f"10.0.0.9:{len(instance)}", "1.0", "hash-of-" + instance)

    async def age_instance(self, instance: InstanceId, seconds: float) -> None:
        """As if that frontend had last been seen so long ago."""
        await self.pool_.execute(
            "update instances set last_seen = last_seen - make_interval(secs => %(s)s) where id = %(i)s",
            {"i": instance, "s": seconds},
        )

    async def age_loss(self, node: NodeId, seconds: float) -> None:
        """As if that tunnel had been lost so long ago."""
        await self.pool_.execute(
            "update node_connections set disconnected_at = now() - make_interval(secs => %(s)s) where node_id = %(n)s",
            {"n": node, "s": seconds},
        )

    async def state(self, node: NodeId) -> PresenceState:
        """Where a node is."""
        return (await self.ownership.route(node, grace=GRACE)).presence.state


class ClaimTests(OwnershipCase):
    """Claims and releases."""

    async def test_eight_claims_at_once(self) -> None:
        """Eight claims of one node at once: eight epochs, one row, and its epoch is one of them (CLUS-1)."""
        await self.begin()
        claims = [Deferred.fromCoroutine(self.ownership.claim(N1, InstanceId(f"f{n}"))) for n in range(8)]
        epochs = await gatherResults(claims)
        self.assertEqual(len(set(epochs)), 8)
        rows = await self.pool_.fetch("select * from node_connections")
        self.assertEqual(len(rows), 1)
        self.assertEqual(rows[0]["owner_instance_id"], f"f{epochs.index(rows[0]['epoch'])}")

    async def test_the_last_claim_wins(self) -> None:
        """A claim takes the row from whoever held it; the old holder's release changes nothing and is told so."""
        await self.begin(F1, F2)
        old = await self.ownership.claim(N1, F1)
        new = await self.ownership.claim(N1, F2)
        await self.assert_raises(FencedOut, self.ownership.release(N1, F1, old))
        await self.assert_raises(FencedOut, self.ownership.release(N1, F2, old))
        await self.assert_raises(FencedOut, self.ownership.release(N1, F1, new))
        self.assertEqual((await self.ownership.route(N1, grace=GRACE)).owner, F2)
        await self.ownership.release(N1, F2, new)
        await self.assert_raises(FencedOut, self.ownership.release(N1, F2, new))
        await self.assert_raises(FencedOut, self.ownership.release(N2, F2, Epoch(1)))

    async def test_what_a_frontend_holds(self) -> None:
        """The rows of one frontend are listed with their epochs."""
        await self.begin(F1)
        epoch = await self.ownership.claim(N1, F1)
        await self.ownership.claim(N2, F2)
        self.assertEqual(await self.ownership.held_by(F1), {N1: epoch})


class PresenceTests(OwnershipCase):
    """Four values, one statement."""

    async def test_the_life_of_a_tunnel(self) -> None:
        """Never dialled, connected, reconnecting inside the grace, departed after it, connected again."""
        await self.begin(F1)
        self.assertEqual(await self.state(N1), PresenceState.NEVER_DIALLED)
        epoch = await self.ownership.claim(N1, F1)
        route = await self.ownership.route(N1, grace=GRACE)
        self.assertEqual(route.presence.state, PresenceState.CONNECTED)
        self.assertEqual((route.owner, route.address, route.epoch), (F1, "10.0.0.9:7", epoch))
        self.assertIsNotNone(route.presence.connected_at)
        await self.ownership.release(N1, F1, epoch)
        route = await self.ownership.route(N1, grace=GRACE)
        self.assertEqual(route.presence.state, PresenceState.RECONNECTING)
        self.assertEqual((route.owner, route.address), (None, None))
        left, ends = route.presence.grace_left, route.presence.grace_ends_at
        assert left is not None and ends is not None and route.presence.disconnected_at is not None
        self.assertTrue(GRACE - 30 < left <= GRACE)
        self.assertEqual((ends - route.presence.disconnected_at).total_seconds(), GRACE)
        await self.age_loss(N1, GRACE - 10)
        self.assertEqual(await self.state(N1), PresenceState.RECONNECTING)
        await self.age_loss(N1, GRACE + 1)
        self.assertEqual(await self.state(N1), PresenceState.DEPARTED)
        await self.ownership.claim(N1, F1)
        self.assertEqual(await self.state(N1), PresenceState.CONNECTED)

    async def test_a_dead_frontend_owns_nothing(self) -> None:
        """A row of a frontend that is not live names no owner and reads reconnecting until it is swept (CLUS-3)."""
        await self.begin(F1)
        await self.ownership.claim(N1, F1)
        await self.age_instance(F1, WINDOW + 1)
        route = await self.ownership.route(N1, grace=GRACE)
        self.assertEqual((route.presence.state, route.owner, route.address), (PresenceState.RECONNECTING, None, None))
        self.assertIsNone(route.presence.grace_ends_at)

    async def test_a_held_row_with_an_old_stamp_is_not_departed(self) -> None:
        """Whatever an old departure stamp says, a held row is connected, or reconnecting if its owner died (CLUS-3)."""
        await self.begin(F1)
        await self.ownership.claim(N1, F1)
        await self.age_loss(N1, 10 * GRACE)
        self.assertEqual(await self.state(N1), PresenceState.CONNECTED)
        await self.age_instance(F1, WINDOW + 1)
        self.assertEqual(await self.state(N1), PresenceState.RECONNECTING)

    async def test_a_node_is_told_by_its_name(self) -> None:
        """Where a node is comes with its name, which a frontend that never read its row knows from then on."""
        await self.begin(F1)
        nodes, names = Nodes(self.pool_), NodeNames()
        await self.pool_.execute("delete from backend_nodes")
        node = (await nodes.register(Registration("worker-1"), auto_approve=True, presented_token=None)).node.id
        ownership = Ownership(self.pool_, live_window=WINDOW, names=names)
        self.assertEqual(names(node), node)
        fact = await ownership.route(node, grace=GRACE)
        lost = outcome_of(node, fact.presence)
        assert lost is not None
        self.assertIn("no route to node worker-1", describe(lost))
        self.assertEqual((names(node), names(N1)), ("worker-1", N1))
        at_the_door = NodeNames()
        await Nodes(self.pool_, names=at_the_door).authenticate(node, "no-such-token")
        self.assertEqual(at_the_door(node), "worker-1")
        self.assertEqual((await ownership.route(N1, grace=GRACE)).presence.name, "")

    async def test_many_nodes_by_one_statement(self) -> None:
        """Every node asked for gets an answer, the unknown ones too; nobody else does."""
        await self.begin(F1)
        await self.ownership.claim(N1, F1)
        epoch = await self.ownership.claim(N2, F1)
        await self.ownership.release(N2, F1, epoch)
        found = await self.ownership.presence_many([N1, N2, N3, N1], GRACE)
        self.assertEqual(
            {node: presence.state.value for node, presence in found.items()},
            {N1: "connected", N2: "reconnecting", N3: "never_dialled"},
        )
        self.assertEqual(await self.ownership.presence_many([], GRACE), {})

    async def test_an_owner_without_address_is_still_connected(self) -> None:
        """A frontend nobody can dial owns its tunnels all the same; the route has no address."""
        await self.begin()
        await self.instances.register(F1, None, "1.0", "hash")
        await self.ownership.claim(N1, F1)
        route = await self.ownership.route(N1, grace=GRACE)
        self.assertEqual((route.presence.state, route.owner, route.address), (PresenceState.CONNECTED, F1, None))

    async def test_a_database_that_is_away_knows_nothing(self) -> None:
        """Without the database there is no presence at all, rather than an absent node."""
        await self.begin(F1)
        await self.pool_.stop()
        await self.assert_raises(StoreUnavailable, self.ownership.route(N1, grace=GRACE))

    async def test_only_a_tunnel_that_nobody_took_is_reclaimed(self) -> None:
        """A swept frontend takes back what is still its own; what was claimed by another one since, never (CLUS-21)."""
        await self.begin(F1, F2)
        old = await self.ownership.claim(N1, F1)
        await self.instances.deregister(F1)
        await self.instances.register(F1, None, "1", "hash")
        new = await self.ownership.reclaim(N1, F1, old)
        self.assertNotEqual(new, old)
        self.assertEqual(await self.ownership.held_by(F1), {N1: new})
        moved = await self.ownership.claim(N1, F2)
        await self.assert_raises(FencedOut, self.ownership.reclaim(N1, F1, new))
        self.assertEqual(await self.ownership.held_by(F2), {N1: moved})
        await self.pool_.execute("delete from node_connections")
        self.assertEqual(await self.ownership.held_by(F1), {})
        again = await self.ownership.reclaim(N1, F1, new)  # its row was purged: nobody has it
        self.assertEqual(await self.ownership.held_by(F1), {N1: again})

    async def test_a_node_nobody_owns_is_adopted_and_no_other(self) -> None:
        """At a beat a frontend owns again what it holds and nobody owns; an owned row stays as it is (CLUS-2)."""
        await self.begin(F1, F2)
        lost, taken = await self.ownership.claim(N1, F1), await self.ownership.claim(N2, F2)
        await self.ownership.release(N1, F1, lost)
        adopted = await self.ownership.adopt([N1, N2], F1)
        self.assertEqual(list(adopted), [N1])
        self.assertNotEqual(adopted[N1], lost)
        self.assertIs(await self.state(N1), PresenceState.CONNECTED)
        self.assertEqual(await self.ownership.held_by(F2), {N2: taken})
        self.assertEqual(await self.ownership.adopt([], F1), {})


class InstanceTests(OwnershipCase):
    """Frontends."""

    async def test_address_and_secret_are_published_together(self) -> None:
        """A registered frontend is found with its address and its secret's hash; an unknown one is not."""
        await self.begin(F1)
        found = await self.instances.live(F1)
        assert found is not None
        self.assertEqual((found.address, found.version, found.live), ("10.0.0.9:7", "1.0", True))
        self.assertEqual(await self.instances.peer_token_hash(F1), "hash-of-front-1")
        self.assertIsNone(await self.instances.peer_token_hash(F2))
        await self.instances.register(F1, "10.0.0.1:1", "1.1", "other")
        self.assertEqual([(i.address, i.version) for i in await self.instances.all()], [("10.0.0.1:1", "1.1")])

    async def test_a_new_process_holds_nothing_of_its_former_one(self) -> None:
        """
        A frontend restarted with the same id loses the tunnels of its former process at once; a running one that only
        registers again loses none, and nobody else's rows are touched.
        """
        await self.begin(F1, F2)
        await self.ownership.claim(N1, F1)
        await self.ownership.claim(N2, F2)
        await self.instances.register(F1, "10.0.0.1:1", "1", "hash")
        self.assertEqual(await self.state(N1), PresenceState.CONNECTED)
        self.assertEqual(await self.instances.arrive(F1, "10.0.0.1:1", "1", "another"), [N1])
        states = await self.ownership.presence_many([N1, N2, N3], GRACE)
        self.assertEqual([states[n].state.value for n in (N1, N2, N3)], ["reconnecting", "connected", "never_dialled"])
        self.assertEqual(await self.instances.peer_token_hash(F1), "another")
        self.assertEqual(await self.instances.arrive(F1, "10.0.0.1:1", "1", "another"), [])
        self.assertEqual(await self.instances.arrive(F3, None, "1", "new"), [])
        self.assertIsNotNone(await self.instances.live(F3))

    async def test_a_departure_is_kept_as_long_as_its_replica_rows(self) -> None:
        """
        An old departure of a node that has replica rows is not purged: without it the rows could never be reaped. Once
        they are gone, it goes.
        """
        await self.begin(F1)
        nodes = Nodes(self.pool_)
        known = (await nodes.register(Registration("kept"), auto_approve=True, presented_token=None)).node.id
        await Replicas(self.pool_).put(known, "m", 0, "127.0.0.1:20000", "", "llama-cpp", "loaded", "r1")
        await self.ownership.release(known, F1, await self.ownership.claim(known, F1))
        await self.age_loss(known, 10 * RETENTION)
        self.assertEqual((await self.instances.beat(F1, retention=RETENTION)).purged, 0)
        self.assertEqual(await self.state(known), PresenceState.DEPARTED)
        self.assertTrue(await Replicas(self.pool_).remove(known, "m", 0))
        self.assertEqual((await self.instances.beat(F1, retention=RETENTION)).purged, 1)
        self.assertEqual(await self.state(known), PresenceState.NEVER_DIALLED)

    async def test_a_heartbeat_revives_nobody(self) -> None:
        """A heartbeat keeps a frontend live; it does not bring back a row that was swept."""
        await self.begin(F1)
        await self.age_instance(F1, WINDOW + 1)
        self.assertIsNone(await self.instances.live(F1))
        self.assertTrue(await self.instances.heartbeat(F1))
        self.assertIsNotNone(await self.instances.live(F1))
        await self.instances.deregister(F1)
        self.assertFalse(await self.instances.heartbeat(F1))
        self.assertEqual(await self.instances.all(), [])

    async def test_one_beat_does_it_all(self) -> None:
        """One statement: own heartbeat, dead frontends swept, their tunnels lost, old departures forgotten (CLUS-4)."""
        await self.begin(F1, F2, F3)
        await self.ownership.claim(N1, F2)
        await self.ownership.claim(N2, F3)
        epoch = await self.ownership.claim(N3, F3)
        await self.ownership.release(N3, F3, epoch)
        await self.age_loss(N3, RETENTION + 1)
        await self.age_instance(F2, WINDOW + 1)
        await self.age_instance(F1, WINDOW + 1)
        beat = await self.instances.beat(F1, retention=RETENTION)
        self.assertEqual((beat.alive, beat.swept, beat.lost, beat.purged), (True, [F2], [N1], 1))
        self.assertEqual([(i.id, i.live) for i in await self.instances.all()], [(F1, True), (F3, True)])
        states = await self.ownership.presence_many([N1, N2, N3], GRACE)
        self.assertEqual([states[n].state.value for n in (N1, N2, N3)], ["reconnecting", "connected", "never_dialled"])
        beat = await self.instances.beat(F1, retention=RETENTION)
        self.assertEqual((beat.alive, beat.swept, beat.lost, beat.purged), (True, [], [], 0))

    async def test_rows_of_a_frontend_nobody_knows_are_lost(self) -> None:
        """A tunnel held by a frontend without a row is lost at the next beat, never the beater's own."""
        await self.begin(F1)
        await self.ownership.claim(N1, InstanceId("long-gone"))
        await self.ownership.claim(N2, F1)
        beat = await self.instances.beat(F1, retention=RETENTION)
        self.assertEqual(beat.lost, [N1])

    async def test_a_sweep_never_touches_the_sweeper(self) -> None:
        """However old its own row is, the sweeper stays; the dead one's tunnels are lost."""
        await self.begin(F1, F2)
        await self.ownership.claim(N1, F2)
        for each in (F1, F2):
            await self.age_instance(each, WINDOW + 1)
        self.assertEqual(await self.instances.sweep(F1), [F2])
        self.assertEqual([i.id for i in await self.instances.all()], [F1])
        self.assertEqual(await self.state(N1), PresenceState.RECONNECTING)

    async def test_many_sweepers_at_once(self) -> None:
        """Several frontends beat at the same moment over many dead ones: no error, everything swept once."""
        await self.begin(F1, F2, F3)
        await self.pool_.execute(
            "insert into instances (id, last_seen)"
            " select 'dead-' || n, now() - interval '1 hour' from generate_series(1, 40) n"
        )
        await self.pool_.execute(
            "insert into node_connections select 'n-' || n, 'dead-' || n, n, now(), null from generate_series(1, 40) n"
        )
        beats = await gatherResults(
            [Deferred.fromCoroutine(self.instances.beat(f, retention=RETENTION)) for f in (F1, F2, F3)]
        )
        self.assertTrue(all(beat.alive for beat in beats))
        self.assertEqual(sorted(i for beat in beats for i in beat.swept), sorted(f"dead-{n}" for n in range(1, 41)))
        again = await self.instances.beat(F1, retention=RETENTION)
        lost = [n for beat in [*beats, again] for n in beat.lost]
        self.assertEqual(sorted(lost), sorted(f"n-{n}" for n in range(1, 41)))


class MembershipTests(OwnershipCase):
    """The service around the beat."""

    def member(self, clock: Clock, reclaimed: list[str]) -> Membership:
        """A frontend that notes when it re-claims."""

        async def reclaim() -> None:
            reclaimed.append("reclaimed")
            await self.ownership.claim(N1, F1)

        return Membership(
            self.instances,
            id=F1,
            address="10.0.0.1:8080",
            version="1",
            peer_token_hash="h",
            grace=GRACE,
            reclaim=reclaim,
            clock=clock,
        )

    async def test_a_frontend_taken_for_dead_comes_back(self) -> None:
        """Its own row deleted under it: it registers again and claims what it holds (CLUS-4)."""
        await self.begin()
        clock, reclaimed = Clock(), []  # type: ignore[var-annotated]
        member = self.member(clock, reclaimed)
        await member.join()
        await self.ownership.claim(N1, F1)
        member.startService()
        await member.beat()
        self.assertEqual(reclaimed, [])
        await self.instances.deregister(F1)
        self.assertEqual(await self.state(N1), PresenceState.RECONNECTING)
        await member.beat()
        self.assertEqual(reclaimed, ["reclaimed"])
        self.assertEqual(await self.state(N1), PresenceState.CONNECTED)
        await member.stopService()
        self.assertEqual(await self.instances.all(), [])
        self.assertEqual(await self.state(N1), PresenceState.RECONNECTING)
        self.assertEqual(clock.getDelayedCalls(), [])

    async def test_a_database_that_is_away_is_a_problem_that_ends(self) -> None:
        """A beat without the database says so and goes on; stopping does not hang on it."""
        await self.begin()
        clock = Clock()
        member = self.member(clock, [])
        await member.join()
        member.startService()
        await self.pool_.stop()
        await member.beat()
        self.assertIn("stopped", str(member.problem))
        await self.pool_.start()
        await member.beat()
        self.assertIsNone(member.problem)
        await self.pool_.stop()
        await member.stopService()
        self.assertEqual(clock.getDelayedCalls(), [])
