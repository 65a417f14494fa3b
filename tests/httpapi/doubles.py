"""A frontend's API over in-memory stand-ins, and a client that speaks raw HTTP to it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twisted.internet.defer import maybeDeferred
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.web.resource import Resource

from localai_dist.catalog.model import ModelConfig
from localai_dist.catalog.snapshot import ModelProblem
from localai_dist.httpapi.api import FrontendApi
from localai_dist.httpapi.auth import Keys
from localai_dist.httpapi.readiness import Readiness
from localai_dist.httpapi.site import make_site
from localai_dist.ids import Epoch, InstanceId, NodeId
from localai_dist.loads.status import LoadStatus
from localai_dist.reach import Unreached
from localai_dist.registry.errors import NotPending, UnknownNode
from localai_dist.registry.identity import TokenCheck
from localai_dist.registry.newcomer import Approval, holder_of
from localai_dist.registry.nodes import RegisterResult
from localai_dist.registry.presence import Presence, PresenceState
from localai_dist.registry.records import Node, Readings, Registration, Replica, SchedulingRow
from localai_dist.serving.inference import Inference, Waits
from localai_dist.serving.received import ReceivedFiles
from localai_dist.wire.verbs import Verb
from tests.serving.doubles import (
    FakeChannel,
    FakeConnect,
    FakeOwnership,
    FakeReplica,
    FakeReplicas,
    FakeRequestFiles,
    make_model,
)

_numbers = itertools.count()

KEY = "the-key"
REGISTRATION = "the-registration-token"
NODE = NodeId("11111111-2222-3333-4444-555555555555")
OTHER = NodeId("99999999-2222-3333-4444-555555555555")
WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def make_node(node: NodeId = NODE, name: str = "box", **changes: Any) -> Node:
    made = Node(node, name, "backend", "healthy", True, created_at=WHEN, updated_at=WHEN, last_heartbeat=WHEN)
    return replace(made, **changes)


@dataclass
class FakeCatalog:
    models: list[ModelConfig] = field(default_factory=lambda: [make_model("tiny"), make_model("words")])

    problems: list[ModelProblem] = field(default_factory=list)

    def all(self) -> list[ModelConfig]:
        return self.models

    def get(self, name: str) -> ModelConfig | None:
        return next((model for model in self.models if model.name == name), None)


@dataclass
class FakeNodes:
    """Nodes by id; each one's token is ``token-<name>``; ``said`` is what was asked of it."""

    rows: dict[NodeId, Node] = field(default_factory=lambda: {NODE: make_node(), OTHER: make_node(OTHER, "other")})
    said: list[tuple[Any, ...]] = field(default_factory=list)
    parked: bool = False
    trouble: Exception | None = None

    def _known(self, node_id: NodeId) -> Node:
        if self.trouble is not None:
            raise self.trouble
        if node_id not in self.rows:
            raise UnknownNode(node_id)
        return self.rows[node_id]

    async def register(
        self, registration: Registration, *, auto_approve: bool, presented_token: str | None, loose: bool = False
    ) -> RegisterResult:
        self.said.append(("register", registration, auto_approve, presented_token, loose))
        node = make_node(name=registration.name, approved=auto_approve, status="healthy" if auto_approve else "pending")
        return RegisterResult(node, "fresh-token", self.parked)

    async def check_token(self, node_id: NodeId, token: str | None) -> TokenCheck:
        node = self.rows.get(node_id)
        if node is None:
            return TokenCheck.UNKNOWN_NODE
        return TokenCheck.OK if token == f"token-{node.name}" else TokenCheck.WRONG

    async def heartbeat(self, node_id: NodeId, readings: Readings) -> bool | None:
        self.said.append(("heartbeat", node_id, readings))
        return node_id == NODE if node_id in self.rows else None

    async def approve(self, node_id: NodeId) -> Approval:
        node = self._known(node_id)
        if node.approved and not node.newcomer_waiting:
            raise NotPending(node.name)
        waiting = node.newcomer_waiting and not node.approved
        changes = {"newcomer_waiting": waiting, "registered_from": node.newcomer_from if node.approved else ""}
        self.rows[node_id] = replace(node, approved=True, status="healthy", **changes)
        return Approval(self.rows[node_id], holder_of(node) if node.approved else None)

    async def drain(self, node_id: NodeId) -> Node:
        self.said.append(("drain", node_id))
        return self._known(node_id)

    async def resume(self, node_id: NodeId) -> Node:
        self.said.append(("resume", node_id))
        return self._known(node_id)

    async def deregister(self, node_id: NodeId) -> bool:
        self.said.append(("deregister", node_id))
        return node_id in self.rows

    async def remove(self, node_id: NodeId) -> bool:
        return self.rows.pop(node_id, None) is not None

    async def all(self) -> list[Node]:
        if self.trouble is not None:
            raise self.trouble
        return sorted(self.rows.values(), key=lambda node: node.name)

    async def get(self, node_id: NodeId) -> Node | None:
        return self.rows.get(node_id)

    async def by_name(self, name: str) -> Node | None:
        return next((node for node in self.rows.values() if node.name == name), None)

    async def labels(self, node_id: NodeId) -> dict[str, str]:
        return dict(self._known(node_id).labels)

    async def put_labels(self, node_id: NodeId, labels: Mapping[str, str]) -> dict[str, str]:
        self.rows[node_id] = replace(self._known(node_id), labels=dict(labels))
        return dict(labels)

    async def patch_labels(self, node_id: NodeId, labels: Mapping[str, str]) -> dict[str, str]:
        return await self.put_labels(node_id, {**self._known(node_id).labels, **labels})

    async def delete_label(self, node_id: NodeId, key: str) -> bool:
        labels = dict(self._known(node_id).labels)
        found = labels.pop(key, None)
        await self.put_labels(node_id, labels)
        return found is not None


@dataclass
class FakeReplicaTable:
    rows: list[Replica] = field(
        default_factory=lambda: [
            Replica(NODE, "tiny", address="127.0.0.1:20000", backend_token="backend-secret", created_at=WHEN),
            Replica(OTHER, "words", state="staging", created_at=WHEN),
        ]
    )

    async def for_node(self, node: NodeId) -> list[Replica]:
        return [row for row in self.rows if row.node_id == node]

    async def all(self) -> list[Replica]:
        return self.rows


@dataclass
class FakeScheduling:
    rows: dict[str, SchedulingRow] = field(default_factory=dict)

    async def get(self, model: str) -> SchedulingRow | None:
        return self.rows.get(model)

    async def put(self, row: SchedulingRow) -> SchedulingRow:
        self.rows[row.model_name] = row
        return row

    async def all(self) -> list[SchedulingRow]:
        return list(self.rows.values())

    async def delete(self, model: str) -> bool:
        return self.rows.pop(model, None) is not None


@dataclass
class FakePresence:
    trouble: Exception | None = None
    state: PresenceState = PresenceState.CONNECTED

    async def presence_many(self, nodes: Sequence[NodeId], grace: float) -> dict[NodeId, Presence]:
        if self.trouble is not None:
            raise self.trouble
        connected = Presence(self.state, InstanceId("front-0"), Epoch(7), WHEN)
        return {node: connected for node in nodes if node == NODE}


@dataclass
class FakeLoads:
    result: Replica | Exception = field(default_factory=lambda: Replica(NODE, "tiny", node_name="box"))
    running: list[LoadStatus] = field(default_factory=list)
    unloads: list[tuple[str, NodeId | None]] = field(default_factory=list)
    gone: list[object] | Exception = field(default_factory=lambda: ["one"])
    cancelled: list[tuple[str, str]] = field(default_factory=list)

    async def ensure(self, model: ModelConfig, *, wait: float | None = None) -> Replica:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def status(self, model_name: str) -> LoadStatus | None:
        return next((job for job in self.running if job.model == model_name), None)

    async def jobs(self) -> list[LoadStatus]:
        return self.running

    async def cancel(self, model_name: str, reason: str) -> bool:
        self.cancelled.append((model_name, reason))
        return any(job.model == model_name for job in self.running)

    async def unload(self, model_name: str, node: NodeId | None = None) -> Sequence[object]:
        self.unloads.append((model_name, node))
        if isinstance(self.gone, Exception):
            raise self.gone
        return self.gone


@dataclass
class FakeVerbs:
    reply: Any = None

    async def call(self, node: NodeId, verb: Verb[Any, Any], request: Any, *, timeout: float | None = None) -> Any:
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


class Door(Resource):
    """What a mounted WebSocket resource would be."""

    isLeaf = True

    def render(self, request: Any) -> bytes:
        request.setResponseCode(426)
        return b"door of " + request.path


class World:
    """A frontend's whole API over stand-ins."""

    MAX_BODY = 10_000

    def __init__(self, *ways: FakeChannel | Unreached, keys: Sequence[str] = (KEY,), **changes: Any) -> None:
        self.clock = Clock()
        self.clock.advance(1_000_000)
        self.received = Path(f"received-{next(_numbers)}").absolute()  # trial runs in a folder of its own
        self.channel = FakeChannel()
        self.replicas = FakeReplicas([FakeReplica(NODE, "tiny"), FakeReplica(NODE, "words")])
        self.connect = FakeConnect(list(ways) or [self.channel])
        self.loads = FakeLoads()
        self.files = FakeRequestFiles()
        self.ended: list[NodeId] = []
        self.readiness = Readiness("database", clock=self.clock)
        self.api = FrontendApi(
            **{
                "catalog": FakeCatalog(),
                "inference": Inference(
                    replicas=self.replicas,
                    ownership=FakeOwnership(),
                    loads=self.loads,
                    connect=self.connect,
                    files=self.files,
                    clock=self.clock,
                    waits=Waits(),
                ),
                "nodes": FakeNodes(),
                "replicas": FakeReplicaTable(),
                "scheduling": FakeScheduling(),
                "ownership": FakePresence(),
                "loads": self.loads,
                "verbs": FakeVerbs(),
                "received": ReceivedFiles(self.received, in_thread=maybeDeferred),
                "max_body": self.MAX_BODY,
                "end_tunnel": self.ended.append,
                "keys": Keys(keys),
                "registration_token": REGISTRATION,
                "auto_approve": False,
                "loose_identity": False,
                "grace": 90.0,
                "load_wait": 60.0,
                "readiness": self.readiness,
                "clock": self.clock,
                **changes,
            }
        )
        self.site = make_site(self.api, connect_resource=Door(), peer_resource=None, reactor=self.clock)

    def send(self, method: str, path: str, body: Any = None, *, key: str | None = KEY, **headers: str) -> Exchange:
        """One request on a connection of its own; header names with ``_`` for ``-``."""
        encoded = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        exchange = Exchange(self.site)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"host": "frontend", "content-length": str(len(encoded)), **given}
        if key is not None:
            sent["authorization"] = f"Bearer {key}"
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
        exchange.receive("\r\n".join(lines).encode() + b"\r\n\r\n" + encoded)
        return exchange

    @property
    def channel_asked(self) -> bool:
        """Whether a backend was called."""
        return any(isinstance(way, FakeChannel) and way.asked for way in self.connect.ways)

    @property
    def timers(self) -> list[Any]:
        """Every timer but the idle timeout of an open connection."""
        return [call for call in self.clock.getDelayedCalls() if "TimeoutMixin" not in str(call.func)]

    def node(self, method: str, path: str, body: Any = None, *, token: str | None = None) -> Exchange:
        """A request as a worker sends it."""
        headers = {} if token is None else {"x-localai-node-token": token}
        return self.send(method, path, body, key=REGISTRATION, **headers)


class Exchange:
    """One connection: what was answered so far, and what the client can do to it."""

    def __init__(self, site: Any) -> None:
        self.transport = StringTransport()
        self.protocol = site.buildProtocol(None)
        self.protocol.makeConnection(self.transport)

    def receive(self, data: bytes) -> None:
        self.protocol.dataReceived(data)

    def leave(self) -> None:
        """The client closes."""
        self.protocol.connectionLost(Failure(ConnectionDone()))

    def pause(self) -> None:
        """The client's window is full."""
        self.transport.producer.pauseProducing()

    def unpause(self) -> None:
        self.transport.producer.resumeProducing()

    @property
    def raw(self) -> bytes:
        return self.transport.value()

    @property
    def answered(self) -> bool:
        return b"\r\n\r\n" in self.raw

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ", 2)[1])

    @property
    def headers(self) -> dict[str, str]:
        lines = self.raw.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    @property
    def body(self) -> bytes:
        rest = self.raw.partition(b"\r\n\r\n")[2]
        if self.headers.get("transfer-encoding") != "chunked":
            return rest
        whole = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            whole, rest = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        return whole

    @property
    def ended(self) -> bool:
        """Whether a chunked answer has its last chunk."""
        return self.raw.endswith(b"0\r\n\r\n")

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def frames(self) -> list[Any]:
        """The ``data:`` frames of an event stream, decoded; ``[DONE]`` as it is."""
        lines = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def comments(self) -> int:
        return sum(line.startswith(":") for line in self.body.decode().split("\n\n"))
