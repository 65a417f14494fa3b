"""
What every frontend looks after: orphans, jobs that look for a frontend with their files, and cancelled jobs whose owner
is gone.

A look is one statement; the table has a row per running load. While there are any, or somebody here waits for one, a
look is taken once a second, else every five; whoever lets go of a load says so over the bus, which is a look at once.
An orphan has been silent for five seconds before it is one, so the slow looks delay no take-over.

Source: LOAD-6, BR-105.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from localai_dist.catalog.model import ModelConfig
from localai_dist.loads.cancel import clear_away
from localai_dist.loads.cause import encode_cause
from localai_dist.loads.errors import LoadFailed
from localai_dist.loads.lack import Resort, lacking_text, lacking_told
from localai_dist.loads.rows import JobRow
from localai_dist.loads.tools import Tools
from localai_dist.store.errors import StoreError


class Lookout:
    """
    The looks of one frontend.

    Args:
        tools: the tables and the clock.
        find_model: a model of this frontend by name.
        busy: the models whose load somebody here drives or waits for.
        adopt: drive the load of a model that nobody drives.
    """

    log = Logger()

    def __init__(
        self,
        tools: Tools,
        *,
        find_model: Callable[[str], ModelConfig | None],
        busy: Callable[[], Collection[str]],
        adopt: Callable[[ModelConfig], None],
    ) -> None:
        self._tools = tools
        self._find_model = find_model
        self._busy = busy
        self._adopt = adopt
        self._swept = self._forgot = self._looked = tools.clock.seconds()
        self._rows = 0
        self._looking = self._again = False
        self._loop = LoopingCall(self._tick)
        self._loop.clock = tools.clock

    def start(self) -> None:
        """Begin to look."""
        done = self._loop.start(self._tools.settings.look, now=False)
        done.addErrback(lambda failure: self.log.failure("the lookout for load jobs stopped", failure))

    def stop(self) -> None:
        """Stop looking."""
        if self._loop.running:
            self._loop.stop()

    def wake(self) -> None:
        """There may be something to see: look now, or once more if a look is under way."""
        if self._loop.running:
            done = Deferred.fromCoroutine(self.look())
            done.addErrback(lambda failure: self.log.failure("a look at the load jobs failed", failure))

    async def look(self) -> None:
        """One look, and another if there was a reason for one meanwhile."""
        self._again = True
        if self._looking:
            return
        self._looking = True
        try:
            while self._again:
                self._again = False
                await self._look()
        finally:
            self._looking = False

    def _tick(self) -> Deferred[None] | None:
        due = self._looked + self._tools.settings.idle_look
        if not self._rows and not self._busy() and self._tools.clock.seconds() < due:
            return None
        return Deferred.fromCoroutine(self.look())

    async def _look(self) -> None:
        self._looked = self._tools.clock.seconds()
        try:
            await self._sweep()
            rows = await self._tools.table.all()
            self._rows = len(rows)
            for row in rows:
                await self._see(row)
        except StoreError as error:  # asked again at the next look
            self.log.info("load jobs were not looked after: {error}", error=error)

    async def _sweep(self) -> None:
        now = self._tools.clock.seconds()
        if self._rows and now - self._swept >= self._tools.settings.sweep:
            self._swept = now
            await self._tools.table.sweep()
        if now - self._forgot >= self._tools.settings.forget:
            self._forgot = now
            await self._tools.endings.sweep()

    async def _see(self, row: JobRow) -> None:
        mine = row.key in self._busy()
        if not row.orphaned:
            return
        if row.cancelled:
            if not mine:
                await self._finish_cancelled(row)
        elif self._tools.instance in row.lacking:
            await self.refuse_if_hopeless(row)
            if not mine and self._resort(row) is Resort.RUN:
                self._take(row)
        elif not mine:
            self._take(row)

    async def refuse_if_hopeless(self, row: JobRow) -> None:
        """End a job that no frontend can run; the cause says who lacks what."""
        if self._resort(row) is Resort.REFUSE:
            what = f"no frontend has the files of {row.key}: "
            full, told = lacking_text(row.lacking, row.unasked), lacking_told(row.lacking, row.unasked)
            await self._tools.table.refuse(row, encode_cause(LoadFailed(what + full, what + told)))

    def _resort(self, row: JobRow) -> Resort:
        return row.resort(self._tools.instance, self._tools.settings.offer)

    def _take(self, row: JobRow) -> None:
        own = self._find_model(row.key)
        # The configuration travels with the job: a frontend needs the files, not the YAML. Its own comes first, since
        # a version that wrote the row may know less.
        model = own if own is not None and own.revision == row.revision else row.model()
        if model is not None:
            self.log.info("taking over the load of {model} from {owner}", model=row.key, owner=row.owner or "nobody")
            self._adopt(model)

    async def _finish_cancelled(self, row: JobRow) -> None:
        taken = await self._tools.table.claim_cancelled(row.key)
        if taken is not None:
            claim, replica_index = taken
            await clear_away(self._tools, claim, claim.node, replica_index)
