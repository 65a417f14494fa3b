"""
One attempt of one load job: from the claim to the replica's row, under a hold, with a heartbeat, behind a fence.

::

    claim ─▶ place ─▶ installing ─▶ staging ─▶ loading ─▶ finish: job row out, replica row in (one statement)
                         ▲  the way broke: again, as long as the hold lasts │
                         └───────────────────────────────────────────────────┘
    taken over (a write changed no row): stop, touch nothing        failure: the row keeps the cause

Source: design §5.18, §7; internals §3.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.backoff import Backoff
from localai_dist.catalog.model import ModelConfig
from localai_dist.errors import LocalAIDistError
from localai_dist.loads.budget import base_hold, load_budget
from localai_dist.loads.cause import encode_cause
from localai_dist.loads.errors import LoadFailed, TakenOver, UnloadFailed
from localai_dist.loads.status import JobState
from localai_dist.loads.steps import Steps
from localai_dist.loads.stop import stop_exactly
from localai_dist.loads.table import Claim, Loaded
from localai_dist.loads.tools import Tools
from localai_dist.reach import Reconnecting, RegistryUnknown, Retry, Unreached, may_retry
from localai_dist.scheduler.placement import Need, NoPlace, Placement
from localai_dist.staging.errors import HoldExpired
from localai_dist.staging.hold_timer import HoldTimer
from localai_dist.staging.plan import total_size
from localai_dist.staging.progress import Progress
from localai_dist.staging.source import Sources
from localai_dist.store.errors import StatementFailed, StoreUnavailable

RETRY = Backoff(first=1.0, cap=5.0)
"""Between attempts at a node whose way broke."""

_FRESH_TRIES = 3
"""How often an answer that is a fact about nothing is asked for anew before it is believed."""


class LoadJob:
    """
    Runs one claimed attempt.

    Attributes:
        progress: how far its files are.
    """

    log = Logger()

    def __init__(self, tools: Tools, model: ModelConfig, claim: Claim) -> None:
        self._tools = tools
        self._clock = tools.clock
        self._model = model
        self._claim = claim
        self.progress = Progress()
        self._state = JobState.PENDING
        self._taken = False
        self._ending = False
        self._work: Deferred[None] | None = None
        self._process: tuple[Placement, str] | None = None
        self._begun = tools.clock.seconds()

    async def run(self) -> None:
        """
        Until the replica is loaded and its row is there.

        Raises:
            LoadFailed, NoPlace, Unreached: the cause, which is also in the job's row.
            TakenOver: another frontend has the job.
            CancelledError: this frontend stops; the job is anybody's.
        """
        beat = LoopingCall(lambda: Deferred.fromCoroutine(self._beat()))
        beat.clock = self._clock
        beating = beat.start(self._tools.settings.beat, now=False)
        beating.addErrback(lambda failure: self.log.failure("the heartbeat of a load job stopped", failure))
        self._work = Deferred.fromCoroutine(self._guarded())
        try:
            await self._work
        except CancelledError:
            if self._taken:
                raise TakenOver(self._model.name) from None
            await self._give_up()
            raise
        finally:
            if beat.running:
                beat.stop()

    async def _guarded(self) -> None:
        """The hold around the steps; whatever ends them is written into the row."""
        load = load_budget(0, self._tools.settings.load_timeout)
        base = base_hold(self._tools.settings.install_timeout, load)
        hold = HoldTimer(self._clock, base=base, stall=self._tools.settings.stall, cap=self._tools.settings.cap)
        try:
            await hold.run(self._steps(hold))
        except (TakenOver, CancelledError):
            raise
        except HoldExpired as error:
            done = self.progress.summary(self._clock.seconds() - self._begun)
            await self._fail(LoadFailed(f"{self._model.name}: {error} ({self._state.value}: {done})"), abandoned=True)
        except (LoadFailed, NoPlace, Unreached) as error:
            await self._fail(error)
        except LocalAIDistError as error:
            await self._fail(LoadFailed(str(error)))
        except Exception as error:  # noqa: BLE001 - the one wrapper around a whole job, and it logs
            # The wrapper that keeps a fault of ours from leaving every waiter without an answer.
            self.log.failure("loading {model} failed by a fault of this program", Failure(), model=self._model.name)
            await self._fail(LoadFailed(f"internal error while loading {self._model.name}: {type(error).__name__}"))

    async def _steps(self, hold: HoldTimer) -> None:
        sources = await self._tools.stager.sources(self._model.name, self._model.files())
        if sources.missing:
            self.log.warn("{model} lacks {files}", model=self._model.name, files=", ".join(sources.missing))
        place = await self._place(hold, sources)
        self.log.info("loading {model} on node {node}", model=self._model.name, node=place.node_name)
        steps = Steps(
            tools=self._tools,
            model=self._model,
            claim=self._claim,
            sources=sources,
            progress=self.progress,
            hold=hold,
            fence=lambda state, where: self._fence(hold, state, where),
            started=self._remember,
        )
        loaded = await self._until_it_lasts(hold, steps, place)
        await self._finish(hold, loaded)

    async def _until_it_lasts(self, hold: HoldTimer, steps: Steps, place: Placement) -> Loaded:
        """The steps again and again while only the way to the node is broken."""
        attempt = fresh = 0
        while True:
            try:
                return await steps.load_on(place)
            except Unreached as error:
                hold.check()
                retry = may_retry(error.outcome)
                fresh += retry is Retry.ONCE_FRESH
                if retry is Retry.NEVER or fresh > _FRESH_TRIES:
                    raise
                self.progress.trouble = str(error)
            attempt += 1
            await self._pause(RETRY.delay(attempt, 1.0))

    async def _place(self, hold: HoldTimer, sources: Sources) -> Placement:
        """The node; waits a little for the only one that suits to come back, and longer for one that has our bytes."""
        prefer = self._claim.node or None
        need = Need(self._model.name, self._model.revision, total_size(sources.files), prefer)
        patience = self._clock.seconds() + self._tools.settings.route_wait
        while True:
            found = await self._choose(need)
            if isinstance(found, Placement):
                return found
            hold.check()
            waits = isinstance(found.outcome, Reconnecting | RegistryUnknown)
            if not waits or (prefer is None and self._clock.seconds() >= patience):
                raise found if found.outcome is None else Unreached(found.outcome)
            await self._pause(self._tools.settings.poll)

    async def _choose(self, need: Need) -> Placement | NoPlace:
        try:
            return await self._tools.fleet.choose(need)
        except StoreUnavailable as error:
            return NoPlace(str(error), RegistryUnknown(str(error)))

    async def _fence(self, hold: HoldTimer, state: JobState, place: Placement) -> None:
        self._state = state
        await self._written(
            hold,
            lambda: self._tools.table.advance(
                self._claim, state, node=place.node, node_name=place.node_name, replica_index=place.replica_index
            ),
        )

    async def _finish(self, hold: HoldTimer, loaded: Loaded) -> None:
        self._ending = True
        try:
            await self._written(hold, lambda: self._tools.table.finish(self._claim, loaded))
        except StatementFailed as error:
            raise LoadFailed(f"{self._model.name} is loaded, but its node was removed meanwhile: {error}") from error
        self.log.info("{model} is loaded on node {node}", model=self._model.name, node=loaded.node)

    async def _written(self, hold: HoldTimer, write: Callable[[], Awaitable[bool]]) -> None:
        """A fenced write, repeated while the database is away: a load outlives its restart."""
        while True:
            try:
                if not await write():
                    raise TakenOver(self._model.name)
                return
            except StoreUnavailable as error:
                hold.check()
                self.log.warn("the load of {model} waits: {error}", model=self._model.name, error=error)
                await self._pause(1.0)

    async def _beat(self) -> None:
        if self._ending:
            return  # the row is about to say so itself
        if self._state is JobState.STAGING:
            self._tools.sighted(self._model.name, self._claim.attempt, self.progress.bytes_sent)
        try:
            alive = await self._tools.table.beat(self._claim, self.progress)
        except StoreUnavailable:
            return  # silence may cost us the job; the load itself needs no database
        if not alive and not self._ending and self._work is not None:
            self._taken = True
            self._work.cancel()

    async def _fail(self, error: LocalAIDistError, *, abandoned: bool = False) -> None:
        """Leave the cause in the row, and no process that still loads; then raise the cause."""
        self._ending = True
        self.log.warn("loading {model} failed: {error}", model=self._model.name, error=error)
        try:
            ours = await self._tools.table.fail(self._claim, encode_cause(error))
        except StoreUnavailable as unavailable:
            self.log.warn("the failure could not be recorded: {error}", error=unavailable)
            ours = True
        if not ours:
            raise TakenOver(self._model.name)
        if abandoned and self._process is not None:
            await self._stop_process(*self._process)
        raise error

    async def _stop_process(self, place: Placement, address: str) -> None:
        try:
            await stop_exactly(
                self._tools.verbs,
                place.node,
                self._model.name,
                place.replica_index,
                address,
                force=True,
                attempt=self._claim.attempt,
            )
        except (Unreached, UnloadFailed) as error:
            self.log.warn("a backend that was given up may still load: {error}", error=error)

    async def _give_up(self) -> None:
        try:
            await self._tools.table.abandon(self._claim)
        except StoreUnavailable as error:
            self.log.info("the load of {model} is left as it is: {error}", model=self._model.name, error=error)

    def _remember(self, place: Placement, address: str) -> None:
        self._process = (place, address)

    def _pause(self, seconds: float) -> Deferred[Any]:
        return deferLater(self._clock, seconds)
