"""Work that several callers wait for at once: it goes on while one of them is left, and is told to stop after that."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.worker.errors import NotWanted

T = TypeVar("T")
_log = Logger()


class Shared(Generic[T]):
    """
    One piece of work under way.

    Work that can't be cancelled in its middle, because a thread or a lock is in it, looks at ``unwanted`` where it can
    stop, and ends with ``NotWanted`` there. Until then nobody should join it any more.

    Attributes:
        unwanted: every caller left before it ended.
    """

    def __init__(self) -> None:
        self.unwanted = False
        self._waiters: list[Deferred[T]] = []

    def begin(self, work: Callable[[], Coroutine[Any, Any, T]], ended: Callable[[], None] = lambda: None) -> None:
        """Start it, once somebody has joined; ``ended`` is called before anybody is told its result."""
        Deferred.fromCoroutine(work()).addBoth(self._end, ended)

    def join(self) -> Deferred[T]:
        """Its result, for one more caller; cancelling it takes only this caller away."""
        waiter: Deferred[T] = Deferred(self._leave)
        self._waiters.append(waiter)
        return waiter

    def stop(self) -> None:
        """Nobody wants it any more, whoever waits."""
        self.unwanted = True

    def check(self) -> None:
        """
        Where the work can stop.

        Raises:
            NotWanted: every caller left.
        """
        if self.unwanted:
            raise NotWanted("stopped: whoever asked for it is gone")

    def _leave(self, waiter: Deferred[T]) -> None:
        self._waiters = [other for other in self._waiters if other is not waiter]
        if not self._waiters:
            self.unwanted = True

    def _end(self, result: T | Failure, ended: Callable[[], None]) -> None:
        ended()
        waiters, self._waiters = self._waiters, []
        if isinstance(result, Failure):
            if not waiters and result.check(NotWanted) is None:
                _log.warn("what nobody waits for any more failed: {why}", why=result.value)
            for waiter in waiters:
                waiter.errback(result)
            return
        for waiter in waiters:
            waiter.callback(result)
