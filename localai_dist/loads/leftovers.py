"""
The unfinished files that failed loads of a model left on workers, removed once the model is deleted.

Whole files stay: only this frontend is asked whether the model is gone, and another one may still serve it.
A file may go and come back within a second, when an editor saves it: the deletion counts only if it has lasted for a
moment. Whoever loads the model then, here or elsewhere, is none of this: a load that runs is cancelled by its own
frontend, with what it left. A replica's files stay as long as it runs, and a worker that is away removes a partial file
by itself when it is a day old.

Source: LOAD-16.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.loads.cancel import remove_files
from localai_dist.loads.status import JobState
from localai_dist.loads.tools import Tools
from localai_dist.store.errors import StoreError


class Leftovers:
    """
    The removals of one frontend.

    Args:
        is_gone: whether this frontend has no file of a model, not even a broken one.
    """

    log = Logger()

    def __init__(self, tools: Tools, is_gone: Callable[[str], bool]) -> None:
        self._tools = tools
        self._is_gone = is_gone
        self._waiting: dict[str, Deferred[None]] = {}

    def deleted(self, models: Collection[str]) -> None:
        """These models were served, or their files tried to, and are gone."""
        for model in models:
            if model not in self._waiting:
                waiting = self._waiting[model] = Deferred.fromCoroutine(self._remove(model))
                waiting.addErrback(self._failed, model)
                waiting.addBoth(self._over, model)

    def stop(self) -> None:
        """Forget what waits: the other frontends see the deletion too, and after a day the workers do it."""
        for waiting in list(self._waiting.values()):
            waiting.cancel()

    async def _remove(self, model: str) -> None:
        await deferLater(self._tools.clock, self._tools.settings.retire)
        if not self._is_gone(model):
            return
        row = await self._tools.table.read(model)
        if row is not None and row.state is not JobState.FAILED:
            return
        for node in await self._tools.fleet.connected():
            await remove_files(self._tools, model, node, unfinished_only=True)

    def _over(self, result: Any, model: str) -> Any:
        self._waiting.pop(model, None)
        return result

    def _failed(self, failure: Failure, model: str) -> None:
        if failure.check(StoreError):
            self.log.info("what loads of {model} left stays: {error}", model=model, error=failure.value)
        elif not failure.check(CancelledError):
            self.log.failure("removing what loads of {model} left failed", failure, model=model)
