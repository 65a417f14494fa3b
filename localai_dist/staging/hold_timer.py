"""
A hold on a clock: runs a coroutine until it ends or the hold does.

The timer is lazy: progress moves a number, and the one delayed call looks at it when it fires.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from localai_dist.staging.errors import HoldExpired
from localai_dist.staging.hold import CAP, STALL, Ended, Hold, start_hold
from localai_dist.units import format_duration

T = TypeVar("T")


class HoldTimer:
    """One load's hold while it runs; whoever moves bytes calls ``observe``."""

    def __init__(self, clock: IReactorTime, *, base: float, stall: float = STALL, cap: float = CAP) -> None:
        self._clock = clock
        self._begun = clock.seconds()
        self._hold = start_hold(clock.seconds(), base=base, stall=stall, cap=cap)
        self._call: IDelayedCall | None = None
        self._work: Deferred[Any] | None = None
        self._ended: Ended | None = None
        self._cancelled = False

    @property
    def hold(self) -> Hold:
        """The value as it is now."""
        return self._hold

    @property
    def deadline(self) -> float:
        """The cap, an instant on the clock: what children inherit."""
        return self._hold.deadline

    def observe(self) -> None:
        """Progress was made just now."""
        self._hold = self._hold.observe(self._clock.seconds())
        self._rearm_if_sooner()

    def extend(self, seconds: float) -> None:
        """A silent phase of up to ``seconds`` begins."""
        self._hold = self._hold.extend(self._clock.seconds(), seconds)

    def check(self) -> None:
        """
        Raise if the work should have stopped: a cancelled call may end in any error of the network below it.

        Raises:
            HoldExpired: the hold ended.
            CancelledError: the caller cancelled.
        """
        if self._ended is not None:
            raise HoldExpired(self._why(self._ended))
        if self._cancelled:
            raise CancelledError

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """
        The result of ``work``, which is cancelled when the hold ends.

        Raises:
            HoldExpired: the hold ended first, whatever the work made of that.
            CancelledError: the caller cancelled, whatever the work made of that.
        """
        self._work = Deferred.fromCoroutine(work)
        outer: Deferred[T] = Deferred(self._cancel)
        self._work.addBoth(outer.callback)
        self._arm()
        try:
            result = await outer
        except Exception:
            self.check()
            raise
        finally:
            self._work = None
            self._disarm()
        self.check()
        return result

    def _cancel(self, _: Deferred[Any]) -> None:
        self._cancelled = True
        if self._work is not None:
            self._work.cancel()

    def _arm(self) -> None:
        delay = max(0.0, self._hold.wake_at - self._clock.seconds())
        self._call = self._clock.callLater(delay, self._look)

    def _disarm(self) -> None:
        if self._call is not None and self._call.active():
            self._call.cancel()
        self._call = None

    def _rearm_if_sooner(self) -> None:
        # The first byte shortens the base to one stall window; later observations only move the expiry away.
        if self._call is not None and self._call.active() and self._hold.wake_at < self._call.getTime():
            self._disarm()
            self._arm()

    def _look(self) -> None:
        self._ended = self._hold.ended(self._clock.seconds())
        if self._ended is None:
            self._arm()
        elif self._work is not None:
            self._work.cancel()

    def _why(self, ended: Ended) -> str:
        """What ended it, and the time that really applied: cap, base, stall window or announced silence."""
        hold = self._hold
        if ended is Ended.CAPPED:
            cap = format_duration(hold.cap_at - self._begun)
            return f"deadline exceeded: the load reached the cap of {cap}, which no progress moves"
        if hold.observed_at is None:
            return f"deadline exceeded: no progress within {format_duration(hold.expiry - self._begun)}"
        return f"deadline exceeded: no progress for {format_duration(hold.expiry - hold.observed_at)}"
