"""The deadline that progress extends: pure arithmetic."""

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.staging.hold import CAP, STALL, Ended, start_hold
from localai_dist.units import HOUR, MINUTE

BASE = 25 * MINUTE


class HoldTests(SynchronousTestCase):
    def test_a_transfer_that_moves_bytes_outlives_the_base(self) -> None:
        """
        A load that makes progress every minute is still held two hours later (LOAD-1).
        """
        hold = start_hold(0.0, base=BASE)
        for minute in range(1, 121):
            hold = hold.observe(minute * MINUTE)
            self.assertIsNone(hold.ended(minute * MINUTE + 1))

    def test_silence_after_bytes_ends_within_one_stall_window(self) -> None:
        """
        Bytes and then silence are ended after one stall window, also inside the base (LOAD-1).
        """
        hold = start_hold(0.0, base=BASE).observe(10.0)
        self.assertIsNone(hold.ended(10.0 + STALL - 1))
        self.assertIs(hold.ended(10.0 + STALL), Ended.STALLED)

    def test_without_any_byte_the_base_counts(self) -> None:
        """
        An install that says nothing has the whole base (LOAD-1).
        """
        hold = start_hold(0.0, base=BASE)
        self.assertIsNone(hold.ended(BASE - 1))
        self.assertIs(hold.ended(BASE), Ended.STALLED)

    def test_a_byte_now_and_then_ends_at_the_cap(self) -> None:
        """
        Progress never moves the cap, so a trickle for ever ends after a day (LOAD-1).
        """
        hold = start_hold(0.0, base=BASE)
        now = 0.0
        while hold.ended(now) is None:
            hold = hold.observe(now)
            now += STALL - 1
        self.assertIs(hold.ended(now), Ended.CAPPED)
        self.assertLess(now, CAP + STALL)
        self.assertEqual(hold.deadline, CAP)

    def test_the_stall_window_is_never_longer_than_the_base(self) -> None:
        """
        A short base makes the stall window as short (LOAD-1).
        """
        hold = start_hold(0.0, base=10.0).observe(1.0)
        self.assertIs(hold.ended(11.0), Ended.STALLED)

    def test_children_inherit_the_cap(self) -> None:
        """
        The deadline handed to children is the cap, not the rolling expiry (LOAD-2).
        """
        hold = start_hold(100.0, base=BASE, cap=HOUR).observe(150.0)
        self.assertEqual(hold.deadline, 100.0 + HOUR)

    def test_a_silent_phase_of_known_length_is_granted(self) -> None:
        """
        Reading a model for an hour in silence is allowed when it was announced, but not beyond the cap.
        """
        hold = start_hold(0.0, base=BASE, cap=2 * HOUR).observe(60.0).extend(60.0, HOUR)
        self.assertIsNone(hold.ended(HOUR))
        self.assertEqual(hold.extend(60.0, 5 * HOUR).wake_at, 2 * HOUR)

    def test_extending_never_shortens(self) -> None:
        """
        A grant shorter than what is left changes nothing.
        """
        hold = start_hold(0.0, base=BASE)
        self.assertEqual(hold.extend(0.0, 1.0), hold)

    def test_observations_close_together_are_one(self) -> None:
        """
        At most one touch of the deadline per twentieth of the stall window (LOAD-3).
        """
        hold = start_hold(0.0, base=BASE).observe(100.0)
        self.assertIs(hold.observe(100.0 + STALL / 20 - 0.1), hold)
        self.assertIsNot(hold.observe(100.0 + STALL / 20), hold)

    def test_an_ended_hold_stays_ended(self) -> None:
        """
        Progress or a grant that comes too late revives nothing.
        """
        hold = start_hold(0.0, base=10.0)
        self.assertIs(hold.observe(10.0), hold)
        self.assertIs(hold.extend(10.0, 100.0), hold)

    @given(st.lists(st.floats(min_value=0, max_value=1000), max_size=50), st.floats(min_value=1, max_value=500))
    def test_whatever_is_observed(self, steps: list[float], base: float) -> None:
        """
        However progress comes, the hold ends by the cap and never later than one stall window after the last progress.
        """
        hold = start_hold(0.0, base=base, stall=50.0, cap=5000.0)
        now = 0.0
        for step in steps:
            now += step
            before = hold.ended(now)
            hold = hold.observe(now)
            self.assertEqual(hold.ended(now), before)
            self.assertLessEqual(hold.wake_at, max(now + 50.0, base))
            self.assertLessEqual(hold.wake_at, 5000.0)
