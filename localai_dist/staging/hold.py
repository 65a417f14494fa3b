"""
The deadline of a cold load, which progress extends: silence ends a load, size does not, the cap always does.

Rules:

1. A hold starts with ``base`` seconds. Until the first byte moves (an install) that is all it has.
2. Each observed progress moves the expiry to ``stall`` seconds from now. Bytes and then silence end within one stall
   window; a transfer that moves bytes outlives the base.
3. The cap is fixed when the hold starts. Nothing moves it, and it is the deadline that children inherit: the rolling
   expiry would leave them a few milliseconds.
4. ``extend`` grants a silent phase of known length (the backend reads its model) and never shortens the hold.
5. Observations closer together than a twentieth of the stall window are one observation.

Source: design §7 (numbers), LOAD-1 to LOAD-3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from localai_dist.units import HOUR, MINUTE

STALL: float = 5 * MINUTE
"""Silence that ends a load (s)."""

CAP: float = 24 * HOUR
"""No load takes longer (s)."""

_TOUCHES_PER_STALL = 20


class Ended(Enum):
    """Why a hold is over."""

    STALLED = "stalled"
    CAPPED = "capped"


@dataclass(frozen=True, slots=True)
class Hold:
    """
    One load's deadline, as a value; every change makes a new one. All instants are on the caller's clock (s).

    Attributes:
        stall: silence that ends it once bytes have moved (s).
        expiry: when it ends unless progress is observed.
        cap_at: when it ends in any case.
        observed_at: the last progress that counted, or None.
    """

    stall: float
    expiry: float
    cap_at: float
    observed_at: float | None = None

    @property
    def deadline(self) -> float:
        """The instant that children of the load inherit: the cap, never the rolling expiry."""
        return self.cap_at

    @property
    def wake_at(self) -> float:
        """When to look again whether it is over."""
        return min(self.expiry, self.cap_at)

    def observe(self, now: float) -> Hold:
        """The hold after progress at ``now``."""
        if self.ended(now) is not None:
            return self
        if self.observed_at is not None and now - self.observed_at < self.stall / _TOUCHES_PER_STALL:
            return self
        return replace(self, expiry=min(now + self.stall, self.cap_at), observed_at=now)

    def extend(self, now: float, seconds: float) -> Hold:
        """The hold with at least ``seconds`` from ``now``, as far as the cap allows."""
        if self.ended(now) is not None:
            return self
        return replace(self, expiry=min(max(self.expiry, now + seconds), self.cap_at))

    def ended(self, now: float) -> Ended | None:
        """Whether it is over at ``now``, and why."""
        if now >= self.cap_at:
            return Ended.CAPPED
        return Ended.STALLED if now >= self.expiry else None


def start_hold(now: float, *, base: float, stall: float = STALL, cap: float = CAP) -> Hold:
    """
    A hold that starts at ``now``.

    Args:
        base: seconds before the first progress.
        stall: silence that ends it (s); never longer than the base.
        cap: the longest it can be (s); never shorter than the base.
    """
    stall = min(stall, base)
    cap = max(cap, base)
    return Hold(stall=stall, expiry=now + base, cap_at=now + cap)
