"""Everybody on this frontend who waits for one model, and the one course of events they wait for."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime

from localai_dist.catalog.model import ModelConfig
from localai_dist.loads.status import LoadStatus
from localai_dist.registry.records import Replica


class WaitOver(Exception):
    """A waiter's own time is up; the load goes on."""


class CutShort(CancelledError):
    """
    A wait for a load was cancelled; the load goes on.

    Attributes:
        meanwhile: how the load stood, as a client may be told; empty when nothing was known.
    """

    def __init__(self, meanwhile: str) -> None:
        super().__init__()
        self.meanwhile = meanwhile


class Flight:
    """
    The waiters of one model.

    They may come and go; the load does not care. All of them get the same ending.

    Attributes:
        model: the configuration that is loaded.
        began: when, on the frontend's clock (s).
        course: the coroutine that drives it, set by whoever starts it.
        seen: the load as another frontend's row last told it.
    """

    def __init__(self, model: ModelConfig, began: float = 0.0) -> None:
        self.model = model
        self.began = began
        self.course: Deferred[Any] | None = None
        self.seen: LoadStatus | None = None
        self._waiters: list[Deferred[Replica]] = []
        self._pausing: Deferred[None] | None = None

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiters)

    def join(self) -> Deferred[Replica]:
        """The ending, for one more waiter; cancelling it takes only this waiter away."""
        waiter: Deferred[Replica] = Deferred(self._forget)
        self._waiters.append(waiter)
        return waiter

    def give_up(self, waiter: Deferred[Replica]) -> None:
        """End one waiter's wait with ``WaitOver``; nothing if it has ended."""
        if waiter in self._waiters:
            self._forget(waiter)
            waiter.errback(WaitOver())

    def pause(self, clock: IReactorTime, seconds: float) -> Deferred[None]:
        """The wait of whoever drives this flight between two looks: ends after ``seconds``, or by ``nudge``."""
        pausing: Deferred[Any] = Deferred()
        self._pausing = pausing
        timer = clock.callLater(seconds, self.nudge)

        def over(result: Any) -> Any:
            if timer.active():
                timer.cancel()
            return result

        return pausing.addBoth(over)

    def nudge(self) -> None:
        """There may be something to see: look now."""
        pausing, self._pausing = self._pausing, None
        if pausing is not None and not pausing.called:
            pausing.callback(None)

    def landed(self, replica: Replica) -> None:
        """Wake everybody with the replica."""
        for waiter in self._take():
            waiter.callback(replica)

    def crashed(self, error: Exception) -> None:
        """Wake everybody with the cause."""
        for waiter in self._take():
            waiter.errback(error)

    def _take(self) -> list[Deferred[Replica]]:
        waiters, self._waiters = self._waiters, []
        return waiters

    def _forget(self, waiter: Deferred[Replica]) -> None:
        self._waiters = [other for other in self._waiters if other is not waiter]
