"""
What nobody will come back for: unfinished files older than a day, and files of requests that nobody released.

All unfinished files together may hold half of the disk. Above that the oldest go sooner, but never the newest, and none
that was touched within the last hour: somebody may be about to go on with it.

Runs at the start and every quarter of an hour. Never follows a link, never touches what is being written.

Source: LOAD-16, LOAD-23; BR-095.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.units import HOUR, MINUTE
from localai_dist.wire.keys import Area
from localai_dist.worker import sums
from localai_dist.worker.containment import Areas
from localai_dist.worker.offload import Offload
from localai_dist.worker.request_files import RequestFiles
from localai_dist.worker.uploads import Uploads

EVERY = 15 * MINUTE
STALE = 24 * HOUR
"""Age of an unfinished file's last byte from which nobody is expected to go on with it (s)."""

RESUMED_WITHIN = 1 * HOUR
"""For so long after its last byte an unfinished file is in use: interruptions are outlived for as long (s)."""
SHARE = 0.5
"""How much of the disk unfinished files may hold together."""


class Sweeper:
    """
    Sweeps this worker's areas.

    Args:
        now: the wall clock (s), which files' ages are told by.
        most: bytes of unfinished files that may stay; None: ``SHARE`` of the disk the models are on.
        clock: times the rounds.
    """

    _log = Logger()

    def __init__(
        self,
        areas: Areas,
        *,
        uploads: Uploads,
        requests: RequestFiles,
        offload: Offload,
        clock: Any,
        now: Callable[[], float],
        most: int | None = None,
    ) -> None:
        self._areas = areas
        self._uploads = uploads
        self._requests = requests
        self._offload = offload
        self._now = now
        self._most = most
        self._round: Deferred[None] | None = None
        self._loop = LoopingCall(self._begin)
        self._loop.clock = clock

    def start(self) -> None:
        """The first round now, the next ones regularly."""
        self._loop.start(EVERY)

    async def stop(self) -> None:
        """No further round; waits for the one under way."""
        if self._loop.running:
            self._loop.stop()
        if self._round is not None:
            await self._round

    async def sweep(self) -> None:
        """One round."""
        for area in Area:
            for path in await self._offload(sums.unfinished, self._areas.root(area), self._now() - STALE):
                if await self._uploads.drop_unfinished(path, self._now() - STALE):
                    self._log.info("removed {file}: nobody went on with it for a day", file=str(path))
        await self._sweep_too_much()
        for owner in await self._requests.sweep():
            self._log.info("removed the files of request {request}: nobody released them", request=owner)

    async def _sweep_too_much(self) -> None:
        """The oldest unfinished files, as long as all of them hold too much."""
        roots = [self._areas.root(area) for area in Area]
        found = await self._offload(sums.partials, roots)
        most = self._most
        if most is None:
            most = int(SHARE * await self._offload(sums.volume_size, self._areas.root(Area.MODELS)))
        too_much = sum(size for _, size, _ in found) - most
        for touched, size, path in reversed(found[1:]):
            if too_much <= 0 or touched >= self._now() - RESUMED_WITHIN:
                return
            if await self._uploads.drop_unfinished(path, self._now() - RESUMED_WITHIN):
                too_much -= size
                self._log.info("removed {file}: unfinished files held too much of the disk", file=str(path))

    def _begin(self) -> Deferred[None]:
        self._round = Deferred.fromCoroutine(self.sweep())
        self._round.addErrback(self._failed)
        return self._round

    def _failed(self, failure: Failure) -> None:
        # The wrapper that keeps the rounds going: a disk that says no today may be fine in a quarter of an hour.
        self._log.failure("sweeping left-over files failed", failure)
