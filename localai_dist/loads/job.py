"""
One attempt of one load job: from the claim to the replica's row, under a hold, with a heartbeat, behind a fence.

::

    claim ─▶ all files here? ─no─▶ offer it to the other frontends
                │ yes, or no frontend has them all
              place ─▶ installing ─▶ staging ─▶ loading ─▶ finish: job row out, replica row in (one statement)
                         ▲  the way broke: again, as long as the hold lasts │
                         └───────────────────────────────────────────────────┘
    taken over (a write changed no row): stop, touch nothing        failure: the row keeps the cause
    cancel mark: stop, clear away, row out

Source: design §5.18, §7; internals §3.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.backoff import Backoff
from localai_dist.catalog.model import ModelConfig
from localai_dist.errors import LocalAIDistError
from localai_dist.loads.budget import base_hold, load_budget
from localai_dist.loads.cancel import clear_away, remove_files, stop_process
from localai_dist.loads.cause import encode_cause
from localai_dist.loads.errors import LoadCancelled, LoadFailed, Marked, Offered, TakenOver
from localai_dist.loads.lack import Lack, lacking_text, lacking_told
from localai_dist.loads.placing import place_for
from localai_dist.loads.rows import Claim, Loaded, Measured
from localai_dist.loads.speed import Speed
from localai_dist.loads.status import JobState, LoadStatus
from localai_dist.loads.steps import Steps
from localai_dist.loads.tools import Tools
from localai_dist.reach import Answer, Answered, Outcome, Retry, Unreached, may_retry
from localai_dist.scheduler.placement import NoPlace, Placement
from localai_dist.staging.errors import HoldExpired, NoSpace, SourceMissing
from localai_dist.staging.hold_timer import HoldTimer
from localai_dist.staging.progress import Progress
from localai_dist.staging.source import Sources
from localai_dist.store.errors import StatementFailed, StoreUnavailable
from localai_dist.units import format_size

RETRY = Backoff(first=1.0, cap=5.0)
"""Between attempts at a node whose way broke."""

_FRESH_TRIES = 3
"""How often an answer that is a fact about nothing is asked for anew before it is believed."""


class LoadJob:
    """
    Runs one claimed attempt.

    Attributes:
        progress: how far its files are.
        was_served: this frontend served the model when the attempt began.
    """

    log = Logger()

    def __init__(self, tools: Tools, model: ModelConfig, claim: Claim, *, was_served: bool = True) -> None:
        self._tools = tools
        self._clock = tools.clock
        self._model = model
        self._claim = claim
        self.was_served = was_served
        self.progress = Progress(floor=claim.bytes)
        self._speed = Speed()
        self._state = JobState.PENDING
        self._taken = False
        self._cancel_reason = ""
        self._ending = False
        self._work: Deferred[None] | None = None
        self._place: Placement | None = None
        self._address = ""
        self._begun = tools.clock.seconds()

    async def run(self) -> None:
        """
        Until the replica is loaded and its row is there.

        Raises:
            LoadFailed, NoPlace, Unreached: the cause, which is also in the job's row.
            LoadCancelled: somebody cancelled it; nothing of it is left.
            Offered: this frontend lacks the files; the job waits for another one.
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
        except Marked as marked:
            await self._clear_away(str(marked))
        except CancelledError:
            if self._taken:
                raise TakenOver(self._model.name) from None
            if self._cancel_reason:
                await self._clear_away(self._cancel_reason)
            await self._give_up()
            raise
        finally:
            if beat.running:
                beat.stop()

    @property
    def status(self) -> LoadStatus:
        """How it stands, as its row will say with the next heartbeat."""
        told = self.progress
        return LoadStatus(
            self._model.name,
            self._state.value,
            node="" if self._place is None else self._place.node_name,
            bytes_sent=told.bytes_sent,
            total_bytes=told.total_bytes,
            waits=told.trouble if told.waits else "",
            waits_told=told.trouble_told if told.waits else "",
        )

    def cancel(self, reason: str) -> None:
        """The row was marked: stop now; the next heartbeat would find out too."""
        if self._work is not None and not self._ending and not self._cancel_reason:
            self._cancel_reason = reason
            self._work.cancel()

    async def _guarded(self) -> None:
        """The hold around the steps; whatever ends them is written into the row."""
        load = load_budget(0, self._tools.settings.load_timeout)
        base = base_hold(self._tools.settings.install_timeout, load)
        hold = HoldTimer(self._clock, base=base, stall=self._tools.settings.stall, cap=self._tools.settings.cap)
        try:
            await hold.run(self._steps(hold))
        except (TakenOver, Marked, Offered, CancelledError):
            raise
        except HoldExpired as error:
            await self._fail(self._over(error))
        except NoSpace as error:
            await self._fail(self._full(error), cramped=True)
        except LoadFailed as error:
            await self._fail(self._with_lacking(error))
        except (NoPlace, Unreached) as error:
            await self._fail(error)
        except LocalAIDistError as error:
            await self._fail(LoadFailed(str(error), error.told))
        except Exception as error:  # noqa: BLE001 - the one wrapper around a whole job, and it logs
            # The wrapper that keeps a fault of ours from leaving every waiter without an answer.
            self.log.failure("loading {model} failed by a fault of this program", Failure(), model=self._model.name)
            await self._fail(LoadFailed(f"internal error while loading {self._model.name}: {type(error).__name__}"))

    async def _steps(self, hold: HoldTimer) -> None:
        sources = await self._sources(hold)
        if sources.missing:
            self.log.warn(
                "{model} is loaded without {files}: no frontend has every file of it",
                model=self._model.name,
                files=", ".join(sources.missing),
            )
        place = await place_for(self._tools, self._model, self._claim, sources, hold, self.progress)
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
        loaded, seconds = await self._until_it_lasts(hold, steps, place)
        await self._finish(hold, loaded, seconds)

    async def _sources(self, hold: HoldTimer) -> Sources:
        """The model's files on this frontend; while any is missing the job is offered to the others (LOAD-22)."""
        try:
            model = self._model
            sources = await self._tools.stager.sources(model.name, model.files(), model.option_values())
            if not sources.missing or self._claim.lacking:
                return sources
            missing = ", ".join(sources.missing)
            told = f"{missing} not in its models folder"
            lack = Lack(f"{missing} not in {sources.where}", len(sources.missing), told)
        except SourceMissing as error:
            lack = Lack(str(error), told=error.told)
        self._ending = True
        self.log.info("{model} is left to other frontends: {why}", model=self._model.name, why=lack.why)
        await self._written(hold, lambda: self._tools.table.offer(self._claim, lack))
        raise Offered(lack.why)

    async def _until_it_lasts(self, hold: HoldTimer, steps: Steps, place: Placement) -> tuple[Loaded, float]:
        """The steps again and again while only the way is broken, or the process we were given is gone meanwhile."""
        attempt = fresh = 0
        while True:
            try:
                return await steps.load_on(place)
            except Unreached as error:
                hold.check()
                gone, retry = _is_process_gone(error.outcome), may_retry(error.outcome)
                fresh += gone or retry is Retry.ONCE_FRESH
                if fresh > _FRESH_TRIES and self._state is JobState.LOADING:
                    raise self._backend_lost(place, error) from error
                if (retry is Retry.NEVER and not gone) or fresh > _FRESH_TRIES:
                    raise
                self._waits(place, error)
            attempt += 1
            await self._pause(RETRY.delay(attempt, 1.0))

    def _waits(self, place: Placement, error: Unreached) -> None:
        if str(error) != self.progress.trouble:
            self.log.warn(
                "loading {model} on node {node} waits, and goes on by itself: {why}",
                model=self._model.name,
                node=place.node_name,
                why=str(error),
            )
        self.progress.interrupted(error)

    def _backend_lost(self, place: Placement, error: Unreached) -> LoadFailed:
        """Each process that the worker started for this model was lost while it loaded it."""
        text = (
            f"{self._model.name} on node {place.node_name}: its backend was lost while it loaded the model, "
            f"{_FRESH_TRIES + 1} times in a row; the worker's log tells how it ended, often for want of memory "
        )
        return LoadFailed(f"{text}(last: {error})", f"{text}(last: {error.told})")

    async def _fence(self, hold: HoldTimer, state: JobState, place: Placement) -> None:
        self._state, self._place = state, place
        await self._written(
            hold,
            lambda: self._tools.table.advance(
                self._claim, state, node=place.node, node_name=place.node_name, replica_index=place.replica_index
            ),
        )

    async def _finish(self, hold: HoldTimer, loaded: Loaded, seconds: float) -> None:
        self._ending = True
        progress = self.progress
        measured = Measured(progress.total_bytes, progress.moved, self._speed.whole, seconds)
        try:
            await self._written(hold, lambda: self._tools.table.finish(self._claim, loaded, measured))
        except StatementFailed as error:
            why = "its node was removed meanwhile" if error.refers_to_nothing else "the database did not take its row"
            text = f"{self._model.name} is loaded, but {why}"
            raise LoadFailed(f"{text}: {error}", text) from error
        name = self._tools.called(loaded.node) if self._place is None else self._place.node_name
        self.log.info("{model} is loaded on node {node}", model=self._model.name, node=name)

    async def _written(self, hold: HoldTimer, write: Callable[[], Awaitable[bool]]) -> None:
        """A fenced write, repeated while the database is away: a load outlives its restart."""
        while True:
            try:
                if not await write():
                    raise await self._lost()
                return
            except StoreUnavailable as error:
                hold.check()
                self.log.warn("the load of {model} waits: {error}", model=self._model.name, error=error)
                await self._pause(1.0)

    async def _lost(self) -> TakenOver | Marked:
        """Why a fenced write changed nothing: the cancel mark, or another owner."""
        row = await self._tools.table.read(self._claim.key)
        if row is not None and row.cancelled and row.attempt == self._claim.attempt:
            return Marked(row.cancel_reason)
        return TakenOver(self._model.name)

    async def _beat(self) -> None:
        if self._ending:
            return  # the row is about to say so itself
        staging = self._state is JobState.STAGING
        if staging:
            self._speed.saw(self._clock.seconds(), self.progress.moved)
        phase = "loading" if self._state is JobState.LOADING else self.progress.phase if staging else "waiting"
        try:
            told = await self._tools.table.beat(
                self._claim, self.progress, phase=phase, rate=self._speed.now if staging else None
            )
        except StoreUnavailable:
            return  # silence may cost us the job; the load itself needs no database
        if told is None and not self._ending and self._work is not None:
            self._taken = True
            self._work.cancel()
        elif told:
            self.cancel(told)

    async def _fail(self, error: LocalAIDistError, *, cramped: bool = False) -> None:
        """
        Leave no process without a replica, and the cause in the row; then raise the cause.

        Args:
            cramped: the node's disk is full: what was staged goes, since it would keep every other model out.
        """
        self._ending = True
        self.log.warn("loading {model} failed: {error}", model=self._model.name, error=error)
        await self._stop_started()
        try:
            if not await self._tools.table.fail(self._claim, encode_cause(error)):
                raise await self._lost()
        except StoreUnavailable as unavailable:
            self.log.warn("the failure could not be recorded: {error}", error=unavailable)
        place = self._place
        if place is not None and cramped:
            await remove_files(self._tools, self._model.name, place.node)
        raise error

    def _with_lacking(self, error: LoadFailed) -> LoadFailed:
        """The backend's own words, and which files it was not given because no frontend has them all."""
        if not self._claim.lacking or self._state is not JobState.LOADING:
            return error
        full, told = lacking_text(self._claim.lacking), lacking_told(self._claim.lacking)
        why = "no frontend has every file of it"
        return LoadFailed(f"{error} ({why}: {full})", f"{error.told} ({why}: {told})")

    def _over(self, error: HoldExpired) -> LoadFailed:
        """How far it came, and what kept it from going on."""
        lasted = self._clock.seconds() - self._begun
        text = f"{self._model.name}: {error} ({self._state.value}: "
        return LoadFailed(f"{text}{self.progress.summary(lasted)})", f"{text}{self.progress.summary_told(lasted)})")

    def _full(self, error: NoSpace) -> LoadFailed:
        """What the node would have needed, and what it had: it was chosen with enough room, so something else came."""
        node = "the node" if self._place is None else f"node {self._place.node_name}"
        need, came = format_size(self.progress.total_bytes), format_size(self.progress.bytes_sent)
        text = (
            f"the disk of {node} is full: {self._model.name} needs {need}, and 0 B were free after {came} of it "
            "had been sent; what came was removed"
        )
        return LoadFailed(f"{text} ({error})", f"{text} ({error.told})")

    async def _stop_started(self) -> None:
        """
        End the process that this attempt was given: no row would tell anybody of it.

        It ends while the job is still this attempt's: the next attempt is given the same process if it is there.
        """
        place = self._place
        if place is None or not self._address:
            return
        try:
            row = await self._tools.table.read(self._claim.key)
        except StoreUnavailable as error:
            self.log.warn("whose load of {model} it is, is unknown: {error}", model=self._model.name, error=error)
            return
        if row is not None and row.attempt == self._claim.attempt:
            await stop_process(self._tools, self._claim, place.node, place.replica_index, self._address)

    async def _clear_away(self, reason: str) -> NoReturn:
        self._ending = True
        self.log.info("the load of {model} was cancelled: {reason}", model=self._model.name, reason=reason)
        node = self._claim.node if self._place is None else self._place.node
        index = 0 if self._place is None else self._place.replica_index
        try:
            await clear_away(self._tools, self._claim, node, index)
        except StoreUnavailable as error:
            self.log.warn(
                "the cancelled load of {model} is left as it is: {error}", model=self._model.name, error=error
            )
        raise LoadCancelled(f"the load of {self._model.name} was cancelled: {reason}") from None

    async def _give_up(self) -> None:
        try:
            await self._tools.table.abandon(self._claim)
        except StoreUnavailable as error:
            self.log.info("the load of {model} is left as it is: {error}", model=self._model.name, error=error)

    def _remember(self, place: Placement, address: str) -> None:
        self._place, self._address = place, address
        self.progress.goes_on()

    def _pause(self, seconds: float) -> Deferred[Any]:
        return deferLater(self._clock, seconds)


def _is_process_gone(outcome: Outcome) -> bool:
    """Whether the process of the install has ended before LoadModel: its worker started anew while files came."""
    return isinstance(outcome, Answered) and outcome.answer is Answer.BACKEND_UNAVAILABLE
