"""
Models on demand: whoever needs one waits here; one load per model runs in the whole cluster.

The job's row is the truth. The frontend that claims it runs the load, if it has the files; the others look at the row
twice a second. A row that is gone means success, and the replica's row is its record, or that it was cancelled. Orphans
are taken over by whoever has waiters for them, else by the lookout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from localai_dist.catalog.model import ModelConfig
from localai_dist.ids import InstanceId, NodeId
from localai_dist.loads.errors import LoadFailed, Offered, StillLoading, TakenOver
from localai_dist.loads.fleet import Fleet
from localai_dist.loads.flight import CutShort, Flight, WaitOver
from localai_dist.loads.job import LoadJob
from localai_dist.loads.lack import Resort
from localai_dist.loads.leftovers import Leftovers
from localai_dist.loads.lookout import Lookout
from localai_dist.loads.retire import Retirement
from localai_dist.loads.rows import Claim, JobRow, PoolLike
from localai_dist.loads.speed import eta_range
from localai_dist.loads.status import JobState, LoadStatus
from localai_dist.loads.tables import Tables, make_tables
from localai_dist.loads.tools import ConnectBackend, LoadSettings, StagerLike, Tools, VerbsLike
from localai_dist.loads.unload import Unloaded, stop_strays, unload_replicas
from localai_dist.loads.watch import Seen, watch
from localai_dist.reach import Unreached
from localai_dist.registry.errors import registry_or_unreached
from localai_dist.registry.records import Replica
from localai_dist.scheduler.placement import Need
from localai_dist.store.errors import StoreUnavailable

ROUNDS = 3
"""How often a load may succeed and leave nothing to use before the waiters are told."""


class Loads:
    """
    The loads of this frontend.

    Args:
        pool: the database.
        fleet: the nodes, as the registry has them.
        verbs: control verbs of nodes.
        stager: model files onto nodes.
        connect_backend: a channel to a backend process.
        clock: timers.
        instance: this frontend.
        settings: the numbers.
        find_model: a model of this frontend by name: for taking over a load nobody here waits for, and for telling
            replicas of older configurations.
        is_gone: whether this frontend has no file of a model, not even a broken one: for ending its load, and for
            stopping its replicas when no other frontend serves it. None: whatever can't be found is gone.
        tables: what stands for the database's own; None = the pool's.
        called: what people call a node.
    """

    log = Logger()

    def __init__(
        self,
        pool: PoolLike,
        fleet: Fleet,
        verbs: VerbsLike,
        stager: StagerLike,
        connect_backend: ConnectBackend,
        *,
        clock: IReactorTime,
        instance: InstanceId,
        settings: LoadSettings,
        find_model: Callable[[str], ModelConfig | None] = lambda name: None,
        is_gone: Callable[[str], bool] | None = None,
        tables: Tables | None = None,
        called: Callable[[NodeId], str] = str,
    ) -> None:
        self._find_model = find_model
        self._is_gone = is_gone or (lambda name: find_model(name) is None)
        tables = tables or make_tables(pool, instance, settings)
        self._tools = Tools(
            instance=instance,
            table=tables.jobs,
            endings=tables.endings,
            fleet=fleet,
            verbs=verbs,
            stager=stager,
            connect_backend=connect_backend,
            clock=clock,
            settings=settings,
            called=called,
        )
        self._flights: dict[str, Flight] = {}
        self._jobs: dict[str, LoadJob] = {}
        self._lookout = Lookout(self._tools, find_model=find_model, busy=self._driven, adopt=self._adopt)
        self._retirement = Retirement(self._tools, find_model, self._is_gone, tables.retirement)
        self._leftovers = Leftovers(self._tools, self._is_gone)
        self._stopping = False
        self.on_ended: Callable[[str], None] = lambda model: None
        """Told the model of each load that ran here, when it ended or was offered: the other frontends may look."""

    def start(self) -> None:
        """Begin to look after orphans, and after replicas of older configurations."""
        self._lookout.start()
        self._retirement.start()

    async def stop(self) -> None:
        """End the loads that run here, so that another frontend takes them over at once; waiters are told."""
        self._stopping = True
        self._lookout.stop()
        self._retirement.stop()
        self._leftovers.stop()
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
            LoadFailed: with the real cause; the next request starts afresh. ``LoadCancelled`` when it was cancelled.
            NoPlace: no node can take the model; the text says what each lacks.
            Unreached: the nodes that could can't be reached, or the database did not answer.
        """
        until = None if wait is None else self._tools.clock.seconds() + wait
        while True:
            replica = await self._warm(model)
            if replica is not None:
                return replica
            flight = self._flights.get(model.name) or self._prepare(model)
            left = None if until is None else max(0.0, until - self._tools.clock.seconds())
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
        with registry_or_unreached():
            row = await self._tools.table.read(model_name)
        return None if row is None else await self._told(row)

    async def jobs(self) -> list[LoadStatus]:
        """Every load of every frontend, the oldest first; raises as ``status``."""
        with registry_or_unreached():
            rows = await self._tools.table.all()
        return [await self._told(row) for row in rows]

    async def cancel(self, model_name: str, reason: str) -> bool:
        """
        Cancel the load of a model, wherever it runs; False = none runs. The transfer stops within two seconds.

        Raises:
            Unreached: the database did not answer.
        """
        with registry_or_unreached():
            marked = await self._tools.table.cancel(model_name, reason)
        job = self._jobs.get(model_name)
        if marked and job is not None:
            job.cancel(reason)
        return marked

    def look_now(self, model_name: str) -> None:
        """Somebody says that a load left the frontend that ran it: whoever waits here for it looks at once."""
        flight = self._flights.get(model_name)
        if flight is not None:
            flight.nudge()
        self._lookout.wake()

    def look_all_now(self) -> None:
        """Any load may have left its frontend unheard: everybody who waits here looks at once."""
        for flight in list(self._flights.values()):
            flight.nudge()
        self._lookout.wake()

    def models_changed(self, gone: Collection[str] = ()) -> None:
        """
        The models of this frontend changed: a load that runs here and whose model is gone is cancelled.

        Args:
            gone: those that were there before; what their failed loads left on workers is removed.
        """
        if not self._stopping:
            self._leftovers.deleted(gone)
        for name, job in list(self._jobs.items()):
            if job.was_served and self._find_model(name) is None and self._is_gone(name):
                cancelling = Deferred.fromCoroutine(self.cancel(name, "its model file was removed"))
                cancelling.addErrback(lambda failure: self.log.warn("not cancelled: {error}", error=failure.value))

    async def unload(self, model_name: str, node: NodeId | None = None) -> list[Unloaded]:
        """
        Stop the replicas of a model, on ``node`` or everywhere; empty when there were none.

        A row goes only after its process is really gone; an absent process is gone. On a ``node`` without a row the
        worker is asked, and what a failed load left there is stopped; the process of a load that runs is left alone.

        Raises:
            UnloadFailed: a process is not gone; the rest was unloaded.
            Unreached: a worker could not be asked, or the database did not answer.
        """
        with registry_or_unreached():
            gone = await unload_replicas(self._tools.verbs, self._tools.fleet.replicas, model_name, node)
            if gone or node is None or await self._loads_on(model_name, node):
                return gone
            return await stop_strays(self._tools.verbs, model_name, node, self._tools.called)

    async def _loads_on(self, model_name: str, node: NodeId) -> bool:
        row = await self._tools.table.read(model_name)
        return row is not None and row.state is not JobState.FAILED and row.node == node

    async def _warm(self, model: ModelConfig) -> Replica | None:
        with registry_or_unreached():
            return await self._tools.fleet.warm(Need(model.name, model.revision))

    async def _wait(self, flight: Flight, seconds: float | None) -> Replica:
        waiter = flight.join()
        if flight.course is None:
            self._begin(flight)  # only now: its ending must find this waiter, however soon it comes
        timer: IDelayedCall | None = None
        if seconds is not None:
            timer = self._tools.clock.callLater(seconds, flight.give_up, waiter)
        try:
            return await waiter
        except WaitOver:
            raise StillLoading(await self._known(flight.model)) from None
        except CancelledError:
            raise CutShort(self._meanwhile(flight)) from None
        finally:
            if timer is not None and timer.active():
                timer.cancel()

    def _meanwhile(self, flight: Flight) -> str:
        """What is known of the load here and now; a wait that was cancelled asks nobody."""
        job = self._jobs.get(flight.model.name)
        status = flight.seen if job is None else job.status
        return "" if status is None else status.sentence_told()

    async def _told(self, row: JobRow) -> LoadStatus:
        """The row's status, with the range that earlier loads on that node tell; without it while nobody knows."""
        if not row.node or row.state not in (JobState.STAGING, JobState.LOADING):
            return row.status
        try:
            past = await self._tools.endings.recent(row.node)
        except StoreUnavailable:
            return row.status
        loading = row.state is JobState.LOADING
        left = 0 if loading else max(0, row.status.total_bytes - row.status.bytes_sent)
        loading_for = row.in_state_for if loading else 0.0
        told = eta_range(past, left=left, total=row.status.total_bytes, loading_for=loading_for)
        return replace(row.status, eta_range=told)

    async def _known(self, model: ModelConfig) -> LoadStatus:
        try:
            found = await self.status(model.name)
        except Unreached:
            found = None
        return found or LoadStatus(model.name, JobState.PENDING.value)

    def _prepare(self, model: ModelConfig) -> Flight:
        if self._stopping:
            raise LoadFailed("this frontend is stopping; ask another one")
        flight = self._flights[model.name] = Flight(model, self._tools.clock.seconds())
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
                try:
                    ended += await self._run(model, claim)
                    continue
                except Offered:  # watched from now on: a claim would begin a refused job anew
                    if await self._is_last_resort(model.name):
                        continue
            seen = await watch(self._tools, flight)
            if seen is Seen.NOBODY_WAITS:
                return None
            ended += seen is Seen.GONE

    async def _claim(self, model: ModelConfig) -> Claim | None:
        with registry_or_unreached():
            return await self._tools.table.claim(model) or await self._last_resort(model)

    async def _last_resort(self, model: ModelConfig) -> Claim | None:
        """The claim of a job that this frontend lacks something for, when no other one is the better choice."""
        row = await self._tools.table.read(model.name)
        if row is None or row.resort(self._tools.instance, self._tools.settings.offer) is not Resort.RUN:
            return None
        return await self._tools.table.claim_lacking(model, row)

    async def _run(self, model: ModelConfig, claim: Claim) -> bool:
        """Run the attempt; False when it was not needed after all, or was taken over; raises ``Offered`` too."""
        # Another frontend's load may have ended between our look and our claim: its row is gone, its replica is there.
        if await self._warm(model) is not None:
            await self._tools.table.drop(claim)
            return False
        job = LoadJob(self._tools, model, claim, was_served=self._find_model(model.name) is not None)
        self._jobs[model.name] = job
        try:
            await job.run()
        except TakenOver:
            self.log.info("the load of {model} goes on at another frontend", model=model.name)
            return False
        finally:
            del self._jobs[model.name]
            self.on_ended(model.name)
        return True

    async def _is_last_resort(self, name: str) -> bool:
        """Whether an offered job is this frontend's all the same; one that is nobody's is refused."""
        row = await self._tools.table.read(name)
        if row is None:
            return False
        await self._lookout.refuse_if_hopeless(row)
        return row.resort(self._tools.instance, self._tools.settings.offer) is Resort.RUN

    def _driven(self) -> Collection[str]:
        return self._flights.keys()

    def _adopt(self, model: ModelConfig) -> None:
        if not self._stopping and model.name not in self._flights:
            self._begin(self._prepare(model))
