"""Rates and estimates: pure."""

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.loads.speed import LEAST_HISTORY, PastLoad, Speed, eta, eta_range


class SpeedTests(SynchronousTestCase):
    def test_nothing_is_known_before_a_second(self) -> None:
        """
        A rate needs a second of sightings; before that there is none, and no estimate (LOAD-7).
        """
        speed = Speed()
        self.assertIsNone(speed.now)
        self.assertIsNone(speed.whole)
        speed.saw(0.0, 0)
        speed.saw(0.9, 500)
        self.assertIsNone(speed.now)
        speed.saw(2.0, 1000)
        self.assertEqual(speed.now, 500.0)
        self.assertEqual(speed.whole, 500.0)

    def test_the_rate_shown_is_that_of_the_last_seconds(self) -> None:
        """
        A transfer that stopped reads 0 after a while, not its average; the whole counts to the last byte (LOAD-18).
        """
        speed = Speed()
        for second in range(11):
            speed.saw(float(second), second * 100)
        self.assertEqual(speed.now, 100.0)
        for second in range(11, 31):
            speed.saw(float(second), 1000)
        self.assertEqual(speed.now, 0.0)
        self.assertEqual(speed.whole, 100.0)

    def test_sightings_are_bounded(self) -> None:
        """
        A day of heartbeats does not grow the measurement.
        """
        speed = Speed()
        for second in range(10_000):
            speed.saw(float(second), second)
        self.assertLess(len(speed._seen), 15)

    def test_eta(self) -> None:
        """
        No rate, no movement or nothing left: no estimate (LOAD-7).
        """
        self.assertEqual([eta(100, rate) for rate in (None, 0.0, 50.0)], [None, None, 2.0])
        self.assertIsNone(eta(0, 50.0))


class RangeTests(SynchronousTestCase):
    def test_without_a_history_nothing_is_told(self) -> None:
        """
        A range appears only once enough loads on that node were measured (LOAD-7).
        """
        past = [PastLoad(1000, 10.0, 5.0)] * (LEAST_HISTORY - 1)
        self.assertIsNone(eta_range(past, left=100, total=1000, loading_for=0.0))
        self.assertIsNone(eta_range(past * 9, left=0, total=0, loading_for=0.0))
        self.assertIsNotNone(eta_range([*past, *past], left=100, total=1000, loading_for=0.0))

    def test_what_it_is_made_of(self) -> None:
        """
        The bytes left at the rates of earlier loads, and their loading times in proportion to the size.
        """
        past = [PastLoad(1000, rate, 5.0) for rate in (10.0, 20.0, 50.0)]
        low, high = eta_range(past, left=1000, total=2000, loading_for=0.0) or (0.0, 0.0)
        self.assertAlmostEqual(low, 10.0 + 20.0 + 0.2 * 30.0)
        self.assertAlmostEqual(high, 10.0 + 50.0 + 0.8 * 50.0)

    def test_time_spent_loading_counts(self) -> None:
        """
        While the backend loads, the range shrinks, and never below zero.
        """
        past = [PastLoad(1000, 10.0, 5.0)] * 3
        self.assertEqual(eta_range(past, left=0, total=1000, loading_for=3.0), (2.0, 2.0))
        self.assertEqual(eta_range(past, left=0, total=1000, loading_for=30.0), (0.0, 0.0))

    @given(
        st.lists(
            st.builds(PastLoad, st.integers(1, 10**12), st.floats(0.1, 1e9), st.floats(0, 1e5)), min_size=3, max_size=20
        ),
        st.integers(0, 10**12),
        st.floats(0, 1e5),
    )
    def test_in_order_and_among_what_was_seen(self, past: list[PastLoad], left: int, loading_for: float) -> None:
        """
        The lower end is never above the upper one, and both lie among what the earlier loads say.
        """
        low, high = eta_range(past, left=left, total=10**12, loading_for=loading_for) or (1.0, 0.0)
        rests = [max(0.0, one.rest(left, 10**12) - loading_for) for one in past]
        slack = 1e-6 * max(1.0, max(rests))
        self.assertLessEqual(low, high + slack)
        self.assertLessEqual(min(rests) - slack, low)
        self.assertLessEqual(high, max(rests) + slack)
