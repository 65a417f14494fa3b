"""A coroutine that ends at an instant, and a pause; both on a clock that is passed in."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from localai_dist.loads.flight import CutShort
from localai_dist.reach import DeadlineExceeded, Unreached
from localai_dist.units import format_duration

T = TypeVar("T")


def within(
    clock: IReactorTime, deadline: float | None, work: Coroutine[Any, Any, T], *, granted: float | None = None
) -> Deferred[T]:
    """
    Run ``work``, cancelled at ``deadline`` (an instant of ``clock``, s; None is no deadline).

    Cancelling the answer cancels the work.

    Args:
        granted: what the caller asked for (s), so that the error says its own words; None: what is left of it now.

    Raises:
        Unreached: with ``DeadlineExceeded``, whatever else came of the cancelled work (design §2: tested first).
    """
    running = Deferred.fromCoroutine(work)
    if deadline is None:
        return running
    left = max(0.0, deadline - clock.seconds())
    late = False

    def expire() -> None:
        nonlocal late
        late = True
        running.cancel()

    timer = clock.callLater(left, expire)

    def settle(result: T | Failure) -> T | Failure:
        if timer.active():
            timer.cancel()
        if late and isinstance(result, Failure):
            text = f"the request's own deadline of {format_duration(left if granted is None else granted)} passed"
            if isinstance(result.value, CutShort) and result.value.meanwhile:
                text += f": {result.value.meanwhile}"
            return Failure(Unreached(DeadlineExceeded(text)))
        return result

    return running.addBoth(settle)


async def pause(clock: IReactorTime, seconds: float) -> None:
    """Wait ``seconds``; cancelling ends the wait at once."""
    over: Deferred[None] = Deferred()
    timer = clock.callLater(seconds, over.callback, None)
    try:
        await over
    finally:
        if timer.active():
            timer.cancel()
