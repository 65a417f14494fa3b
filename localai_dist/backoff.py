"""How long to wait before the next attempt: doubling, capped, half of it jitter; chance is passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """
    Delays that double from ``first`` to ``cap``; half of each is fixed, half random.

    Attributes:
        first: the delay of attempt 1 before jitter (s).
        cap: no delay is longer (s).

    Source: wire contract §1 (500 ms doubling to 30 s for a worker's redial).
    """

    first: float = 0.5
    cap: float = 30.0

    def delay(self, attempt: int, chance: float) -> float:
        """
        Seconds to wait before attempt number ``attempt + 1``.

        Args:
            attempt: failed attempts so far, from 1.
            chance: a number from 0 to 1; the caller's randomness.
        """
        full = min(self.cap, self.first * 2.0 ** min(max(attempt, 1) - 1, 62))
        return full / 2 + full / 2 * chance
