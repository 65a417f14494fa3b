"""One frontend's life among the others: registered, beating, swept when it dies, gone when it stops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from localai_dist.ids import InstanceId
from localai_dist.registry.instances import Instances
from localai_dist.store.errors import StoreError
from localai_dist.units import MINUTE

BEAT = 5.0  # s, the default; source: design §7
STOP_WITHIN = 5.0  # s


def retention(grace: float) -> float:
    """How long departures are kept (s). Source: design §7, max(5 min, 5 × grace)."""
    return max(5 * MINUTE, 5 * grace)


class Membership(Service):
    """
    The beat of one frontend.

    Call ``await join()`` before serving: it registers and fails loudly. Then start the service.

    Args:
        id: this frontend.
        address: ``host:port`` other frontends dial, or None.
        grace: the reconnect grace (s); departures are kept for ``retention(grace)``.
        reclaim: awaited after this frontend was swept and registered again: claim every tunnel held.
        beat: seconds between beats.
        each_beat: awaited at the end of each beat: own what is held and counts as lost.
    """

    _log = Logger()

    def __init__(
        self,
        instances: Instances,
        *,
        id: InstanceId,
        address: str | None,
        version: str,
        peer_token_hash: str,
        grace: float,
        reclaim: Callable[[], Awaitable[None]],
        clock: Any,
        beat: float = BEAT,
        each_beat: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._instances = instances
        self._id = id
        self._address = address
        self._version = version
        self._peer_token_hash = peer_token_hash
        self._retention = retention(grace)
        self._reclaim = reclaim
        self._each_beat = each_beat or _nothing
        self._clock = clock
        self._every = beat
        self._loop = LoopingCall(self._tick)
        self._loop.clock = clock
        self._joined = False
        self._reclaim_owed = False
        self.problem: str | None = None
        self.problem_told: str | None = None

    async def join(self) -> None:
        """
        Publish this frontend, which has just started: it holds no tunnel yet, whatever the rows say.

        Raises:
            StoreUnavailable: the database can't answer; the frontend must not serve.
        """
        lost = await self._instances.arrive(self._id, self._address, self._version, self._peer_token_hash)
        if lost:
            self._log.info("a former process of this frontend held the tunnels of {lost}", lost=lost)
        self._joined = True

    def startService(self) -> None:
        """Begin to beat."""
        super().startService()
        self._loop.start(self._every, now=False).addErrback(
            lambda failure: self._log.failure("the membership beat stopped", failure)
        )

    def stopService(self) -> Deferred[None]:
        """Stop beating and leave, within five seconds; a database that is away does not hold the stop up."""
        super().stopService()
        if self._loop.running:
            self._loop.stop()
        leaving = Deferred.fromCoroutine(self._leave())
        leaving.addTimeout(STOP_WITHIN, self._clock, lambda result, seconds: None)
        return leaving

    async def _leave(self) -> None:
        if not self._joined:
            return
        self._joined = False
        try:
            await self._instances.deregister(self._id)
        except StoreError as error:
            self._log.warn("could not leave the membership: {error}", error=str(error))

    def _tick(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self.beat())

    async def beat(self) -> None:
        """One beat; a database that does not answer is told in ``problem`` and tried again at the next."""
        try:
            beat = await self._instances.beat(self._id, retention=self._retention)
            if beat.swept or beat.lost:
                self._log.info(
                    "swept frontends {swept}; tunnels lost with their owner: {lost}", swept=beat.swept, lost=beat.lost
                )
            if not beat.alive and self.running:
                self._reclaim_owed = True
                self._log.warn("this frontend was taken for dead; registering again")
                await self._instances.register(self._id, self._address, self._version, self._peer_token_hash)
            if self._reclaim_owed:
                await self._reclaim()
                self._reclaim_owed = False
            await self._each_beat()
        except StoreError as error:
            if self.problem is None:
                self._log.warn("the membership beat failed: {error}", error=str(error))
            self.problem, self.problem_told = str(error), error.told
        else:
            self.problem = self.problem_told = None


async def _nothing() -> None:
    """What a frontend without tunnels does at each beat."""
