"""What many frontends do to the ownership rows: one statement each, one clock, nobody's own."""

from __future__ import annotations

import ast
import datetime
import re
import time
from collections.abc import Mapping
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import Clock

from localai_dist.ids import InstanceId, NodeId
from localai_dist.registry.instances import Instances
from localai_dist.registry.membership import Membership, retention
from localai_dist.registry.nodes import Nodes
from localai_dist.registry.ownership import Ownership
from localai_dist.registry.presence import PresenceState
from localai_dist.registry.records import Readings, Registration
from localai_dist.store.pool import Pool
from localai_dist.store.statements import read
from localai_dist.tunnel.held import HeldTunnels
from tests.db.case import DatabaseTestCase
from tests.registry.sites import module_of, sources
from tests.tunnel.doubles import session

N1, N2, N3 = NodeId("node-1"), NodeId("node-2"), NodeId("node-3")
F1, F2, F3 = InstanceId("front-1"), InstanceId("front-2"), InstanceId("front-3")
WINDOW, GRACE = 30.0, 90.0


class Counting:
    """A pool that notes each statement sent through it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.sent: list[str] = []

    async def fetch(self, statement: str, params: Mapping[str, Any] = {}) -> Any:
        self.sent.append(statement)
        return await self._pool.fetch(statement, params)

    async def fetch_one(self, statement: str, params: Mapping[str, Any] = {}) -> Any:
        self.sent.append(statement)
        return await self._pool.fetch_one(statement, params)

    async def execute(self, statement: str, params: Mapping[str, Any] = {}) -> int:
        self.sent.append(statement)
        return await self._pool.execute(statement, params)


class ClusterCase(DatabaseTestCase):
    """Several frontends' stores over one database."""

    async def begin(self, *live: InstanceId) -> None:
        """The tables empty, these frontends live."""
        self.pool_ = await self.pool(size=4)
        self.counting = Counting(self.pool_)
        self.ownership = Ownership(self.counting, live_window=WINDOW)  # type: ignore[arg-type]
        self.instances = Instances(self.counting, live_window=WINDOW)  # type: ignore[arg-type]
        for table in ("node_connections", "instances", "backend_nodes"):
            await self.pool_.execute(f"delete from {table}")
        for instance in live:
            await self.instances.register(instance, "10.0.0.9:7", "1", "hash")
        self.counting.sent.clear()

    async def age(self, table: str, column: str, seconds: float, key: str, value: str) -> None:
        """As if that had been so long ago."""
        await self.pool_.execute(
            f"update {table} set {column} = {column} - make_interval(secs => %(s)s) where {key} = %(v)s",
            {"s": seconds, "v": value},
        )

    async def state(self, node: NodeId) -> PresenceState:
        """Where a node is."""
        return (await self.ownership.route(node, grace=GRACE)).presence.state

    async def row(self, node: NodeId) -> dict[str, Any]:
        """The node's row."""
        row = await self.pool_.fetch_one("select * from node_connections where node_id = %(n)s", {"n": node})
        assert row is not None
        return dict(row)

    def member(self, id: InstanceId, reclaim: Any, clock: Any) -> Membership:
        """A frontend's membership."""
        return Membership(
            self.instances,
            id=id,
            address="10.0.0.1:8080",
            version="1",
            peer_token_hash="h",
            grace=GRACE,
            reclaim=reclaim,
            clock=clock,
        )


class OneStatementTests(ClusterCase):
    """Nothing is read first and written later."""

    async def test_claims_at_once(self) -> None:
        """Eight claims at once are eight statements, eight epochs of the sequence, one row, its epoch one (CLUS-1)."""
        await self.begin()
        before = await self.pool_.fetch_one("select last_value from node_connection_epochs")
        owners = [InstanceId(f"f{n}") for n in range(8)]
        epochs = await gatherResults([Deferred.fromCoroutine(self.ownership.claim(N1, owner)) for owner in owners])
        self.assertEqual(len(self.counting.sent), 8)
        after = await self.pool_.fetch_one("select last_value from node_connection_epochs")
        assert before is not None and after is not None
        self.assertEqual(len(set(epochs)), 8)
        self.assertTrue(all(before["last_value"] <= epoch <= after["last_value"] for epoch in epochs))
        rows = await self.pool_.fetch("select * from node_connections")
        self.assertEqual([row["owner_instance_id"] for row in rows], [owners[epochs.index(rows[0]["epoch"])]])

    async def test_times_and_epochs_are_the_databases(self) -> None:
        """No statement of claims, presence or membership takes a time or an epoch from outside but a fence (CLUS-1)."""
        await self.begin()
        allowed = {
            "ownership": {"node", "nodes", "instance", "epoch", "grace", "window"},
            "instances": {"id", "self", "address", "version", "peer_token_hash", "window", "retention"},
        }
        for file, names in allowed.items():
            for statement in read(f"{file}.sql").values():
                taken = set(_parameters(statement.sql))
                self.assertEqual(taken - names, set(), f"{file}.{statement.name}")
        self.assertIn("nextval('node_connection_epochs')", read("ownership.sql")["claim"].sql)
        self.assertNotIn("epoch", _parameters(read("ownership.sql")["claim"].sql))

    async def test_presence_is_one_statement_for_any_number(self) -> None:
        """Four conditions and a dead owner come from one statement, each by its name (CLUS-3)."""
        await self.begin(F1, F2)
        await self.ownership.claim(N1, F1)
        lost = await self.ownership.claim(N2, F1)
        await self.ownership.release(N2, F1, lost)
        gone = await self.ownership.claim(NodeId("node-4"), F1)
        await self.ownership.release(NodeId("node-4"), F1, gone)
        await self.age("node_connections", "disconnected_at", GRACE + 1, "node_id", "node-4")
        await self.ownership.claim(NodeId("node-5"), F2)
        await self.age("instances", "last_seen", WINDOW + 1, "id", F2)
        self.counting.sent.clear()
        nodes = [N1, N2, N3, NodeId("node-4"), NodeId("node-5")]
        found = await self.ownership.presence_many(nodes, GRACE)
        self.assertEqual(len(self.counting.sent), 1)
        self.assertEqual(
            [found[node].state.value for node in nodes],
            ["connected", "reconnecting", "never_dialled", "departed", "reconnecting"],
        )

    async def test_the_owner_is_never_one_that_is_not_live(self) -> None:
        """However a row got its owner, none that is not live by the database's clock is ever named (CLUS-3)."""
        await self.begin(F1)
        for owner in (F2, InstanceId("")):  # never registered; nobody
            await self.ownership.claim(N1, owner)
            route = await self.ownership.route(N1, grace=GRACE)
            self.assertEqual((route.owner, route.address, route.presence.owner), (None, None, None))
        await self.ownership.claim(N1, F1)
        for seconds, owned in ((0.0, F1), (WINDOW - 5, F1), (6.0, None)):
            await self.age("instances", "last_seen", seconds, "id", F1)
            self.assertEqual((await self.ownership.route(N1, grace=GRACE)).owner, owned)
        self.assertEqual(await self.state(N1), PresenceState.RECONNECTING)  # dead, not yet swept
        await self.age("node_connections", "connected_at", 10_000, "node_id", N1)
        await self.pool_.execute("update node_connections set disconnected_at = now() - interval '1 year'")
        self.assertEqual(await self.state(N1), PresenceState.RECONNECTING)
        await self.instances.heartbeat(F1)
        self.assertEqual(await self.state(N1), PresenceState.CONNECTED)

    async def test_a_beat_is_one_statement(self) -> None:
        """A frontend's membership costs one statement a beat (CLUS-4)."""
        await self.begin(F1, F2)
        await self.instances.beat(F1, retention=retention(GRACE))
        self.assertEqual(len(self.counting.sent), 1)


class LateEndingTests(ClusterCase):
    """What an owner that lost its tunnel may still do: nothing."""

    async def test_late_release_and_late_teardown(self) -> None:
        """A claims, B claims: A's release and its session's end are refused, B's row and session stay (CLUS-2)."""
        await self.begin(F1, F2)
        clock = Clock()
        a = HeldTunnels(self.ownership, F1, clock=clock)
        b = HeldTunnels(self.ownership, F2, clock=clock)
        old, new = session(), session()
        first = await a.attach(N1, old)
        await b.attach(N1, new)
        row = await self.row(N1)
        self.assertEqual(row["owner_instance_id"], F2)
        old.end()
        await a.detach(first)
        await a.detach(first)
        await a.release_all()
        self.assertEqual(await self.row(N1), row)
        self.assertIs(b.get(N1), new)
        await b.release_all()
        self.assertEqual(await self.state(N1), PresenceState.RECONNECTING)

    async def test_a_hundred_attaches_here_and_there(self) -> None:
        """100 flip-flops, each old end coming late: one owner, one open session, its epoch the row's (CLUS-2)."""
        await self.begin(F1, F2)
        clock = Clock()
        sides = [HeldTunnels(self.ownership, each, clock=clock) for each in (F1, F2)]
        ends: list[Deferred[None]] = []
        previous = None
        for turn in range(100):
            side, tunnel = sides[turn % 2], session()
            attachment = await side.attach(N1, tunnel)
            if previous is not None:
                late_side, late_tunnel, late = previous
                late_tunnel.end()
                ends.append(Deferred.fromCoroutine(late_side.detach(late)))
            previous = (side, tunnel, attachment)
        await gatherResults(ends)
        row = await self.row(N1)
        self.assertEqual((row["owner_instance_id"], row["disconnected_at"]), (F2, None))
        self.assertIsNone(sides[0].get(N1))
        held = sides[1].get(N1)
        assert held is not None and previous is not None
        self.assertIs(held, previous[1])
        self.assertEqual(await self.ownership.held_by(F2), {N1: row["epoch"]})
        for side in sides:
            await side.release_all()


class MembershipTests(ClusterCase):
    """Frontends come and go."""

    async def test_its_own_row_deleted_it_registers_and_reclaims(self) -> None:
        """Taken for dead, a frontend is back at its next beat with every tunnel it holds; none it lost (CLUS-4)."""
        await self.begin(F2)
        clock = Clock()
        held = HeldTunnels(self.ownership, F1, clock=clock)
        member = self.member(F1, held.reclaim, clock)
        await member.join()
        member.startService()
        for node in (N1, N2, N3):
            await held.attach(node, session())
        epochs = await self.ownership.held_by(F1)
        await self.age("instances", "last_seen", WINDOW + 1, "id", F1)
        beat = await self.instances.beat(F2, retention=retention(GRACE))
        self.assertEqual((beat.swept, sorted(beat.lost)), ([F1], [N1, N2, N3]))
        self.assertEqual(await self.state(N1), PresenceState.RECONNECTING)
        moved = await self.ownership.claim(N3, F2)  # its worker went elsewhere meanwhile
        gone = held.get(N2)
        assert gone is not None
        gone.abort(Exception("this one is dead"))
        await member.beat()
        self.assertIsNotNone(await self.instances.live(F1))
        states = await self.ownership.presence_many([N1, N2, N3], GRACE)
        self.assertEqual(
            [(states[n].state.value, states[n].owner) for n in (N1, N3)], [("connected", F1), ("connected", F2)]
        )
        self.assertEqual(states[N2].state, PresenceState.RECONNECTING)
        self.assertEqual(states[N3].epoch, moved)
        again = await self.ownership.held_by(F1)
        self.assertEqual(list(again), [N1])
        self.assertNotEqual(again[N1], epochs[N1])
        await held.release_all()
        await member.stopService()
        self.assertEqual([each.id for each in await self.instances.all()], [F2])

    async def test_departures_and_retention(self) -> None:
        """A loss is stamped once, counts as departed after the grace, and is forgotten after the retention (CLUS-4)."""
        self.assertEqual([retention(g) for g in (0.001, 60.0, 90.0, 1000.0)], [300.0, 300.0, 450.0, 5000.0])
        await self.begin(F1)
        await self.ownership.claim(N1, F2)  # F2 has no row: whoever beats marks its tunnels lost
        await self.instances.beat(F1, retention=retention(GRACE))
        stamp = (await self.row(N1))["disconnected_at"]
        self.assertIsNotNone(stamp)
        await self.instances.beat(F1, retention=retention(GRACE))
        self.assertEqual((await self.row(N1))["disconnected_at"], stamp)
        await self.age("node_connections", "disconnected_at", GRACE + 1, "node_id", N1)
        self.assertEqual(await self.state(N1), PresenceState.DEPARTED)
        await self.age("node_connections", "disconnected_at", retention(GRACE), "node_id", N1)
        self.assertEqual((await self.instances.beat(F1, retention=retention(GRACE))).purged, 1)
        self.assertEqual(await self.state(N1), PresenceState.NEVER_DIALLED)

    async def test_stopping_leaves_no_row(self) -> None:
        """A frontend that stops is gone from the list at once and its tunnels are lost from now on (CLUS-4)."""
        await self.begin(F2)
        member = self.member(F1, _nothing, Clock())
        await member.join()
        member.startService()
        await self.ownership.claim(N1, F1)
        await member.stopService()
        self.assertEqual([each.id for each in await self.instances.all()], [F2])
        self.assertEqual((await self.row(N1))["owner_instance_id"], "")
        self.assertEqual(await self.state(N1), PresenceState.RECONNECTING)


class SkewTests(ClusterCase):
    """Clocks of frontends and workers that are wrong."""

    async def test_five_minutes_either_way_change_nothing(self) -> None:
        """With a frontend's clock five minutes off, either way, every decision is the same (CLUS-4, BR-048)."""
        stories = []
        for skew in (-300.0, 0.0, 300.0):
            with _Skewed(self, skew):
                stories.append(await self.story(Clock(), skew))
        self.assertEqual(stories[0], stories[1])
        self.assertEqual(stories[2], stories[1])
        self.assertIn("departed", stories[1])
        self.assertIn(["gpu-stale"], stories[1])

    async def story(self, clock: Clock, skew: float) -> list[Any]:
        """One frontend's whole life among another, as decisions."""
        await self.begin(F2)
        clock.advance(1_000_000 + skew)
        held = HeldTunnels(self.ownership, F1, clock=clock)
        member = self.member(F1, held.reclaim, clock)
        await member.join()
        member.startService()
        told: list[Any] = []
        nodes = Nodes(self.pool_)
        names = {}
        for name in ("gpu-fresh", "gpu-stale"):
            registered = await nodes.register(Registration(name), auto_approve=True, presented_token=None)
            names[registered.node.id] = name
            await nodes.heartbeat(registered.node.id, Readings())
        await self.age("backend_nodes", "last_heartbeat", 61, "name", "gpu-stale")
        told.append([names[node] for node in await nodes.mark_stale_offline(60)])
        attachment = await held.attach(N1, session())
        await member.beat()
        for other in (F1, F2):
            beat = await self.instances.beat(other, retention=retention(GRACE))
            told.append((beat.alive, beat.swept, beat.lost))
        told += [each.live for each in await self.instances.all()]
        told.append((await self.state(N1)).value)
        stamps = await self.pool_.fetch_one(
            "select abs(extract(epoch from now() - last_seen)) < 60 as seen from instances where id = %(id)s",
            {"id": F1},
        )
        told.append(stamps)
        await held.detach(attachment)
        told.append((await self.state(N1)).value)
        await self.age("node_connections", "disconnected_at", GRACE + 1, "node_id", N1)
        told.append((await self.state(N1)).value)
        await self.ownership.claim(N1, F1)
        await self.age("instances", "last_seen", WINDOW + 1, "id", F1)
        told.append((await self.instances.beat(F2, retention=retention(GRACE))).swept)
        told.append((await self.state(N1)).value)
        await held.release_all()
        await member.stopService()
        return told

    def test_no_decision_reads_this_machines_wall_clock(self) -> None:
        """Nothing that decides about nodes, tunnels or loads asks the machine what time it is (CLUS-4, BR-048)."""
        deciding = ("registry", "tunnel", "relay", "health", "loads", "serving", "scheduler", "bus", "store", "roles")
        allowed = {"localai_dist.roles.stager"}  # an object store's signature carries the date
        found, looked = [], 0
        for path, tree in sources():
            if path.parts[-2] not in deciding:
                continue
            looked += 1
            if wall_clocks(tree):
                found.append(module_of(path))
        self.assertEqual(set(found) - allowed, set())
        self.assertGreater(looked, 60)

    def test_every_way_to_read_it_is_seen(self) -> None:
        """However a module imports the wall clock, called or handed on, it is found out (CLUS-4)."""
        for text in (
            "import time\nx = time.time()",
            "import time as t\nf(t.time)",
            "from time import time as now\nx = now()",
            "import time\nx = time.time_ns()",
            "import datetime\nx = datetime.datetime.now(tz)",
            "import datetime as d\nx = d.date.today()",
            "from datetime import UTC, datetime\nx = datetime.now(UTC)",
            "from datetime import datetime as d\nclock = d.utcnow",
        ):
            self.assertEqual(len(wall_clocks(ast.parse(text))), 1, text)
        for text in ("import time\nx = time.monotonic()", "x = clock.time()", "from datetime import timedelta"):
            self.assertEqual(wall_clocks(ast.parse(text)), [], text)


WALL_CLOCKS = {
    *(
        "time.time",
        "time.time_ns",
        "time.localtime",
        "time.gmtime",
        "time.ctime",
        "time.strftime",
        "time.clock_gettime",
    ),
    *("datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"),
}


def wall_clocks(tree: ast.AST) -> list[str]:
    """What of the machine's wall clock a module names, by full names, whatever it calls it."""
    meant: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                meant |= {each.asname or each.name: each.name for each in names}
            case ast.ImportFrom(module=str(module), names=names):
                meant |= {each.asname or each.name: f"{module}.{each.name}" for each in names}

    def full(node: ast.AST) -> str:
        match node:
            case ast.Name(id=name):
                return meant.get(name, "")
            case ast.Attribute(attr=attr, value=value):
                return f"{full(value)}.{attr}"
        return ""

    return [full(node) for node in ast.walk(tree) if full(node) in WALL_CLOCKS]


class _Skewed:
    """This process's wall clock, wrong by so many seconds."""

    def __init__(self, case: DatabaseTestCase, seconds: float) -> None:
        self._case = case
        self._seconds = seconds
        self._patches: list[Any] = []

    def __enter__(self) -> None:
        real, seconds = time.time, self._seconds
        moved = datetime.timedelta(seconds=seconds)

        class Skewed(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return super().now(tz) + moved

        self._patches = [
            self._case.patch(time, "time", lambda: real() + seconds),
            self._case.patch(datetime, "datetime", Skewed),
        ]

    def __exit__(self, *_error: object) -> None:
        for patch in self._patches:
            patch.restore()


async def _nothing() -> None:
    pass


def _parameters(sql: str) -> list[str]:

    return re.findall(r"%\((\w+)\)s", sql)
