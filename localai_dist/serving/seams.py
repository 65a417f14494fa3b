"""What serving needs of its neighbours, as protocols; ``roles/`` passes the real ones in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from localai_dist.catalog.model import ModelConfig
from localai_dist.ids import NodeId
from localai_dist.reach import Outcome
from localai_dist.rpc import backend_pb2 as pb


class ReplicaLike(Protocol):
    """One loaded copy of a model on a node, as the registry has it."""

    @property
    def node_id(self) -> NodeId: ...
    @property
    def node_called(self) -> str: ...
    @property
    def model_name(self) -> str: ...
    @property
    def replica_index(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def backend_token(self) -> str: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def last_used(self) -> datetime | None: ...


class ReplicasLike(Protocol):
    """The registry's rows of loaded replicas."""

    async def loaded(self, model: str, revision: str | None = None) -> Sequence[ReplicaLike]:
        """The replicas of ``model`` that are loaded, from this config revision only when one is given."""
        ...

    async def begin(self, node: NodeId, model: str, replica_index: int, *, address: str | None = None) -> bool:
        """Count one call more on that replica; False when it is not loaded at that address any more."""
        ...

    async def end(self, node: NodeId, model: str, replica_index: int, *, address: str | None = None) -> bool:
        """Count one call less, never below zero."""
        ...

    async def reap(self, replica: Any, outcome: Outcome) -> bool:
        """Forget the replica that was asked, if ``outcome`` permits it."""
        ...


class PresenceLike(Protocol):
    """What the registry knows of a node's tunnel; ``state`` is an enum of design §2's four values."""

    @property
    def state(self) -> Any: ...


class OwnershipLike(Protocol):
    """Who holds which tunnel."""

    async def presence_many(self, nodes: Sequence[NodeId], grace: float) -> Mapping[NodeId, PresenceLike]:
        """The presence of each node, with the reconnect grace in seconds."""
        ...


class LoadsLike(Protocol):
    """Cold loads."""

    async def ensure(self, model: ModelConfig, *, wait: float | None) -> ReplicaLike:
        """A loaded replica of ``model``, loading one if need be; waits at most ``wait`` seconds."""
        ...


class ReplyStreamLike(Protocol):
    """The replies of one streaming call; a reader that does not pull stops the backend."""

    def __aiter__(self) -> AsyncIterator[pb.Reply]: ...
    def cancel(self) -> None: ...


class ChannelLike(Protocol):
    """A connection to one backend process."""

    async def predict(self, options: pb.PredictOptions, timeout: float | None = None) -> pb.Reply: ...
    def predict_stream(self, options: pb.PredictOptions, timeout: float | None = None) -> ReplyStreamLike: ...
    async def embedding(self, options: pb.PredictOptions, timeout: float | None = None) -> pb.EmbeddingResult: ...
    async def transcribe(self, request: pb.TranscriptRequest, timeout: float | None = None) -> pb.TranscriptResult: ...
    def close(self) -> None: ...


class RequestFilesLike(Protocol):
    """Files of single requests on nodes (``staging.request_files.RequestFiles``)."""

    async def stage(self, node: NodeId, request: str, path: Path, *, deadline: float | None = None) -> str:
        """The file's path on the node, after one attempt."""
        ...

    def let_go(self, node: NodeId, request: str) -> None:
        """Have the request's files removed from the node, in the background."""
        ...

    def called(self, node: NodeId) -> str:
        """What people call the node."""
        ...


class ConnectBackend(Protocol):
    """Open a channel to a backend on a node; raises ``reach.Unreached``."""

    def __call__(
        self, node: NodeId, address: str, token: str, *, deadline: float | None = None
    ) -> Awaitable[ChannelLike]: ...
