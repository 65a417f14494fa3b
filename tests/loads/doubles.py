"""A cluster in memory for load jobs: rows, registry, workers, backends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from localai_dist.catalog.model import ModelConfig, Parameters
from localai_dist.ids import InstanceId, ModelName, NodeId, ProcessKey, parse_process_key
from localai_dist.loads.cause import decode_cause
from localai_dist.loads.fleet import Fleet
from localai_dist.loads.lack import Lack, lack_of
from localai_dist.loads.rows import Claim, JobRow, Loaded, Measured
from localai_dist.loads.service import Loads
from localai_dist.loads.speed import PastLoad, eta
from localai_dist.loads.status import JobState, LoadStatus
from localai_dist.loads.tables import Tables
from localai_dist.loads.tools import LoadSettings
from localai_dist.reach import Outcome, Unreached, may_reap
from localai_dist.registry.presence import Presence, PresenceState
from localai_dist.registry.records import Node, Replica, SchedulingRow
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.staging.plan import SourceFile, StagedFile
from localai_dist.staging.progress import Progress
from localai_dist.staging.source import Sources
from localai_dist.staging.upload import HoldLike
from localai_dist.store.errors import StoreUnavailable
from localai_dist.wire.verbs import (
    INSTALL,
    MODEL_DELETE,
    MODEL_STOP,
    MODEL_UNLOAD,
    MODELS_RUNNING,
    DoneReply,
    InstallReply,
    InstallRequest,
    ModelDeleteRequest,
    ModelStopReply,
    ModelStopRequest,
    ModelUnloadRequest,
    RunningModel,
    RunningReply,
)

NOWHERE = NodeId("")
WEIGHTS = SourceFile(Path("/models/tiny.gguf"), "tiny.gguf", 1000, "models/tiny/tiny.gguf")


def make_model(name: str = "tiny", **facts: Any) -> ModelConfig:
    """A model that is one file."""
    return ModelConfig(ModelName(name), "llama-cpp", Parameters(model=f"{name}.gguf"), **facts)


@dataclass
class Row:
    """One job's row."""

    attempt: int
    owner: str
    state: JobState = JobState.PENDING
    node: NodeId = NOWHERE
    node_name: str = ""
    error: str = ""
    orphaned: bool = False
    progress: Progress = field(default_factory=Progress)
    phase: str = "waiting"
    rate: float | None = None
    replica_index: int = 0
    model: ModelConfig | None = None
    lacking: dict[str, Lack] = field(default_factory=dict)
    offered_for: float = 0.0
    cancelled: str = ""
    cancelled_for: float = 1000.0


class Database:
    """The rows that all frontends share."""

    def __init__(self) -> None:
        self.jobs: dict[str, Row] = {}
        self.replicas: dict[tuple[NodeId, str, int], Replica] = {}
        self.nodes: dict[NodeId, Node] = {}
        self.presence: dict[NodeId, PresenceState] = {}
        self.rules: dict[str, SchedulingRow] = {}
        self.attempts = 0
        self.away = False
        self.history: list[str] = []
        self.instances: set[str] = set()
        self.votes: set[tuple[str, str]] = set()
        self.endings: list[tuple[str, int, str, NodeId, Measured]] = []

    def check(self) -> None:
        """Raise while the database is away."""
        if self.away:
            raise StoreUnavailable("the database is away")

    def add_node(self, name: str, presence: PresenceState = PresenceState.CONNECTED, **facts: Any) -> NodeId:
        """A healthy approved node."""
        node = NodeId(name)
        self.nodes[node] = replace(Node(node, name, "backend", "healthy", True), **facts)
        self.presence[node] = presence
        return node

    def add_replica(self, node: NodeId, model: ModelConfig, **facts: Any) -> Replica:
        """A loaded replica."""
        row = Replica(node, model.name, 0, "127.0.0.1:1", config_revision=model.revision, last_used=_now())
        row = replace(row, **facts)
        self.replicas[(node, row.model_name, row.replica_index)] = row
        return row

    # -- registry ----------------------------------------------------------------------------------------------------

    async def all_nodes(self) -> Sequence[Node]:
        self.check()
        return list(self.nodes.values())

    async def presence_many(self, nodes: Sequence[NodeId], grace: float) -> Mapping[NodeId, Presence]:
        self.check()
        return {node: Presence(self.presence[node]) for node in nodes if node in self.presence}

    async def all(self) -> Sequence[Replica]:
        self.check()
        return list(self.replicas.values())

    async def of_model(self, model: str) -> Sequence[Replica]:
        return [row for row in await self.all() if row.model_name == model]

    async def loaded(self, model: str, revision: str | None = None) -> Sequence[Replica]:
        return [
            row
            for row in await self.of_model(model)
            if row.state == "loaded"
            and revision in (None, row.config_revision)
            and self.nodes[row.node_id].approved
            and self.nodes[row.node_id].left_at is None
            and self.nodes[row.node_id].status != "draining"
        ]

    async def remove(self, node: NodeId, model: str, replica_index: int, expected_address: str | None = None) -> bool:
        self.check()
        row = self.replicas.get((node, model, replica_index))
        if row is None or expected_address not in (None, row.address):
            return False
        del self.replicas[(node, model, replica_index)]
        return True

    async def reap(self, replica: Replica, outcome: Outcome) -> bool:
        if not may_reap(outcome):
            return False
        return await self.remove(replica.node_id, replica.model_name, replica.replica_index, replica.address)

    async def set_state(self, node: NodeId, model: str, replica_index: int, state: str) -> bool:
        self.check()
        row = self.replicas.get((node, model, replica_index))
        if row is not None:
            self.replicas[(node, model, replica_index)] = replace(row, state=state)
        return row is not None

    async def get(self, model: str) -> SchedulingRow | None:
        self.check()
        return self.rules.get(model)


class NodesOf:
    """``registry.Nodes`` of a ``Database``."""

    def __init__(self, database: Database) -> None:
        self.all: Callable[[], Awaitable[Sequence[Node]]] = database.all_nodes


class MemoryTable:
    """``JobTable`` of one frontend."""

    def __init__(self, database: Database, instance: str) -> None:
        self._database = database
        self._instance = instance

    async def claim(self, model: ModelConfig) -> Claim | None:
        self._database.check()
        key = model.name
        row = self._database.jobs.get(key)
        failed = row is not None and row.state is JobState.FAILED
        if row is not None and not failed and not self._may_take(row):
            return None
        self._database.attempts += 1
        fresh = Row(self._database.attempts, self._instance, model=model)
        if row is not None and failed:
            fresh.error = row.error
        elif row is not None:
            fresh.node, fresh.lacking, fresh.progress = row.node, row.lacking, row.progress
        self._database.jobs[key] = fresh
        return Claim(key, fresh.attempt, fresh.node, fresh.progress.bytes_sent)

    async def claim_lacking(self, model: ModelConfig, seen: JobRow) -> Claim | None:
        self._database.check()
        row = self._database.jobs.get(model.name)
        if row is None or row.attempt != seen.attempt or not row.orphaned or row.cancelled:
            return None
        self._database.attempts += 1
        row.attempt, row.owner, row.orphaned, row.model = self._database.attempts, self._instance, False, model
        return Claim(model.name, row.attempt, row.node, row.progress.bytes_sent, seen.lacking)

    async def claim_cancelled(self, key: str) -> tuple[Claim, int] | None:
        self._database.check()
        row = self._database.jobs.get(key)
        if row is None or not row.cancelled or not row.orphaned:
            return None
        self._database.attempts += 1
        row.attempt, row.owner, row.orphaned = self._database.attempts, self._instance, False
        return Claim(key, row.attempt, row.node, 0), row.replica_index

    async def advance(self, claim: Claim, state: JobState, *, node: NodeId, node_name: str, replica_index: int) -> bool:
        row = self._writable(claim)
        if row is not None:
            row.state, row.node, row.node_name, row.replica_index = state, node, node_name, replica_index
            self._database.history.append(state.value)
        return row is not None

    async def beat(self, claim: Claim, progress: Progress, *, phase: str, rate: float | None) -> str | None:
        row = self._ours(claim)
        if row is None:
            return None
        row.progress, row.phase, row.rate = replace(progress), phase, rate
        return row.cancelled

    async def fail(self, claim: Claim, error: str) -> bool:
        row = self._writable(claim)
        if row is not None:
            row.state, row.error = JobState.FAILED, error
        return row is not None

    async def finish(self, claim: Claim, loaded: Loaded, measured: Measured) -> bool:
        if self._writable(claim) is None:
            return False
        del self._database.jobs[claim.key]
        self._database.endings.append((claim.key, claim.attempt, "", loaded.node, measured))
        self._database.replicas[(loaded.node, claim.key, loaded.replica_index)] = Replica(
            loaded.node,
            claim.key,
            loaded.replica_index,
            loaded.address,
            loaded.backend_token,
            config_revision=loaded.revision,
            last_used=_now(),
        )
        return True

    async def drop(self, claim: Claim) -> bool:
        if self._ours(claim) is None:
            return False
        del self._database.jobs[claim.key]
        return True

    async def offer(self, claim: Claim, lack: Lack) -> bool:
        row = self._writable(claim)
        if row is not None:
            row.owner, row.state, row.orphaned = "", JobState.PENDING, True
            row.lacking[self._instance] = lack_of(lack.as_json())
        return row is not None

    async def refuse(self, row: JobRow, error: str) -> bool:
        self._database.check()
        now = self._database.jobs.get(row.key)
        if now is None or not now.orphaned or now.attempt != row.attempt:
            return False
        now.state, now.error, now.orphaned = JobState.FAILED, error, False
        return True

    async def abandon(self, claim: Claim) -> bool:
        row = self._ours(claim)
        if row is not None:
            row.owner, row.orphaned = "", True
        return row is not None

    async def cancel(self, key: str, reason: str) -> bool:
        self._database.check()
        row = self._database.jobs.get(key)
        if row is None or row.state is JobState.FAILED:
            return False
        row.cancelled = row.cancelled or reason
        return True

    async def close_cancelled(self, claim: Claim) -> bool:
        row = self._ours(claim)
        if row is None or not row.cancelled:
            return False
        del self._database.jobs[claim.key]
        self._database.endings.append((claim.key, claim.attempt, row.cancelled, row.node, Measured()))
        return True

    async def read(self, key: str) -> JobRow | None:
        self._database.check()
        row = self._database.jobs.get(key)
        return None if row is None else self._job(key, row)

    async def all(self) -> list[JobRow]:
        self._database.check()
        return [self._job(key, row) for key, row in self._database.jobs.items()]

    async def sweep(self) -> int:
        self._database.check()
        return 0

    def _may_take(self, row: Row) -> bool:
        return row.orphaned and not row.cancelled and self._instance not in row.lacking

    def _ours(self, claim: Claim) -> Row | None:
        self._database.check()
        row = self._database.jobs.get(claim.key)
        if row is None or (row.owner, row.attempt) != (self._instance, claim.attempt) or row.state is JobState.FAILED:
            return None
        return row

    def _writable(self, claim: Claim) -> Row | None:
        row = self._ours(claim)
        return None if row is None or row.cancelled else row

    def _job(self, key: str, row: Row) -> JobRow:
        return JobRow(
            key,
            row.attempt,
            row.state,
            InstanceId(row.owner),
            row.orphaned,
            row.error,
            _status(key, row),
            node=row.node,
            cancelled=bool(row.cancelled),
            cancel_reason=row.cancelled,
            cancelled_for=row.cancelled_for,
            lacking=dict(row.lacking),
            live=frozenset(self._database.instances),
            offered_for=row.offered_for,
            revision="" if row.model is None else row.model.revision,
            config="" if row.model is None else msgspec.json.encode(row.model).decode(),
        )


def _status(key: str, row: Row) -> LoadStatus:
    progress = row.progress
    return LoadStatus(
        key,
        row.state.value,
        row.node_name,
        progress.bytes_sent,
        progress.total_bytes,
        progress.file_index,
        progress.total_files,
        eta_seconds=eta(progress.total_bytes - progress.bytes_sent, row.rate),
        error=str(decode_cause(row.error)) if row.state is JobState.FAILED and row.error else "",
        phase=row.phase,
        rate=row.rate,
        cancelled=bool(row.cancelled),
        waits=progress.trouble if progress.waits else "",
        waits_told=progress.trouble_told if progress.waits else "",
    )


class MemoryEndings:
    """``Endings`` over a ``Database``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def cancelled(self, key: str, attempt: int) -> str | None:
        self._database.check()
        found = [why for name, number, why, _, _ in self._database.endings if (name, number) == (key, attempt)]
        return found[0] or None if found else None

    async def staged(self, key: str) -> dict[NodeId, int]:
        self._database.check()
        return {
            node: 0 if why else measured.total_bytes
            for name, _, why, node, measured in self._database.endings
            if name == key and node
        }

    async def recent(self, node: NodeId) -> list[PastLoad]:
        self._database.check()
        return [
            PastLoad(one.total_bytes, one.rate, one.load_seconds)
            for _, _, why, where, one in self._database.endings
            if where == node and not why and one.rate and one.load_seconds is not None
        ]

    async def sweep(self) -> int:
        return 0


class MemoryRetirement:
    """``RetirementTable`` over a ``Database``; a replica whose stop failed is given again after ``retry``."""

    def __init__(self, database: Database, instance: str) -> None:
        self._database = database
        self._instance = instance
        self.waiting: list[Replica] = []
        self.failures: list[str] = []

    async def mark(self, replica: Replica) -> bool:
        self._database.check()
        self.waiting.append(replica)
        return await self._database.set_state(replica.node_id, replica.model_name, replica.replica_index, "unloading")

    async def vote(self, replica: Replica) -> None:
        self._database.check()
        self._database.votes.add((self._instance, replica.model_name))

    async def mark_unserved(self, replica: Replica, fresh: float) -> bool:
        voted = {instance for instance, model in self._database.votes if model == replica.model_name}
        return voted >= self._database.instances and await self.mark(replica)

    async def take(self, drain: float) -> tuple[Replica, int] | None:
        self._database.check()
        for row in self.waiting:
            now = self._database.replicas.get((row.node_id, row.model_name, row.replica_index))
            if now is not None and now.in_flight == 0:
                self.waiting.remove(row)
                return row, 1
        return None

    async def failed(self, replica: Replica, error: str, again: float) -> None:
        self.failures.append(error)


class Workers:
    """
    Verbs, files and backends of every node; each step waits for its gate, if one is set.

    Attributes:
        steps: what was done, in order.
        gates: by step name: a Deferred that the step waits for.
        unreached: by step name: errors that its next calls raise.
    """

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.gates: dict[str, Deferred[Any]] = {}
        self.errors: dict[str, list[Exception]] = {}
        self.install = InstallReply(True, address="127.0.0.1:20000", backend_token="token")
        self.result = pb.Result(success=True)
        self.processes: dict[str, str] = {}
        self.free = DoneReply(True)
        self.deleted = DoneReply(True)
        self.immortal = ""
        self.options: pb.ModelOptions | None = None
        self.timeouts: list[float | None] = []
        self.missing: tuple[str, ...] = ()
        self.hints: tuple[str, ...] = ()
        self.size = WEIGHTS.size
        self.force: list[bool] = []

    async def _step(self, name: str) -> None:
        self.steps.append(name)
        gate = self.gates.get(name)
        if gate is not None:
            waiter: Deferred[Any] = Deferred()
            gate.addCallback(lambda value: (waiter.called or waiter.callback(None), value)[1])
            await waiter
        if self.errors.get(name):
            raise self.errors[name].pop(0)

    # -- verbs -------------------------------------------------------------------------------------------------------

    async def call(self, node: NodeId, verb: Any, request: Any, *, timeout: Any = None, on_progress: Any = None) -> Any:
        if verb is INSTALL:
            assert isinstance(request, InstallRequest)
            await self._step("install")
            if self.install.success:
                self.processes[str(ProcessKey(request.model_id, request.replica_index))] = self.install.address
            return self.install
        if verb is MODEL_DELETE:
            assert isinstance(request, ModelDeleteRequest)
            await self._step("delete unfinished" if request.unfinished_only else "delete")
            return self.deleted
        if verb is MODEL_UNLOAD:
            assert isinstance(request, ModelUnloadRequest)
            await self._step("free")
            return self.free
        if verb is MODELS_RUNNING:
            await self._step("running")
            keys = [(parse_process_key(key), address) for key, address in self.processes.items()]
            return RunningReply([RunningModel(key.model, key.replica, address) for key, address in keys])
        assert verb is MODEL_STOP
        assert isinstance(request, ModelStopRequest)
        await self._step("stop")
        return self._stop(request)

    def _stop(self, request: ModelStopRequest) -> ModelStopReply:
        self.force.append(request.force)
        parse_process_key(request.process_key)
        address = self.processes.get(request.process_key)
        if address is None:
            return ModelStopReply(process_key=request.process_key)
        if request.expected_address not in ("", address):
            return ModelStopReply(process_key=request.process_key, address=address, error="another process is there")
        if self.immortal:
            return ModelStopReply(matched=True, process_key=request.process_key, error=self.immortal)
        del self.processes[request.process_key]
        return ModelStopReply(matched=True, terminated=True, process_key=request.process_key)

    # -- files -------------------------------------------------------------------------------------------------------

    async def sources(self, model: str, relatives: Sequence[str], hints: Sequence[str] = ()) -> Sources:
        await self._step("list")
        self.hints = tuple(hints)
        return Sources((replace(WEIGHTS, relative=relatives[0], size=self.size),), self.missing)

    async def stage(
        self, node: NodeId, files: Sequence[SourceFile], progress: Progress, hold: HoldLike
    ) -> tuple[StagedFile, ...]:
        progress.begin(sum(file.size for file in files), len(files))
        await self._step("stage")
        return tuple(StagedFile(file, f"/w/models/tiny/{file.relative}", file.size) for file in files)

    # -- backends ----------------------------------------------------------------------------------------------------

    async def connect(self, node: NodeId, address: str, token: str) -> Workers:
        await self._step("connect")
        return self

    async def load_model(self, options: pb.ModelOptions, timeout: float | None) -> pb.Result:
        self.options = options
        self.timeouts.append(timeout)
        await self._step("load")
        return self.result

    def close(self) -> None:
        self.steps.append("close")


def frontend(
    database: Database,
    workers: Workers,
    clock: Clock,
    instance: str = "one",
    *,
    find_model: Callable[[str], ModelConfig | None] = lambda name: None,
    is_gone: Callable[[str], bool] | None = None,
    **settings: Any,
) -> Loads:
    """The loads of one frontend."""
    database.instances.add(instance)
    given = LoadSettings(**settings)
    return Loads(
        None,  # type: ignore[arg-type]
        Fleet(NodesOf(database), database, database, database, given.grace),
        workers,
        workers,
        workers.connect,
        clock=clock,
        instance=InstanceId(instance),
        settings=given,
        find_model=find_model,
        is_gone=is_gone,
        tables=Tables(
            MemoryTable(database, instance),  # type: ignore[arg-type]
            MemoryEndings(database),  # type: ignore[arg-type]
            MemoryRetirement(database, instance),  # type: ignore[arg-type]
        ),
    )


def _now() -> datetime:
    return datetime.now(UTC)


__all__ = ["Database", "Unreached", "Workers", "frontend", "make_model"]
