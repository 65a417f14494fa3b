"""The work of one load on the node that was chosen: room, install, files, model. Every step asks the fence first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from localai_dist.catalog.model import ModelConfig
from localai_dist.grpcclient.status import Origin, RpcError, StatusCode
from localai_dist.grpcclient.verdict import outcome_of
from localai_dist.loads.budget import load_budget
from localai_dist.loads.errors import LoadFailed
from localai_dist.loads.options import model_options
from localai_dist.loads.room import make_room
from localai_dist.loads.rows import Claim, Loaded
from localai_dist.loads.status import JobState
from localai_dist.loads.tools import Tools
from localai_dist.reach import Unreached
from localai_dist.scheduler.placement import Placement
from localai_dist.staging.hold_timer import HoldTimer
from localai_dist.staging.plan import StagedFile, model_root, total_size
from localai_dist.staging.progress import Progress
from localai_dist.staging.source import Sources
from localai_dist.units import MINUTE, format_duration, format_size
from localai_dist.wire.verbs import INSTALL, InstallReply, InstallRequest

LOAD_KNOB = "LOCALAI_NATS_MODEL_LOAD_TIMEOUT"
_SLACK = 5 * MINUTE

Fence = Callable[[JobState, Placement], Awaitable[None]]
"""Writes the state; raises ``TakenOver`` when the job is somebody else's."""


@dataclass(frozen=True, slots=True)
class Steps:
    """
    One attempt's work on one node.

    Attributes:
        started: told as soon as a process may be running for this load.
    """

    tools: Tools
    model: ModelConfig
    claim: Claim
    sources: Sources
    progress: Progress
    hold: HoldTimer
    fence: Fence
    started: Callable[[Placement, str], None]

    async def load_on(self, place: Placement) -> tuple[Loaded, float]:
        """
        The loaded replica, and how long its backend took to load it (s).

        Raises:
            LoadFailed, StagingError: with the worker's or the backend's own words.
            Unreached: the node can't be reached; ``reach.may_retry`` says whether to try again.
            TakenOver: the job is somebody else's.
        """
        await self.fence(JobState.INSTALLING, place)
        await make_room(self.tools, place, self.claim, self.hold)
        installed = await self._install(place)
        self.started(place, installed.address)
        await self.fence(JobState.STAGING, place)
        staged = await self.tools.stager.stage(place.node, self.sources.files, self.progress, self.hold)
        await self.fence(JobState.LOADING, place)
        began = self.tools.clock.seconds()
        await self._load(place, installed, staged)
        loaded = Loaded(
            node=place.node,
            replica_index=place.replica_index,
            address=installed.address,
            backend_token=installed.backend_token,
            backend_type=self.model.backend,
            revision=self.model.revision,
        )
        return loaded, self.tools.clock.seconds() - began

    async def _install(self, place: Placement) -> InstallReply:
        request = InstallRequest(
            backend=self.model.backend,
            model_id=self.model.name,
            backend_galleries=self.tools.settings.backend_galleries,
            replica_index=place.replica_index,
            op_id=f"{self.model.name}:{self.claim.attempt}",
            attempt=self.claim.attempt,
        )
        reply = await self.tools.verbs.call(place.node, INSTALL, request, timeout=self.tools.settings.install_timeout)
        if not reply.success:
            raise LoadFailed(f"backend {self.model.backend} on node {place.node_name}: {reply.error or 'no reason'}")
        return reply

    async def _load(self, place: Placement, installed: InstallReply, staged: tuple[StagedFile, ...]) -> None:
        payload = total_size(self.sources.files)
        budget = load_budget(payload, self.tools.settings.load_timeout)
        self.hold.extend(budget + _SLACK)
        root = model_root(staged[0].remote, staged[0].source.relative)
        options = model_options(self.model, root, {file.source.relative for file in staged})
        channel = await self.tools.connect_backend(place.node, installed.address, installed.backend_token)
        try:
            result = await channel.load_model(options, budget)
        except RpcError as error:
            raise self._load_error(place, error, budget, payload) from error
        finally:
            channel.close()
        if not result.success:
            raise LoadFailed(f"{self.model.name} on node {place.node_name}: {result.message or 'no reason given'}")

    def _load_error(self, place: Placement, error: RpcError, budget: float, payload: int) -> LoadFailed | Unreached:
        where = f"{self.model.name} on node {place.node_name}"
        if error.origin is Origin.CALLER and error.status is StatusCode.DEADLINE_EXCEEDED:
            return LoadFailed(
                f"{where} was not loaded within {format_duration(budget)} ({format_size(payload)}); "
                f"{LOAD_KNOB} allows more"
            )
        if error.origin is Origin.TRANSPORT:
            return Unreached(outcome_of(error))
        return LoadFailed(f"{where}: {error.details or error}")
