"""What a load job works with: its settings, and the seams it reaches the cluster through."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from twisted.internet.interfaces import IReactorTime

from localai_dist.ids import InstanceId, NodeId
from localai_dist.loads.budget import INSTALL
from localai_dist.loads.endings import Endings
from localai_dist.loads.fleet import Fleet
from localai_dist.loads.table import JobTable
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.staging.hold import CAP, STALL
from localai_dist.staging.plan import SourceFile, StagedFile
from localai_dist.staging.progress import Progress
from localai_dist.staging.source import Sources
from localai_dist.staging.upload import HoldLike
from localai_dist.units import MINUTE
from localai_dist.wire.verbs import Verb

Q = TypeVar("Q")
R = TypeVar("R")


class VerbsLike(Protocol):
    """Control verbs of nodes (``relay.control.VerbClient``)."""

    async def call(
        self,
        node: NodeId,
        verb: Verb[Q, R],
        request: Q,
        *,
        timeout: float | None = None,
        on_progress: Callable[[Any], None] | None = None,
    ) -> R:
        """The worker's answer; raises ``Unreached``."""


class StagerLike(Protocol):
    """Model files onto nodes (``staging.stager.Stager``)."""

    async def sources(self, model: str, relatives: Sequence[str], hints: Sequence[str] = ()) -> Sources:
        """The model's files on this frontend."""

    async def stage(
        self, node: NodeId, files: Sequence[SourceFile], progress: Progress, hold: HoldLike
    ) -> tuple[StagedFile, ...]:
        """The files on the node."""


class ChannelLike(Protocol):
    """A connection to one backend (``grpcclient.BackendChannel``)."""

    async def load_model(self, options: pb.ModelOptions, timeout: float | None) -> pb.Result:
        """Load a model; raises ``RpcError``."""

    def close(self) -> None:
        """Close the connection."""


ConnectBackend = Callable[[NodeId, str, str], Awaitable[ChannelLike]]
"""(node, worker-local address, backend token) -> channel; raises ``Unreached``."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """
    Numbers of design §7, in seconds.

    Attributes:
        grace: how long a lost tunnel may take to come back.
        live_window: after which a silent frontend is not live.
        route_wait: how long a load waits for the only suitable node to come back before it fails.
        install_timeout: budget of the install verb.
        load_timeout: the operator's LoadModel budget; None derives it from the model's size.
        backend_galleries: JSON text sent with the install verb; empty leaves it to the worker.
        orphan_after: silence after which a job is anybody's.
        stall: silence that ends a load.
        cap: the longest a load may take.
        poll: between two looks at a job that another frontend runs.
        beat: between two heartbeats of a job.
        sweep: between two removals of rows that nobody needs any more.
        look: between two looks for orphans and offered jobs while there are jobs.
        idle_look: the same while there are none.
        forget: between two removals of endings that nothing rests on any more.
        offer: how long a job whose files are not here waits for a frontend that has them.
        retire: between two looks for replicas of older configurations, and how long one is left alone after the change.
        drain: how long requests on a replica that must make room may go on.
    """

    grace: float = 90.0
    live_window: float = 30.0
    route_wait: float = 5.0
    install_timeout: float = INSTALL
    load_timeout: float | None = None
    backend_galleries: str = ""
    orphan_after: float = 60.0
    stall: float = STALL
    cap: float = CAP
    poll: float = 0.5
    beat: float = 1.0
    sweep: float = 10.0
    look: float = 1.0
    idle_look: float = 5.0
    forget: float = 10 * MINUTE
    offer: float = 15.0
    retire: float = 5.0
    drain: float = 30.0


@dataclass(frozen=True, slots=True)
class Tools:
    """
    Everything one job needs.

    Attributes:
        instance: this frontend, as the others know it.
        called: what people call a node.
    """

    instance: InstanceId
    table: JobTable
    endings: Endings
    fleet: Fleet
    verbs: VerbsLike
    stager: StagerLike
    connect_backend: ConnectBackend
    clock: IReactorTime
    settings: LoadSettings
    called: Callable[[NodeId], str] = str
