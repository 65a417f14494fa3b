"""In-memory stand-ins for what serving uses; ``test_contract.py`` holds them against the real ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from twisted.internet.defer import Deferred

from localai_dist.catalog.model import ModelConfig, Parameters
from localai_dist.grpcclient.status import Origin, RpcError, StatusCode
from localai_dist.ids import ModelName, NodeId
from localai_dist.reach import Outcome, Unreached
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.staging.errors import UploadRefused

USED = datetime(2026, 1, 1, tzinfo=UTC)


def make_model(name: str = "tiny", **changes: object) -> ModelConfig:
    model = ModelConfig(ModelName(name), "llama-cpp", Parameters(f"{name}.gguf"), context_size=256)
    return replace(model, **changes)  # type: ignore[arg-type]


class State(Enum):
    CONNECTED = "connected"
    RECONNECTING = "reconnecting"


@dataclass(frozen=True)
class Presence:
    state: State


@dataclass(frozen=True)
class FakeReplica:
    node_id: NodeId
    model_name: str = "tiny"
    replica_index: int = 0
    address: str = "127.0.0.1:20000"
    backend_token: str = "backend-secret"
    in_flight: int = 0
    last_used: datetime | None = USED

    @property
    def node_called(self) -> str:
        return f"box-{self.node_id}"


@dataclass
class FakeReplicas:
    """Rows of replicas; ``trouble`` is raised by every call while it is set."""

    rows: list[FakeReplica] = field(default_factory=list)
    begun: list[tuple[NodeId, int]] = field(default_factory=list)
    ended: list[tuple[NodeId, int]] = field(default_factory=list)
    reaped: list[tuple[NodeId, Outcome]] = field(default_factory=list)
    trouble: Exception | None = None
    hold_begin: Deferred[None] | None = None
    vanish: int = 0
    """How many of the next beginnings find that the row went just then."""

    def _check(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    async def loaded(self, model: str, revision: str | None = None) -> Sequence[FakeReplica]:
        self._check()
        return [row for row in self.rows if row.model_name == model]

    async def begin(self, node: NodeId, model: str, replica_index: int, *, address: str | None = None) -> bool:
        self._check()
        if self.hold_begin is not None:
            await self.hold_begin
        if self.vanish and self.begun:
            self.vanish -= 1
            self.rows = [row for row in self.rows if (row.node_id, row.replica_index) != (node, replica_index)]
        known = any((row.node_id, row.replica_index) == (node, replica_index) for row in self.rows)
        if known:
            self.begun.append((node, replica_index))
        return known

    async def end(self, node: NodeId, model: str, replica_index: int, *, address: str | None = None) -> bool:
        self.ended.append((node, replica_index))
        self._check()
        return True

    async def reap(self, replica: FakeReplica, outcome: Outcome) -> bool:
        self._check()
        self.reaped.append((replica.node_id, outcome))
        self.rows = [row for row in self.rows if row != replica]
        return True

    @property
    def running(self) -> int:
        """Calls begun and not ended."""
        return len(self.begun) - len(self.ended)


@dataclass
class FakeOwnership:
    down: set[NodeId] = field(default_factory=set)

    async def presence_many(self, nodes: Sequence[NodeId], grace: float) -> Mapping[NodeId, Presence]:
        return {node: Presence(State.RECONNECTING if node in self.down else State.CONNECTED) for node in nodes}


@dataclass
class FakeLoads:
    """Loads put a row into ``replicas``; an exception in ``results`` is raised instead."""

    replicas: FakeReplicas
    results: list[FakeReplica | Exception] = field(default_factory=list)
    waits: list[float | None] = field(default_factory=list)
    hold: Deferred[None] | None = None

    async def ensure(self, model: ModelConfig, *, wait: float | None) -> FakeReplica:
        self.waits.append(wait)
        if self.hold is not None:
            await self.hold
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        self.replicas.rows.append(result)
        return result


class FakeStream:
    """A streaming call the test feeds: bytes of replies, or an exception; ``finish()`` ends it."""

    def __init__(self) -> None:
        self.queue: list[pb.Reply | Exception | None] = []
        self.waiter: Deferred[None] | None = None
        self.cancelled = False
        self.pulled = 0

    def feed(self, *items: bytes | pb.Reply | Exception) -> None:
        for item in items:
            self.queue.append(pb.Reply(message=item) if isinstance(item, bytes) else item)
        self._wake()

    def finish(self) -> None:
        self.queue.append(None)
        self._wake()

    def _wake(self) -> None:
        if self.waiter is not None:
            waiter, self.waiter = self.waiter, None
            waiter.callback(None)

    def __aiter__(self) -> AsyncIterator[pb.Reply]:
        return self

    async def __anext__(self) -> pb.Reply:
        while not self.queue:
            self.waiter = Deferred()
            try:
                await self.waiter
            except BaseException:
                self.waiter = None
                self.cancelled = True
                raise
        item = self.queue.pop(0)
        self.pulled += 1
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled = True
        if self.waiter is not None:
            self.queue.append(RpcError(StatusCode.CANCELLED, "cancelled", Origin.CALLER))
            self._wake()


@dataclass
class FakeChannel:
    """A backend: answers with ``reply``, ``stream`` and ``vectors``, each an exception to be raised if it is one."""

    reply: pb.Reply | Exception = field(default_factory=lambda: pb.Reply(message=b"hello", tokens=2, prompt_tokens=5))
    stream: FakeStream | Exception = field(default_factory=FakeStream)
    vectors: list[pb.EmbeddingResult] = field(default_factory=list)
    hold: Deferred[None] | None = None
    asked: list[pb.PredictOptions] = field(default_factory=list)
    transcript: pb.TranscriptResult | Exception = field(default_factory=lambda: pb.TranscriptResult(text="hello"))
    heard: list[pb.TranscriptRequest] = field(default_factory=list)
    cancelled: bool = False
    closed: int = 0

    async def predict(self, options: pb.PredictOptions, timeout: float | None = None) -> pb.Reply:
        self.asked.append(options)
        await self._held()
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply

    def predict_stream(self, options: pb.PredictOptions, timeout: float | None = None) -> FakeStream:
        self.asked.append(options)
        if isinstance(self.stream, Exception):
            raise self.stream
        return self.stream

    async def embedding(self, options: pb.PredictOptions, timeout: float | None = None) -> pb.EmbeddingResult:
        self.asked.append(options)
        return self.vectors[len(self.asked) - 1]

    async def transcribe(self, request: pb.TranscriptRequest, timeout: float | None = None) -> pb.TranscriptResult:
        self.heard.append(request)
        await self._held()
        if isinstance(self.transcript, Exception):
            raise self.transcript
        return self.transcript

    def close(self) -> None:
        self.closed += 1

    async def _held(self) -> None:
        if self.hold is not None:
            try:
                await self.hold
            except BaseException:
                self.cancelled = True
                raise


@dataclass
class FakeRequestFiles:
    """Files of requests on nodes: ``here`` has what is staged and not released; ``troubles`` are raised first."""

    here: set[tuple[NodeId, str]] = field(default_factory=set)
    over: set[tuple[NodeId, str]] = field(default_factory=set)
    staged: list[tuple[NodeId, str, bytes]] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    troubles: list[Exception | None] = field(default_factory=list)
    hold: Deferred[None] | None = None

    def called(self, node: NodeId) -> str:
        return f"box-{node}"

    async def stage(self, node: NodeId, request: str, path: Path, *, deadline: float | None = None) -> str:
        self.deadlines.append(deadline)
        if (node, request) in self.over:
            raise UploadRefused(f"request {request} is over")
        self.here.add((node, request))  # the first bytes
        if self.hold is not None:
            await self.hold
        trouble = self.troubles.pop(0) if self.troubles else None
        if trouble is not None:
            raise trouble
        self.staged.append((node, request, path.read_bytes()))
        return f"/there/{request}/{path.name}"

    def let_go(self, node: NodeId, request: str) -> None:
        self.here.discard((node, request))
        self.over.add((node, request))


@dataclass
class FakeConnect:
    """Ways to nodes: for each attempt the next of ``ways`` (a channel, or what to raise), the last for ever."""

    ways: list[FakeChannel | Unreached]
    attempts: list[tuple[NodeId, str, str]] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)

    async def __call__(self, node: NodeId, address: str, token: str, *, deadline: float | None = None) -> FakeChannel:
        self.attempts.append((node, address, token))
        self.deadlines.append(deadline)
        way = self.ways.pop(0) if len(self.ways) > 1 else self.ways[0]
        if isinstance(way, Unreached):
            raise way
        return way
