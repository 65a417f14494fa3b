"""The caller's deadline around a coroutine: the first thing that is tested, and never anybody else's fault."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from localai_dist.reach import DeadlineExceeded, Unreached

T = TypeVar("T")


async def before(
    deadline: float | None, work: Coroutine[Any, Any, T], *, clock: IReactorTime, text: str = DeadlineExceeded().text
) -> T:
    """
    What ``work`` returns, if it does so before ``deadline``.

    An expired deadline wins over whatever else went wrong meanwhile: a peer that failed because the time was up is not
    to blame. Cancelling this cancels ``work``.

    Args:
        deadline: an instant on ``clock`` (s), or None for none.
        work: a coroutine nobody has awaited yet.
        clock: whose seconds count.
        text: what the outcome says if the deadline passes.

    Raises:
        Unreached: ``DeadlineExceeded``, or what ``work`` raises.

    Source: wire contract §4c.
    """
    if deadline is None:
        return await work
    if clock.seconds() >= deadline:
        work.close()
        raise Unreached(DeadlineExceeded(text))
    running = Deferred.fromCoroutine(work)
    expired: list[bool] = []
    timer = clock.callLater(deadline - clock.seconds(), _expire, expired, running)
    try:
        return await running
    except Exception as error:
        # However the work took being cancelled for it, and whatever else failed by then, the deadline is the reason.
        if expired or (isinstance(error, Unreached) and clock.seconds() >= deadline):
            raise Unreached(DeadlineExceeded(text)) from error
        raise
    finally:
        if timer.active():
            timer.cancel()


def remaining(deadline: float | None, clock: IReactorTime, *, at_most: float) -> float:
    """Seconds until ``deadline``, at least 0 and at most ``at_most``."""
    return at_most if deadline is None else max(0.0, min(at_most, deadline - clock.seconds()))


def _expire(expired: list[bool], running: Deferred[Any]) -> None:
    expired.append(True)
    running.cancel()
