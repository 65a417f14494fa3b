"""Waiting with an end: a Deferred that fires later, and an awaitable that may take so long and no longer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from localai_dist.worker.errors import WorkerError

T = TypeVar("T")


class TooLate(WorkerError):
    """It took longer than it may."""


def after(clock: Any, seconds: float) -> Deferred[None]:
    """Fires with None after ``seconds``; cancelling it cancels the timer."""
    waiting: Deferred[None] = Deferred(lambda _: timer.cancel())
    timer = clock.callLater(seconds, waiting.callback, None)
    return waiting


async def bounded(work: Awaitable[T], seconds: float, clock: Any, text: str) -> T:
    """
    The result of ``work``, which is cancelled when it takes longer than ``seconds``.

    Raises:
        TooLate: with ``text``.
    """
    running = _started(work)
    late = False

    def give_up() -> None:
        nonlocal late
        late = True
        running.cancel()

    timer = clock.callLater(seconds, give_up)
    try:
        return await running
    except CancelledError:
        if late:
            raise TooLate(text) from None
        raise
    finally:
        if timer.active():
            timer.cancel()


async def patient(work: Awaitable[T], over: Callable[[float], bool], every: float, clock: Any, text: str) -> T:
    """
    The result of ``work``, which is cancelled once ``over``, asked every so often, says so.

    Args:
        over: from the seconds that were waited so far.
        every: seconds between two questions.

    Raises:
        TooLate: with ``text``, the seconds filled in.
    """
    running = _started(work)
    waited = 0.0
    late = False
    timer: Any = None

    def look() -> None:
        nonlocal waited, late, timer
        waited += every
        if over(waited):
            late = True
            running.cancel()
        else:
            timer = clock.callLater(every, look)

    timer = clock.callLater(every, look)
    try:
        return await running
    except CancelledError:
        if late:
            raise TooLate(text.format(waited)) from None
        raise
    finally:
        if timer.active():
            timer.cancel()


def _started(work: Awaitable[T]) -> Deferred[T]:
    if isinstance(work, Deferred):
        return work

    async def waited() -> T:
        return await work

    return Deferred.fromCoroutine(waited())


def quiet(failure: Failure) -> None:
    """Errback for a Deferred that was cancelled because nobody wants it any more."""
    failure.trap(CancelledError)
