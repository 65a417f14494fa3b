"""
What every frontend looks after once a second: orphans, jobs that look for a frontend with their files, jobs whose model
is gone, and cancelled jobs whose owner is.

A look is one statement; the table has a row per running load.
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
        self._swept = tools.clock.seconds()
        self._loop = LoopingCall(lambda: Deferred.fromCoroutine(self.look()))
        self._loop.clock = tools.clock

    def start(self) -> None:
        """Begin to look."""
        done = self._loop.start(self._tools.settings.look, now=False)
        done.addErrback(lambda failure: self.log.failure("the lookout for load jobs stopped", failure))

    def stop(self) -> None:
        """Stop looking."""
        if self._loop.running:
            self._loop.stop()

    async def look(self) -> None:
        """One look; a database that does not answer is asked again at the next."""
        try:
            await self._sweep()
            for row in await self._tools.table.all():
                await self._see(row)
        except StoreError as error:
            self.log.info("load jobs were not looked after: {error}", error=error)

    async def _sweep(self) -> None:
        now = self._tools.clock.seconds()
        if now - self._swept >= self._tools.settings.sweep:
            self._swept = now
            await self._tools.table.sweep()
            await self._tools.endings.sweep()

    async def _see(self, row: JobRow) -> None:
        if row.cancelled and row.orphaned and row.key not in self._busy():
            await self._finish_cancelled(row)
        elif row.orphaned and self._tools.instance not in row.lacking and row.key not in self._busy():
            self._take(row)
        elif row.offered and self._tools.instance in row.lacking:
            await self.refuse_if_hopeless(row)

    async def refuse_if_hopeless(self, row: JobRow) -> None:
        """End an offered job that no frontend can run; the cause says who lacks what."""
        if row.unasked and row.offered_for < self._tools.settings.offer:
            return
        said = [f"frontend {name}: {why}" for name, why in sorted(row.lacking.items())]
        silent = [f"frontend {name} did not answer" for name in sorted(row.unasked)]
        cause = LoadFailed(f"no frontend has the files of {row.key}: " + "; ".join(said + silent))
        await self._tools.table.refuse(row, encode_cause(cause))

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
