"""How long to wait before the next attempt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.backoff import Backoff


class BackoffTests(SynchronousTestCase):
    """Doubling, capped, half of it jitter."""

    def test_doubles_to_the_cap(self) -> None:
        """Without luck the delays are 0.5 s doubling to 30 s."""
        delays = [Backoff().delay(attempt, 1.0) for attempt in range(1, 9)]
        self.assertEqual(delays, [0.5, 1, 2, 4, 8, 16, 30, 30])

    def test_half_is_jitter(self) -> None:
        """Chance decides between half the delay and all of it."""
        self.assertEqual([Backoff().delay(3, chance) for chance in (0.0, 0.5, 1.0)], [1.0, 1.5, 2.0])

    @given(st.integers(-5, 10**9), st.floats(0, 1), st.floats(0.001, 10), st.floats(10, 1000))
    def test_bounds(self, attempt: int, chance: float, first: float, cap: float) -> None:
        """However many attempts failed, the delay is at least half the first and never above the cap."""
        delay = Backoff(first, cap).delay(attempt, chance)
        self.assertGreaterEqual(delay, first / 2)
        self.assertLessEqual(delay, cap)
