"""The delay cap and the transport limit."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux.pacing import (
    BASE_PERIOD,
    CAP_MIN,
    CAP_START,
    CAP_STEP,
    LIMIT_MAX,
    LIMIT_MIN,
    DelayCap,
    TransportLimit,
)
from localai_dist.units import KiB, MiB


class DelayCapTests(SynchronousTestCase):
    def measure(self, cap: DelayCap, at: float, round_trip: float, frame_time: float = 0.0) -> None:
        cap.pong_received(cap.ping_sent(at), at + round_trip, frame_time)

    def test_grows_without_queue_and_shrinks_with_one(self) -> None:
        """No delay above the base opens the cap, a queue closes it down to its minimum."""
        cap = DelayCap()
        self.measure(cap, 0.0, 0.020)
        self.assertGreater(cap.cap, CAP_START)
        for number in range(10):
            self.measure(cap, 0.1 * number, 0.080)
        self.assertEqual(cap.cap, CAP_MIN)
        self.assertEqual(cap.base, 0.020)

    def test_one_slow_answer_is_no_queue(self) -> None:
        """A single late answer among quick ones, as a busy host gives, does not shrink the cap."""
        cap = DelayCap()
        for number in range(20):
            before = cap.cap
            late = number % 3 == 2
            self.measure(cap, 0.1 * number, 0.200 if late else 0.001)
            self.assertEqual(cap.cap > before, not late)
            self.assertGreaterEqual(cap.cap, before)

    def test_grows_gently_near_the_target(self) -> None:
        """With a little delay the cap grows by a step, not by a quarter; an old good measurement does not let it."""
        cap = DelayCap()
        self.measure(cap, 0.0, 0.020)
        before = cap.cap
        self.measure(cap, 0.1, 0.023)
        self.assertEqual(cap.cap, before + max(CAP_STEP, before // 16))
        before = cap.cap
        self.measure(cap, 0.2, 0.026)
        self.assertEqual(cap.cap, before)

    def test_rate_of_arrival(self) -> None:
        """Two answered pings tell how fast bulk arrives; a few bytes between them, or a time without, say nothing."""
        cap = DelayCap()

        def answered(at: float, more: int) -> None:
            value = cap.ping_sent(at)
            cap.bulk_sent(more)
            cap.pong_received(value, at + 0.020, 0.0)

        cap.bulk_sent(600 * KiB)
        for number in range(3):
            answered(0.05 * number, 600 * KiB)
        self.assertTrue(11e6 < cap.rate < 13e6, cap.rate)
        answered(0.15, 1 * KiB)
        answered(0.2, 0)
        self.assertEqual(cap.under_way, 0)
        self.assertTrue(8e6 < cap.rate < 13e6, cap.rate)
        known = cap.rate
        cap.bulk_sent(600 * KiB)
        self.measure(cap, 10.0, 0.020)
        self.assertEqual(cap.rate, known)

    def test_delay_that_is_not_ours(self) -> None:
        """A delay that stays at the smallest cap becomes the base, so that bulk does not starve behind it."""
        cap = DelayCap()
        self.measure(cap, 0.0, 0.001)
        for number in range(60):
            self.measure(cap, 0.1 * number, 0.050)
        self.assertAlmostEqual(cap.base or 0, 0.050)
        self.assertGreater(cap.cap, CAP_MIN)

    def test_target_grows_where_a_frame_takes_long(self) -> None:
        """On a link where one frame takes 6 ms, 12 ms of delay are no queue to flee from."""
        slow, fast = DelayCap(), DelayCap()
        for cap, frame_time in ((slow, 0.0065), (fast, 0.0)):
            self.measure(cap, 0.0, 0.020, frame_time)
            for number in range(1, 4):
                before = cap.cap
                self.measure(cap, 0.1 * number, 0.032, frame_time)
            self.assertEqual(cap.cap > before, cap is slow)

    def test_base_ages(self) -> None:
        """A route that became longer is the new base after two periods; each period starts carefully."""
        cap = DelayCap()
        self.measure(cap, 0.0, 0.010)
        self.measure(cap, BASE_PERIOD + 1, 0.050)
        self.assertEqual((cap.base, cap.cap), (0.010, CAP_MIN))
        self.measure(cap, 2 * BASE_PERIOD + 2, 0.050)
        self.assertAlmostEqual(cap.base or 0, 0.050)

    def test_under_way(self) -> None:
        """Credit and answered pings both say what has arrived; neither makes the count negative."""
        cap = DelayCap()
        cap.bulk_sent(CAP_START)
        self.assertFalse(cap.open)
        cap.bulk_credited(64 * KiB)
        self.assertTrue(cap.open)
        value = cap.ping_sent(0.0)
        cap.bulk_sent(10)
        cap.pong_received(value, 0.01, 0.0)
        self.assertEqual(cap.under_way, 10)
        cap.bulk_credited(64 * KiB)
        self.assertEqual(cap.under_way, 0)

    def test_a_larger_window_is_not_taken_for_arrival(self) -> None:
        """Credit that was the window growing lets little through, and the next answered ping sets the count right."""
        cap = DelayCap()
        first = cap.ping_sent(0.0)
        cap.bulk_sent(2 * MiB)
        second = cap.ping_sent(0.01)
        cap.bulk_sent(1 * MiB)
        cap.pong_received(first, 0.02, 0.0)
        cap.bulk_credited(4 * MiB)
        self.assertEqual(cap.under_way, 2 * MiB)
        for _ in range(3):
            cap.bulk_credited(4 * MiB)
        self.assertEqual(cap.under_way, 0)
        cap.pong_received(second, 0.03, 0.0)
        self.assertEqual(cap.under_way, 1 * MiB)

    def test_unknown_pong_is_ignored(self) -> None:
        """An answer to no ping of ours measures nothing; an answered ping settles the older ones."""
        cap = DelayCap()
        self.assertIsNone(cap.pong_received(99, 1.0, 0.0))
        first, second = cap.ping_sent(0.0), cap.ping_sent(0.1)
        self.assertAlmostEqual(cap.pong_received(second, 0.3, 0.0) or 0, 0.2)
        self.assertIsNone(cap.pong_received(first, 0.4, 0.0))
        self.assertEqual(cap.pings_out, 0)


class TransportLimitTests(SynchronousTestCase):
    def test_two_milliseconds_within_bounds(self) -> None:
        """The limit follows the drain rate, from 16 to 128 KiB; tiny drains say nothing."""
        limit = TransportLimit()
        limit.drained(100, 10.0)
        self.assertEqual(limit.rate, 0.0)
        limit.drained(64 * KiB, 0.0016)
        self.assertEqual(limit.limit, int(limit.rate * 0.002))
        limit.drained(64 * KiB, 1e-6)
        self.assertEqual(limit.limit, LIMIT_MAX)
        for _ in range(100):
            limit.drained(16 * KiB, 1.0)
        self.assertEqual(limit.limit, LIMIT_MIN)
        self.assertGreater(limit.frame_time, 0.5)

    def test_behind_a_proxy(self) -> None:
        """A transport that drains at once says little: the slower rate of the two sets the message size (MUX-15)."""
        limit = TransportLimit()
        limit.drained(64 * KiB, 1e-6)
        limit.arriving(12e6)
        self.assertEqual(limit.limit, 24_000)
        limit.drained(64 * KiB, 0.064)
        for _ in range(100):
            limit.drained(64 * KiB, 0.064)
        self.assertEqual(limit.limit, LIMIT_MIN)
