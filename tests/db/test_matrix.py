"""
Every condition × every place that deletes, demotes or evicts.

The places are those of ``registry/acting.py``; the outcomes those of ``reach.py``. A cell sets the whole scene up, runs
the place, and compares every row of every table with what it was before: exactly what the table of design §2 (or the
place's own ground) permits has changed, and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from twisted.internet import reactor

from localai_dist.bus.service import Bus
from localai_dist.catalog.model import ModelConfig
from localai_dist.ids import Epoch, InstanceId, NodeId
from localai_dist.loads.endings import KEPT, Endings
from localai_dist.loads.errors import LoadFailed, UnloadFailed
from localai_dist.loads.retire import Retirement, RetirementTable
from localai_dist.loads.room import make_room
from localai_dist.loads.rows import Claim, Loaded, Measured
from localai_dist.loads.table import FAILED_KEPT, SILENCE, JobTable
from localai_dist.loads.unload import unload_replicas
from localai_dist.reach import Answer, Answered, NoRoute, Reconnecting, Unreached
from localai_dist.registry.acting import ACTS, Ground
from localai_dist.registry.instances import Instances
from localai_dist.registry.nodes import Nodes
from localai_dist.registry.ownership import Ownership
from localai_dist.registry.records import Registration, SchedulingRow
from localai_dist.registry.replicas import Replicas
from localai_dist.registry.scheduling import Scheduling
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.scheduler.facts import ReplicaFacts
from localai_dist.scheduler.placement import Placement
from localai_dist.serving.inference import Inference, Waits
from localai_dist.store.errors import FencedOut, StoreUnavailable
from localai_dist.store.pool import Pool
from localai_dist.wire.verbs import MODEL_UNLOAD, DoneReply, ModelStopReply
from tests.db.case import DatabaseTestCase
from tests.db.frontends import monitor_of
from tests.registry import sites
from tests.serving.doubles import FakeConnect, FakeRequestFiles, make_model
from tests.support.outcomes import TABLE, Says

HERE, THERE, DEAD = InstanceId("here"), InstanceId("there"), InstanceId("dead")
WINDOW, GRACE, RETENTION, STALE = 30.0, 90.0, 450.0, 60.0
AT = "127.0.0.1:20000"
MODEL = make_model("m")

sites.import_all()

#: What time passing changes, and no decision.
VOLATILE = {"last_heartbeat", "updated_at", "last_seen", "last_used", "last_progress", "created_at", "in_flight"}
KEYS = {
    "backend_nodes": "name",
    "node_models": "node_id",
    "node_connections": "node_id",
    "node_labels": "node_id",
    "instances": "id",
    "model_load_jobs": "tracking_key",
    "model_load_endings": "model_name",
    "bus_messages": "id",
    "model_scheduling_configs": "model_name",
}

SNAPSHOT = (
    " union all ".join(
        f"select '{table}' as place, {key} as key, (to_jsonb(r) - array{sorted(VOLATILE)})::text as kept from {table} r"
        for table, key in KEYS.items()
    )
    + " order by 1, 2, 3"
)
"""Every row of every table, as text, without what is volatile."""

WORLDS = ("never_dialled", "connected", "held_here", "reconnecting", "departed", "owner_dead")
"""Where the target's tunnel is, as it stands in the database."""

Rows = dict[str, list[str]]
Drive = Callable[["Scene", bool], Awaitable[set[str]]]


class Scene(DatabaseTestCase):
    """Two nodes with a replica each: ``t``, whose condition varies, and ``b``, which nothing may touch."""

    timeout = 300
    pool_: Pool

    async def connect(self) -> None:
        """The stores over one pool."""
        self.pool_ = await self.pool(size=4)
        self.nodes = Nodes(self.pool_)
        self.replicas = Replicas(self.pool_)
        self.scheduling = Scheduling(self.pool_)
        self.instances = Instances(self.pool_, live_window=WINDOW)
        self.ownership = Ownership(self.pool_, live_window=WINDOW)
        self.jobs = JobTable(self.pool_, HERE, live_window=WINDOW, orphan_after=60.0)
        self.others_jobs = JobTable(self.pool_, THERE, live_window=WINDOW, orphan_after=60.0)

    async def job_dies(self) -> None:
        """The load of ``m`` was silent for a few beats, and the frontend that runs it is not live."""
        await self.age("model_load_jobs", "last_progress", SILENCE + 1, tracking_key="m")
        await self.age("instances", "last_seen", WINDOW + 1, id=THERE)

    async def set_up_world(self, world: str) -> None:
        """Everything as it is at the start of a cell."""
        self.world = world
        await self.pool_.execute("; ".join(f"delete from {table}" for table in KEYS))
        for instance in (HERE, THERE):
            await self.instances.register(instance, f"10.0.0.1:{len(instance)}", "1", "hash")
        self.t = await self.node("t")
        self.b = await self.node("b")
        await self.ownership.claim(self.b, THERE)
        await self.scheduling.put(SchedulingRow("m"))
        self.epoch = await self.dial(world)

    async def node(self, name: str) -> NodeId:
        """An approved node with a replica."""
        registered = await self.nodes.register(
            Registration(name, boot_id="boot", labels={"rack": name}), auto_approve=True, presented_token=None
        )
        node = registered.node.id
        await self.replicas.put(node, "m", 0, AT, "secret", "llama-cpp", "loaded", MODEL.revision)
        return node

    async def dial(self, world: str) -> Epoch:
        """The target's tunnel."""
        if world == "never_dialled":
            return Epoch(0)
        if world == "owner_dead":
            await self.instances.register(DEAD, "10.0.0.9:1", "1", "hash")
            await self.age("instances", "last_seen", WINDOW + 1, id=DEAD)
        owner = {"held_here": HERE, "owner_dead": DEAD}.get(world, THERE)
        epoch = await self.ownership.claim(self.t, owner)
        if world in ("reconnecting", "departed"):
            await self.ownership.release(self.t, owner, epoch)
        if world == "departed":
            await self.age("node_connections", "disconnected_at", GRACE + 1, node_id=self.t)
        return epoch

    async def age(self, table: str, column: str, seconds: float, **key: str) -> None:
        """As if that had been so long ago."""
        [(name, value)] = key.items()
        await self.pool_.execute(
            f"update {table} set {column} = {column} - make_interval(secs => %(s)s) where {name} = %(v)s",
            {"s": seconds, "v": value},
        )

    async def rows(self) -> Rows:
        """Every row that a decision could have changed, as ``table:key``."""
        names = {self.t: "t", self.b: "b"}
        found: Rows = {}
        for row in await self.pool_.fetch(SNAPSHOT):
            found.setdefault(f"{row['place']}:{names.get(row['key'], row['key'])}", []).append(row["kept"])
        return found

    async def changed_by(self, work: Awaitable[Any], *, may_raise: tuple[type[Exception], ...] = ()) -> set[str]:
        """Which rows ``work`` changed, added or removed."""
        before = await self.rows()
        try:
            await work
        except may_raise:
            pass
        after = await self.rows()
        return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


# -- one drive for each place: (scene, whether its ground is given) -> what changed beyond what may -------------------


async def _release(s: Scene, given: bool) -> set[str]:
    owner = (await s.pool_.fetch_one("select * from node_connections where node_id = %(n)s", {"n": s.t})) or {}
    holder = InstanceId(owner.get("owner_instance_id") or THERE)
    epoch = s.epoch if given else Epoch(s.epoch + 1000)
    held = given and s.world in ("connected", "held_here", "owner_dead")
    changed = await s.changed_by(s.ownership.release(s.t, holder, epoch), may_raise=(FencedOut,))
    s.assertEqual(changed, {"node_connections:t"} if held else set(), s.world)
    wrong = s.ownership.release(s.t, InstanceId("somebody"), s.epoch)
    return await s.changed_by(wrong, may_raise=(FencedOut,))  # the right epoch of the wrong owner: nothing


def _lost(s: Scene, *dead: str) -> set[str]:
    """What goes with these frontends."""
    held = {"connected": {THERE: "t"}, "owner_dead": {DEAD: "t"}, "held_here": {HERE: "t"}}.get(s.world, {})
    tunnels = {name for owner, name in held.items() if owner in dead} | ({"b"} if THERE in dead else set())
    there = {f"instances:{one}" for one in dead}
    return there | {f"node_connections:{name}" for name in tunnels}


async def _beat(s: Scene, given: bool) -> set[str]:
    dead = [DEAD] if s.world == "owner_dead" else []
    if given:
        await s.age("instances", "last_seen", WINDOW + 1, id=THERE)
        dead.append(THERE)
    changed = await s.changed_by(s.instances.beat(HERE, retention=RETENTION))
    s.assertEqual(changed, _lost(s, *dead), s.world)
    return set()


async def _sweep(s: Scene, given: bool) -> set[str]:
    dead = [DEAD] if s.world == "owner_dead" else []
    if given:
        await s.age("instances", "last_seen", WINDOW + 1, id=THERE)
        dead.append(THERE)
    changed = await s.changed_by(s.instances.sweep(HERE))
    s.assertEqual(changed, _lost(s, *dead), s.world)
    return set()


async def _instance_leaves(s: Scene, given: bool) -> set[str]:
    who = THERE if given else InstanceId("nobody")
    s.assertEqual(await s.changed_by(s.instances.deregister(who)), _lost(s, THERE) if given else set(), s.world)
    return set()


async def _instance_arrives(s: Scene, given: bool) -> set[str]:
    who = THERE if given else InstanceId("nobody")
    changed = await s.changed_by(s.instances.arrive(who, "10.0.0.1:5", "1", "hash"))
    s.assertEqual(changed - {"instances:nobody"}, _lost(s, THERE) - {"instances:there"} if given else set(), s.world)
    return set()


async def _stale(s: Scene, given: bool) -> set[str]:
    if given:
        await s.age("backend_nodes", "last_heartbeat", STALE + 1, name="t")
    return _only(s, given, await s.changed_by(s.nodes.mark_stale_offline(STALE)), "backend_nodes:t")


async def _unhealthy(s: Scene, given: bool) -> set[str]:
    outcome = NoRoute("t", departed=True) if given else Reconnecting("t")
    back = s.world in ("connected", "held_here", "owner_dead")  # somebody took the tunnel since that was read
    changed = await s.changed_by(s.nodes.mark_unhealthy(s.t, outcome))
    return _only(s, given and not back, changed, "backend_nodes:t")


async def _reap(s: Scene, given: bool) -> set[str]:
    replica = await s.replicas.get(s.t, "m", 0)
    assert replica is not None
    outcome = Answered(Answer.PROCESS_ABSENT) if given else Reconnecting("t")
    return _only(s, given, await s.changed_by(s.replicas.reap(replica, outcome)), "node_models:t")


async def _restart(s: Scene, given: bool) -> set[str]:
    token = (await s.nodes.register(Registration("x", boot_id="boot"), auto_approve=True, presented_token=None)).token
    await s.pool_.execute(
        "update backend_nodes set node_token_hash = (select node_token_hash from backend_nodes where name = 'x')"
        " where name = 't'"
    )
    again = Registration("t", boot_id="another" if given else "boot", labels={"rack": "t"})
    changed = await s.changed_by(s.nodes.register(again, auto_approve=True, presented_token=token))
    return _only(s, given, changed - {"backend_nodes:t"}, "node_models:t")


async def _leave(s: Scene, given: bool) -> set[str]:
    who = s.t if given else NodeId("nobody")
    return _only(s, given, await s.changed_by(s.nodes.deregister(who)), "backend_nodes:t", "node_models:t")


async def _drain(s: Scene, given: bool) -> set[str]:
    if not given:
        return await s.changed_by(s.nodes.resume(s.t))
    return _only(s, given, await s.changed_by(s.nodes.drain(s.t)), "backend_nodes:t")


async def _remove_node(s: Scene, given: bool) -> set[str]:
    gone = {"backend_nodes:t", "node_models:t", "node_labels:t"}
    if s.world != "never_dialled":
        gone.add("node_connections:t")
    changed = await s.changed_by(s.nodes.remove(s.t if given else NodeId("nobody")))
    return _only(s, given, {key.replace(s.t, "t") for key in changed}, *gone)


async def _clear_labels(s: Scene, given: bool) -> set[str]:
    work = s.nodes.put_labels(s.t, {}) if given else s.nodes.patch_labels(s.t, {})
    return _only(s, given, await s.changed_by(work), "node_labels:t")


async def _delete_label(s: Scene, given: bool) -> set[str]:
    changed = await s.changed_by(s.nodes.delete_label(s.t, "rack" if given else "none"))
    return _only(s, given, changed, "node_labels:t")


async def _set_state(s: Scene, given: bool) -> set[str]:
    changed = await s.changed_by(s.replicas.set_state(s.t, "m", 0 if given else 7, "unloading"))
    return _only(s, given, changed, "node_models:t")


async def _delete_wish(s: Scene, given: bool) -> set[str]:
    changed = await s.changed_by(s.scheduling.delete("m" if given else "other"))
    return _only(s, given, changed, "model_scheduling_configs:m")


async def _claim_job(s: Scene, given: bool) -> set[str]:
    await s.others_jobs.claim(MODEL)
    if given:  # silent for a few beats, and its owner is not live
        await s.job_dies()
    return _only(s, given, await s.changed_by(s.jobs.claim(MODEL)), "model_load_jobs:m")


async def _claim_lacking(s: Scene, given: bool) -> set[str]:
    await s.others_jobs.claim(MODEL)
    if given:
        await s.job_dies()
    seen = await s.jobs.read("m")
    assert seen is not None
    return _only(s, given, await s.changed_by(s.jobs.claim_lacking(MODEL, seen)), "model_load_jobs:m")


async def _claim_cancelled(s: Scene, given: bool) -> set[str]:
    await s.others_jobs.claim(MODEL)
    await s.jobs.cancel("m", "not wanted")
    if given:
        await s.job_dies()
    return _only(s, given, await s.changed_by(s.jobs.claim_cancelled("m")), "model_load_jobs:m")


async def _fenced(s: Scene, given: bool, act: Callable[[Claim], Awaitable[Any]], *gone: str) -> set[str]:
    claim = await s.jobs.claim(MODEL)
    assert claim is not None
    asked = claim if given else replace(claim, attempt=claim.attempt + 1)
    return _only(s, given, await s.changed_by(act(asked)), *gone)


async def _finish_job(s: Scene, given: bool) -> set[str]:
    loaded = Loaded(s.t, 0, "127.0.0.1:20001", "token", "llama-cpp", "r2")
    gone = ("model_load_jobs:m", "node_models:t", "model_load_endings:m")
    return await _fenced(s, given, lambda claim: s.jobs.finish(claim, loaded, Measured()), *gone)


async def _drop_job(s: Scene, given: bool) -> set[str]:
    return await _fenced(s, given, s.jobs.drop, "model_load_jobs:m")


async def _close_cancelled(s: Scene, given: bool) -> set[str]:
    claim = await s.jobs.claim(MODEL)
    assert claim is not None
    if given:
        await s.jobs.cancel("m", "not wanted")
    return _only(
        s, given, await s.changed_by(s.jobs.close_cancelled(claim)), "model_load_jobs:m", "model_load_endings:m"
    )


async def _sweep_jobs(s: Scene, given: bool) -> set[str]:
    claim = await s.others_jobs.claim(MODEL)
    assert claim is not None
    await s.others_jobs.fail(claim, "broken")
    if given:
        await s.age("model_load_jobs", "updated_at", FAILED_KEPT + 1, tracking_key="m")
    return _only(s, given, await s.changed_by(s.jobs.sweep()), "model_load_jobs:m")


async def _forget_endings(s: Scene, given: bool) -> set[str]:
    for _ in range(2):
        await s.pool_.execute(
            "insert into model_load_endings (model_name, attempt, outcome, node_id) values ('m', 1, 'loaded', 't')"
        )
    if given:
        await s.age("model_load_endings", "ended_at", KEPT + 1, model_name="m")
    return _only(s, given, await s.changed_by(Endings(s.pool_).sweep()), "model_load_endings:m")


async def _retire(s: Scene, given: bool) -> set[str]:
    replica = await s.replicas.get(s.t, "m", 0)
    assert replica is not None
    if not given:  # another process by now
        replica = replace(replica, address="127.0.0.1:20009")
    return _only(s, given, await s.changed_by(RetirementTable(s.pool_, HERE, 30.0).mark(replica)), "node_models:t")


async def _retire_unserved(s: Scene, given: bool) -> set[str]:
    replica = await s.replicas.get(s.t, "m", 0)
    assert replica is not None
    for instance in (HERE, THERE) if given else (HERE,):
        await RetirementTable(s.pool_, instance, 30.0).vote(replica)
    marking = RetirementTable(s.pool_, HERE, 30.0).mark_unserved(replica, 15.0)
    return _only(s, given, await s.changed_by(marking), "node_models:t")


async def _sweep_bus(s: Scene, given: bool) -> set[str]:
    await s.pool_.execute("insert into bus_messages (id, subject, payload) values ('x', 'jobs.x', 'y')")
    if given:
        await s.age("bus_messages", "created_at", 601, id="x")
    bus = Bus(s.url, s.pool_, reactor=reactor)
    return _only(s, given, await s.changed_by(bus.sweep()), "bus_messages:x")


def _only(s: Scene, given: bool, changed: set[str], *expected: str) -> set[str]:
    """What changed beyond ``expected``, which must have changed if the ground was given and not otherwise."""
    wanted = set(expected) if given else set()
    s.assertEqual(wanted - changed, set(), f"did not act: {s.world}")
    return changed - wanted


DRIVES: dict[str, Drive] = {
    "ownership.release": _release,
    "instances.beat": _beat,
    "instances.sweep": _sweep,
    "instances.deregister": _instance_leaves,
    "instances.arrive": _instance_arrives,
    "nodes.drop_replicas": _restart,
    "nodes.leave": _leave,
    "nodes.drain": _drain,
    "nodes.remove": _remove_node,
    "nodes.mark_stale_offline": _stale,
    "nodes.mark_unhealthy": _unhealthy,
    "nodes.clear_labels": _clear_labels,
    "nodes.delete_label": _delete_label,
    "replicas.set_state": _set_state,
    "replicas.remove": _reap,
    "scheduling.delete": _delete_wish,
    "load_jobs.claim": _claim_job,
    "load_jobs.claim_lacking": _claim_lacking,
    "load_jobs.claim_cancelled": _claim_cancelled,
    "load_jobs.finish": _finish_job,
    "load_jobs.drop": _drop_job,
    "load_jobs.close_cancelled": _close_cancelled,
    "load_jobs.sweep": _sweep_jobs,
    "load_endings.forget": _forget_endings,
    "retirement.mark": _retire,
    "retirement.mark_unserved": _retire_unserved,
    "bus.sweep": _sweep_bus,
}


class PlaceTests(Scene):
    """Each registered place in each condition of the target's tunnel, with its ground and without."""

    def test_every_place_is_driven(self) -> None:
        """The matrix has exactly the places of the code's own list (CLUS-12)."""
        self.assertEqual(set(DRIVES), set(ACTS))


def _place(place: str, drive: Drive) -> Callable[[Scene], Awaitable[None]]:
    async def test(self: Scene) -> None:
        await self.connect()
        for world in WORLDS:
            for given in (False, True):
                await self.set_up_world(world)
                beyond = await drive(self, given)
                self.assertEqual(beyond, set(), f"{place} in {world}, ground {'given' if given else 'not given'}")

    test.__doc__ = f"``{place}`` acts on its own ground and its own target, whatever the condition (CLUS-12)."
    return test


for _name, _drive in DRIVES.items():
    setattr(PlaceTests, f"test_{_name.replace('.', '_')}", _place(_name, _drive))


class OutcomeTests(Scene):
    """Each outcome at each place that asks one."""

    async def cell(self, says: Says, work: Callable[[], Awaitable[Any]], *expected: str, **options: Any) -> None:
        """One outcome at one place, in the condition that goes with it."""
        await self.set_up_world("departed" if says.demote else "connected")
        self.assertEqual(await self.changed_by(work(), **options), set(expected), repr(says.outcome))

    def test_predicate_places(self) -> None:
        """The places below are all that rest on a predicate of reach.py (CLUS-12)."""
        found = {name for name, act in ACTS.items() if act.ground in (Ground.MAY_REAP, Ground.MAY_DEMOTE)}
        self.assertEqual(found, {"replicas.remove", "nodes.mark_unhealthy"})

    async def test_reaping(self) -> None:
        """A replica's row goes on exactly the outcomes that the table names, and only that row (CLUS-12)."""
        await self.connect()
        for says in TABLE:

            async def reap(says: Says = says) -> None:
                replica = await self.replicas.get(self.t, "m", 0)
                assert replica is not None
                await self.replicas.reap(replica, says.outcome)

            await self.cell(says, reap, *(["node_models:t"] if says.reap else []))

    async def test_demoting(self) -> None:
        """A node is demoted on exactly the one outcome that the table names (CLUS-12)."""
        await self.connect()
        for says in TABLE:

            async def demote(says: Says = says) -> None:
                await self.nodes.mark_unhealthy(self.t, says.outcome)

            await self.cell(says, demote, *(["backend_nodes:t"] if says.demote else []))

    async def test_a_request(self) -> None:
        """A request that meets an outcome drops the row that it asked exactly where the table says so (CLUS-12)."""
        await self.connect()
        for says in TABLE:

            async def request(says: Says = says) -> None:
                inference = Inference(
                    replicas=self.replicas,
                    ownership=self.ownership,
                    loads=_NoLoads(),
                    connect=_OnNode(self.t, Unreached(says.outcome)),
                    files=FakeRequestFiles(),
                    clock=reactor,
                    waits=Waits(route=0.0),
                )
                await self.pool_.execute("delete from node_models where node_id = %(b)s", {"b": self.b})
                await inference.predict(MODEL, pb.PredictOptions())

            gone = {"node_models:b"} | ({"node_models:t"} if says.reap else set())
            await self.cell(says, request, *gone, may_raise=(Unreached, LoadFailed))

    async def test_the_health_monitor(self) -> None:
        """A look at the nodes demotes one whose tunnel departed, in no other condition (CLUS-12)."""
        await self.connect()
        for world in WORLDS:
            await self.set_up_world(world)
            monitor = monitor_of(self.nodes, self.ownership)
            expected = {"backend_nodes:t"} if world == "departed" else set()
            self.assertEqual(await self.changed_by(monitor.look()), expected, world)

    async def stays(self, says: Says, work: Callable[[], Awaitable[Any]]) -> bool:
        """Whether the target's row is still there after ``work`` met an outcome; the bystander's always is."""
        await self.set_up_world("departed" if says.demote else "connected")
        with contextlib.suppress(Unreached, UnloadFailed, LoadFailed):
            await work()
        self.assertIsNotNone(await self.replicas.get(self.b, "m", 0), repr(says))
        return await self.replicas.get(self.t, "m", 0) is not None

    async def test_unloading(self) -> None:
        """An unload forgets a replica only when the worker says that its process is gone; on no failure (CLUS-12)."""
        await self.connect()
        for says in TABLE:
            for verbs in (_Verbs(free=says), _Verbs(stop=says)):
                self.assertTrue(await self.stays(says, partial(self.unload, verbs)), repr(says.outcome))
        for reply, gone in STOPPED:
            self.assertNotEqual(await self.stays(TABLE[0], partial(self.unload, _Verbs(reply))), gone, repr(reply))

    async def test_making_room(self) -> None:
        """A load evicts an older revision only when the worker says that its process is gone (CLUS-12)."""
        await self.connect()
        for says in TABLE:
            self.assertTrue(await self.stays(says, partial(self.make_room, _Verbs(stop=says))), repr(says.outcome))
        for reply, gone in STOPPED:
            self.assertNotEqual(await self.stays(TABLE[0], partial(self.make_room, _Verbs(reply))), gone, repr(reply))

    async def test_retiring(self) -> None:
        """An older replica is forgotten when its process is gone, or on what the table permits (CLUS-12)."""
        await self.connect()
        for says in TABLE:
            stays = await self.stays(says, partial(self.retire, _Verbs(stop=says)))
            self.assertNotEqual(stays, says.reap, repr(says.outcome))
        for reply, gone in STOPPED:
            self.assertNotEqual(await self.stays(TABLE[0], partial(self.retire, _Verbs(reply))), gone, repr(reply))

    async def unload(self, verbs: _Verbs) -> None:
        """What an operator asks for."""
        await unload_replicas(verbs, self.replicas, "m", self.t)

    async def make_room(self, verbs: _Verbs) -> None:
        """The step of a load job that frees the slot of an older revision."""
        claim, hold = cast(Any, SimpleNamespace(attempt=1)), cast(Any, None)
        old = ReplicaFacts(self.t, "m", 0, "loaded", "r0", 0, 0.0, AT)
        await make_room(self.tools(verbs), Placement(self.t, "t", 0, old), claim, hold)

    async def test_retiring_after_an_outage(self) -> None:
        """
        Nobody could beat while the database was away: whoever asks first is not live itself, and retires nothing; one
        that is and asks alone needs no word of a frontend that stays silent (LOAD-22).
        """
        await self.connect()
        await self.set_up_world("connected")
        replica = await self.replicas.get(self.t, "m", 0)
        assert replica is not None
        for instance in (HERE, THERE):
            await self.age("instances", "last_seen", WINDOW + 1, id=instance)
        table = RetirementTable(self.pool_, HERE, WINDOW)
        await table.vote(replica)
        self.assertFalse(await table.mark_unserved(replica, 15.0))
        await self.instances.register(THERE, "10.0.0.1:5", "1", "hash")
        self.assertFalse(await table.mark_unserved(replica, 15.0))
        await self.age("instances", "last_seen", WINDOW + 1, id=THERE)
        await self.instances.register(HERE, "10.0.0.1:4", "1", "hash")
        self.assertTrue(await table.mark_unserved(replica, 15.0))

    async def retire(self, verbs: _Verbs) -> None:
        """A frontend's look at replicas of older configurations."""
        replica = await self.replicas.get(self.t, "m", 0)
        assert replica is not None
        table = RetirementTable(self.pool_, HERE, 30.0)
        await table.mark(replica)
        await Retirement(self.tools(verbs), lambda name: None, lambda name: False, table).look()

    def tools(self, verbs: _Verbs) -> Any:
        """What a load job works with, as far as these steps need it."""
        settings = SimpleNamespace(drain=0.0, poll=0.01, retire=0.0)
        fleet = SimpleNamespace(replicas=self.replicas)
        return SimpleNamespace(verbs=verbs, fleet=fleet, clock=reactor, settings=settings, called=str)

    async def test_a_database_that_does_not_answer(self) -> None:
        """Without the database every place raises, and nothing has changed when it is back (CLUS-12)."""
        await self.connect()
        await self.set_up_world("departed")
        replica = await self.replicas.get(self.t, "m", 0)
        assert replica is not None
        before = await self.rows()
        await self.pool_.stop()
        departed = NoRoute("t", departed=True)
        for work in (
            self.replicas.reap(replica, departed),
            self.replicas.set_state(self.t, "m", 0, "unloading"),
            self.nodes.mark_unhealthy(self.t, departed),
            self.nodes.mark_stale_offline(STALE),
            self.nodes.drain(self.t),
            self.nodes.deregister(self.t),
            self.nodes.remove(self.t),
            self.ownership.release(self.t, THERE, self.epoch),
            self.instances.beat(HERE, retention=RETENTION),
            self.instances.sweep(HERE),
            self.instances.deregister(THERE),
            self.jobs.claim(MODEL),
            self.jobs.claim_cancelled("m"),
            self.jobs.sweep(),
            Endings(self.pool_).sweep(),
            RetirementTable(self.pool_, HERE, 30.0).mark(replica),
        ):
            await self.assert_raises(StoreUnavailable, work)
        await monitor_of(self.nodes, self.ownership).look()
        await self.pool_.start()
        self.assertEqual(await self.rows(), before)


STOPPED = (
    (ModelStopReply(matched=True, terminated=True), True),
    (ModelStopReply(), True),  # absent
    (ModelStopReply(matched=True, error="it survives"), False),
    (ModelStopReply(error="another process has its place"), False),
    (ModelStopReply(matched=True), False),
)
"""What a worker may say to a stop, and whether the process is gone then."""


class _Verbs:
    """A worker: each verb raises its outcome or answers."""

    def __init__(
        self,
        reply: ModelStopReply = ModelStopReply(matched=True, error="still there"),
        *,
        free: Says | None = None,
        stop: Says | None = None,
    ) -> None:
        self._reply = reply
        self._free = free
        self._stop = stop

    async def call(self, node: NodeId, verb: Any, request: Any, **_options: Any) -> Any:
        says = self._free if verb is MODEL_UNLOAD else self._stop
        if says is not None:
            raise Unreached(says.outcome)
        return DoneReply(True) if verb is MODEL_UNLOAD else self._reply


class _OnNode(FakeConnect):
    """No way to the target; every request goes there."""

    def __init__(self, node: NodeId, failure: Unreached) -> None:
        super().__init__([failure])
        self.node = node


class _NoLoads:
    """Nothing can be loaded."""

    async def ensure(self, model: ModelConfig, *, wait: float | None) -> Any:
        raise LoadFailed("nowhere")
