"""
Models on demand: whoever needs one waits here; one load per model runs in the whole cluster.

The job's row is the truth. The frontend that claims it runs the load; the others look at the row twice a second. A row
that is gone means success, and the replica's row is its record. Orphans are taken over by whoever has waiters for them,
else by the sweep.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import Logger

from localai_dist.catalog.model import ModelConfig
from localai_dist.ids import InstanceId, NodeId
from localai_dist.loads.cause import decode_cause
from localai_dist.loads.errors import LoadFailed, StillLoading, TakenOver
from localai_dist.loads.fleet import Fleet, NodesLike, PresenceLike, ReplicasLike, SchedulingLike
from localai_dist.loads.flight import Flight, WaitOver
from localai_dist.loads.job import LoadJob
from localai_dist.loads.sightings import Sightings
from localai_dist.loads.status import JobState, LoadStatus
from localai_dist.loads.table import Claim, JobRow, JobTable, PoolLike
from localai_dist.loads.tools import ConnectBackend, LoadSettings, StagerLike, Tools, VerbsLike
from localai_dist.loads.unload import Unloaded, unload_replicas
from localai_dist.reach import RegistryUnknown, Unreached
from localai_dist.registry.records import Replica
from localai_dist.scheduler.placement import Need
from localai_dist.store.errors import StoreError, StoreUnavailable

ROUNDS = 3
"""How often a load may succeed and leave nothing to use before the waiters are told."""


class _Seen(Enum):
    GONE = "gone"
    ORPHANED = "orphaned"
    NOBODY_WAITS = "nobody waits"


class Loads:
    """
    The loads of this frontend.

    Args:
        pool: the database.
        replicas, nodes, scheduling, ownership: the registry.
        verbs: control verbs of nodes.
        stager: model files onto nodes.
        connect_backend: a channel to a backend process.
        clock: timers.
        instance: this frontend.
        settings: the numbers.
        find_model: a model by name, for taking over a load nobody here waits for.
    """

    log = Logger()

    def __init__(
        self,
        pool: PoolLike,
        replicas: ReplicasLike,
        nodes: NodesLike,
        scheduling: SchedulingLike,
        ownership: PresenceLike,
        verbs: VerbsLike,
        stager: StagerLike,
        connect_backend: ConnectBackend,
        *,
        clock: IReactorTime,
        instance: InstanceId,
        settings: LoadSettings,
        find_model: Callable[[str], ModelConfig | None] = lambda name: None,
        table: JobTable | None = None,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._find_model = find_model
        self._fleet = Fleet(nodes, replicas, scheduling, ownership, settings.grace)
        self._table = table or JobTable(
            pool, instance, live_window=settings.live_window, orphan_after=settings.orphan_after
        )
        self._sightings = Sightings(clock)
        self._tools = Tools(
            table=self._table,
            fleet=self._fleet,
            verbs=verbs,
            stager=stager,
            connect_backend=connect_backend,
            clock=clock,
            settings=settings,
            sighted=self._sightings.saw,
        )
        self._flights: dict[str, Flight] = {}
        self._sweeping = LoopingCall(lambda: Deferred.fromCoroutine(self._sweep()))
        self._sweeping.clock = clock
        self._stopping = False

    def start(self) -> None:
        """Begin to look for orphans."""
        done = self._sweeping.start(self._settings.sweep, now=False)
        done.addErrback(lambda failure: self.log.failure("the sweep of load jobs stopped", failure))

    async def stop(self) -> None:
        """End the loads that run here, so that another frontend takes them over at once; waiters are told."""
        self._stopping = True
        if self._sweeping.running:
            self._sweeping.stop()
        courses = [flight.course for flight in self._flights.values() if flight.course is not None]
        for course in courses:
            course.cancel()
        await DeferredList(courses, consumeErrors=True)

    async def ensure(self, model: ModelConfig, *, wait: float | None = None) -> Replica:
        """
        A loaded replica of ``model``; one that is loaded already is returned at once.

        The load goes on when the caller leaves.

        Args:
            wait: seconds to wait for a load; None waits without end, 0 only sees to it that one runs.

        Raises:
            StillLoading: the wait is over.
            LoadFailed: with the real cause; the next request starts afresh.
            NoPlace: no node can take the model; the text says what each lacks.
            Unreached: the nodes that could can't be reached, or the database did not answer.
        """
        until = None if wait is None else self._clock.seconds() + wait
        while True:
            replica = await self._warm(model)
            if replica is not None:
                return replica
            flight = self._flights.get(model.name) or self._prepare(model)
            left = None if until is None else max(0.0, until - self._clock.seconds())
            try:
                replica = await self._wait(flight, left)
            except (CancelledError, StillLoading):
                raise
            except Exception:
                if flight.model.revision == model.revision:
                    raise
                continue  # the configuration changed while the older one failed to load
            if replica.config_revision == model.revision:
                return replica

    async def status(self, model_name: str) -> LoadStatus | None:
        """
        What is known about the load of a model; None when none runs.

        Raises:
            Unreached: the database did not answer.
        """
        try:
            row = await self._table.read(model_name)
        except StoreUnavailable as error:
            raise Unreached(RegistryUnknown(str(error))) from error
        return None if row is None else self._sightings.with_eta(row)

    async def jobs(self) -> list[LoadStatus]:
        """Every load of every frontend, the oldest first; raises as ``status``."""
        try:
            return [self._sightings.with_eta(row) for row in await self._table.all()]
        except StoreUnavailable as error:
            raise Unreached(RegistryUnknown(str(error))) from error

    async def unload(self, model_name: str, node: NodeId | None = None) -> list[Unloaded]:
        """
        Stop the replicas of a model, on ``node`` or everywhere; empty when there were none.

        A row goes only after its process is really gone; an absent process is gone.

        Raises:
            UnloadFailed: a process is not gone; the rest was unloaded.
            Unreached: a worker could not be asked, or the database did not answer.
        """
        try:
            return await unload_replicas(self._tools.verbs, self._fleet.replicas, model_name, node)
        except StoreUnavailable as error:
            raise Unreached(RegistryUnknown(str(error))) from error

    async def _warm(self, model: ModelConfig) -> Replica | None:
        try:
            return await self._fleet.warm(Need(model.name, model.revision))
        except StoreUnavailable as error:
            raise Unreached(RegistryUnknown(str(error))) from error

    async def _wait(self, flight: Flight, seconds: float | None) -> Replica:
        waiter = flight.join()
        if flight.course is None:
            self._begin(flight)  # only now: its ending must find this waiter, however soon it comes
        timer: IDelayedCall | None = None
        if seconds is not None:
            timer = self._clock.callLater(seconds, flight.give_up, waiter)
        try:
            return await waiter
        except WaitOver:
            raise StillLoading(await self._known(flight.model)) from None
        finally:
            if timer is not None and timer.active():
                timer.cancel()

    async def _known(self, model: ModelConfig) -> LoadStatus:
        try:
            found = await self.status(model.name)
        except Unreached:
            found = None
        return found or LoadStatus(model.name, JobState.PENDING.value)

    def _prepare(self, model: ModelConfig) -> Flight:
        if self._stopping:
            raise LoadFailed("this frontend is stopping; ask another one")
        flight = self._flights[model.name] = Flight(model)
        return flight

    def _begin(self, flight: Flight) -> None:
        flight.course = Deferred.fromCoroutine(self._fly(flight))
        flight.course.addErrback(lambda failure: self.log.failure("a load ended unheard", failure))

    async def _fly(self, flight: Flight) -> None:
        # Out of the table before anybody wakes: who comes after an ending starts afresh.
        try:
            replica = await self._drive(flight)
        except CancelledError:
            self._flights.pop(flight.model.name, None)
            flight.crashed(LoadFailed("this frontend is stopping; the load goes on at another one"))
        except Exception as error:  # noqa: BLE001 - handed to every waiter; the job has logged it
            self._flights.pop(flight.model.name, None)
            flight.crashed(error)
        else:
            self._flights.pop(flight.model.name, None)
            if replica is not None:
                flight.landed(replica)

    async def _drive(self, flight: Flight) -> Replica | None:
        """Until there is a replica: run the job, or watch whoever runs it. None when nobody waits any more."""
        model, ended = flight.model, 0
        while True:
            replica = await self._warm(model)
            if replica is not None:
                return replica
            if ended >= ROUNDS:
                raise LoadFailed(f"{model.name} was loaded {ROUNDS} times and was gone again each time")
            claim = await self._claim(model)
            if claim is not None:
                ended += await self._run(model, claim)
                continue
            seen = await self._watch(flight)
            if seen is _Seen.NOBODY_WAITS:
                return None
            ended += seen is _Seen.GONE

    async def _claim(self, model: ModelConfig) -> Claim | None:
        try:
            return await self._table.claim(model.name)
        except StoreUnavailable as error:
            raise Unreached(RegistryUnknown(str(error))) from error

    async def _run(self, model: ModelConfig, claim: Claim) -> bool:
        """Run the attempt; False when it was not needed after all, or was taken over."""
        # Another frontend's load may have ended between our look and our claim: its row is gone, its replica is there.
        if await self._warm(model) is not None:
            await self._table.drop(claim)
            return False
        try:
            await LoadJob(self._tools, model, claim).run()
        except TakenOver:
            self.log.info("the load of {model} goes on at another frontend", model=model.name)
            return False
        return True

    async def _watch(self, flight: Flight) -> _Seen:
        """Look at the row until it is gone or anybody's; raises the cause when that attempt failed."""
        attempt: int | None = None
        while True:
            if not flight.waiting:
                return _Seen.NOBODY_WAITS
            row = await self._glance(flight.model.name)
            if isinstance(row, _Seen):
                return row
            if row is not None:
                # A failure that was claimed anew before we looked has left its cause in the row.
                if row.state is JobState.FAILED or (attempt not in (None, row.attempt) and row.error):
                    raise decode_cause(row.error)
                if row.orphaned:
                    return _Seen.ORPHANED
                attempt = row.attempt
            await deferLater(self._clock, self._settings.poll)

    async def _glance(self, name: str) -> JobRow | _Seen | None:
        """The row; ``GONE`` when there is none, None when the database did not say."""
        try:
            row = await self._table.read(name)
        except StoreUnavailable:
            return None
        if row is not None:
            self._sightings.saw_row(row)
        return row or _Seen.GONE

    async def _sweep(self) -> None:
        try:
            await self._table.sweep()
            rows = await self._table.all()
        except StoreError as error:
            self.log.info("load jobs were not swept: {error}", error=error)
            return
        self._sightings.keep({row.key for row in rows})
        for row in rows:
            if row.orphaned and row.key not in self._flights and not self._stopping:
                self._adopt(row)

    def _adopt(self, row: JobRow) -> None:
        model = self._find_model(row.key)
        if model is not None:
            self.log.info("taking over the load of {model} from {owner}", model=row.key, owner=row.owner or "nobody")
            self._begin(self._prepare(model))
