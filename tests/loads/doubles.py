"""A cluster in memory for load jobs: rows, registry, workers, backends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from localai_dist.catalog.model import ModelConfig, Parameters
from localai_dist.ids import InstanceId, ModelName, NodeId, ProcessKey, parse_process_key
from localai_dist.loads.cause import cause_text
from localai_dist.loads.service import Loads
from localai_dist.loads.status import JobState, LoadStatus
from localai_dist.loads.table import Claim, JobRow, Loaded
from localai_dist.loads.tools import LoadSettings
from localai_dist.reach import Unreached
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
    MODEL_STOP,
    MODEL_UNLOAD,
    DoneReply,
    InstallReply,
    InstallRequest,
    ModelStopReply,
    ModelStopRequest,
    ModelUnloadRequest,
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

    async def claim(self, key: str) -> Claim | None:
        self._database.check()
        row = self._database.jobs.get(key)
        if row is not None and row.state is not JobState.FAILED and not row.orphaned:
            return None
        self._database.attempts += 1
        attempt = self._database.attempts
        failed = row is not None and row.state is JobState.FAILED
        node = NodeId("") if row is None or failed else row.node
        error = row.error if row is not None and failed else ""
        self._database.jobs[key] = Row(attempt, self._instance, node=node, error=error)
        return Claim(key, attempt, node)

    async def advance(self, claim: Claim, state: JobState, *, node: NodeId, node_name: str, replica_index: int) -> bool:
        row = self._ours(claim)
        if row is not None:
            row.state, row.node, row.node_name = state, node, node_name
            self._database.history.append(state.value)
        return row is not None

    async def beat(self, claim: Claim, progress: Progress) -> bool:
        row = self._ours(claim)
        if row is not None:
            row.progress = replace(progress)
        return row is not None

    async def fail(self, claim: Claim, error: str) -> bool:
        row = self._ours(claim)
        if row is not None:
            row.state, row.error = JobState.FAILED, error
        return row is not None

    async def finish(self, claim: Claim, loaded: Loaded) -> bool:
        if self._ours(claim) is None:
            return False
        del self._database.jobs[claim.key]
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

    async def abandon(self, claim: Claim) -> bool:
        row = self._ours(claim)
        if row is not None:
            row.orphaned = True
        return row is not None

    async def read(self, key: str) -> JobRow | None:
        self._database.check()
        row = self._database.jobs.get(key)
        return None if row is None else _job(key, row)

    async def all(self) -> list[JobRow]:
        self._database.check()
        return [_job(key, row) for key, row in self._database.jobs.items()]

    async def sweep(self) -> int:
        self._database.check()
        return 0

    def _ours(self, claim: Claim) -> Row | None:
        self._database.check()
        row = self._database.jobs.get(claim.key)
        if row is None or (row.owner, row.attempt) != (self._instance, claim.attempt) or row.state is JobState.FAILED:
            return None
        return row


def _job(key: str, row: Row) -> JobRow:
    error = cause_text(row.error) if row.state is JobState.FAILED else ""
    progress = row.progress
    status = LoadStatus(
        key, row.state.value, row.node_name, progress.bytes_sent, progress.total_bytes, 0, 0, error=error
    )
    return JobRow(key, row.attempt, row.state, InstanceId(row.owner), row.orphaned, row.error, status)


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
        self.immortal = ""
        self.options: pb.ModelOptions | None = None
        self.timeouts: list[float | None] = []
        self.missing: tuple[str, ...] = ()
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
        if verb is MODEL_UNLOAD:
            assert isinstance(request, ModelUnloadRequest)
            await self._step("free")
            return self.free
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
        return Sources((replace(WEIGHTS, relative=relatives[0]),), self.missing)

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
    **settings: Any,
) -> Loads:
    """The loads of one frontend."""
    return Loads(
        None,  # type: ignore[arg-type]
        database,
        NodesOf(database),
        database,
        database,
        workers,
        workers,
        workers.connect,
        clock=clock,
        instance=InstanceId(instance),
        settings=LoadSettings(**settings),
        find_model=find_model,
        table=MemoryTable(database, instance),  # type: ignore[arg-type]
    )


def _now() -> datetime:
    return datetime.now(UTC)


__all__ = ["Database", "Unreached", "Workers", "frontend", "make_model"]
