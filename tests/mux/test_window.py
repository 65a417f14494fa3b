"""Credit arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux.errors import LocalProtocolError, StreamViolation, WindowOverflow
from localai_dist.mux.frame import MAX_LENGTH
from localai_dist.mux.window import CREDIT_GRAIN, SPEC_WINDOW, ReceiveWindow, SendWindow, WindowPool
from localai_dist.units import KiB, MiB


class SendWindowTests(SynchronousTestCase):
    def test_credit_is_never_overdrawn(self) -> None:
        """Sending more than the peer allowed is our own mistake, named."""
        window = SendWindow()
        window.use(SPEC_WINDOW)
        self.assertRaises(LocalProtocolError, window.use, 1)

    def test_overflow(self) -> None:
        """Credit beyond what a length can name is the peer's violation (MUX-1)."""
        window = SendWindow(MAX_LENGTH - 10)
        window.granted(10)
        self.assertRaises(WindowOverflow, window.granted, 1)


class ReceiveWindowTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pool = WindowPool(1 * MiB)
        self.window = ReceiveWindow(self.pool, 16 * MiB)

    def test_overrun(self) -> None:
        """Data past the window is the peer's violation (MUX-1)."""
        self.window.received(SPEC_WINDOW)
        self.assertRaises(StreamViolation, self.window.received, 1)

    def test_credit_follows_consumption(self) -> None:
        """Credit is owed for what was consumed, not for what arrived."""
        self.window.received(100 * KiB)
        self.assertFalse(self.window.grant_due)
        self.window.consumed(CREDIT_GRAIN - 1, 0.0, None)
        self.assertFalse(self.window.grant_due)
        self.window.consumed(1, 0.0, None)
        self.assertTrue(self.window.grant_due)
        self.assertEqual(self.window.take_grant(), CREDIT_GRAIN)
        self.assertEqual(self.window.allowed, SPEC_WINDOW - 100 * KiB + CREDIT_GRAIN)

    def test_growth_is_told_first(self) -> None:
        """A widened window counts only once the peer was told (MUX-7)."""
        self.window.grow(512 * KiB)
        self.assertRaises(StreamViolation, self.window.received, SPEC_WINDOW + 1)
        self.assertEqual(self.window.take_grant(), 256 * KiB)
        self.window.received(512 * KiB)

    def test_fast_streams_are_credited_in_larger_pieces(self) -> None:
        """Of a fast stream with a large window a grant is worth a millisecond of its rate, never the whole window."""
        window = ReceiveWindow(WindowPool(16 * MiB), 16 * MiB)
        window.grow(4 * MiB)
        window.take_grant()
        now = 0.0
        for rate, grain in ((12e6, CREDIT_GRAIN), (100e6, 100_000), (2e9, 256 * KiB), (12e6, CREDIT_GRAIN)):
            until = now + 0.03
            while now < until:
                now += 20 * KiB / rate
                window.received(20 * KiB)
                window.consumed(20 * KiB, now, None)
                if window.grant_due:
                    window.take_grant()
            self.assertAlmostEqual(window.grain, grain, delta=2 * KiB)

    def test_growth_comes_from_the_pool(self) -> None:
        """Windows together grow by no more than the pool, and give it back (MUX-7)."""
        other = ReceiveWindow(self.pool, 16 * MiB)
        self.window.grow(1 * MiB)
        other.grow(1 * MiB)
        self.assertEqual((self.window.size, other.size, self.pool.free), (1 * MiB, 512 * KiB, 0))
        self.window.release()
        self.assertEqual(self.pool.free, 768 * KiB)

    def test_grows_when_it_limits_the_sender(self) -> None:
        """A window used up within four round trips doubles; a slow one does not (MUX-7)."""
        self.window.received(SPEC_WINDOW)
        self.window.consumed(0, 0.0, 0.1)
        self.window.consumed(SPEC_WINDOW, 0.39, 0.1)
        self.assertEqual(self.window.size, 2 * SPEC_WINDOW)
        self.window.take_grant()
        self.window.received(2 * SPEC_WINDOW)
        self.window.consumed(2 * SPEC_WINDOW, 10.0, 0.1)
        self.assertEqual(self.window.size, 2 * SPEC_WINDOW)

    @given(st.lists(st.tuples(st.sampled_from("rcgw"), st.integers(0, 400 * KiB)), max_size=60))
    def test_books_balance(self, steps: list[tuple[str, int]]) -> None:
        """Whatever happens, allowed, unread and owed add up to the window, and none is negative."""
        pool = WindowPool(1 * MiB)
        window = ReceiveWindow(pool, 16 * MiB)
        for what, count in steps:
            if what == "r":
                window.received(min(count, window.allowed))
            elif what == "c":
                window.consumed(min(count, window.unread), 0.0, 1.0)
            elif what == "g":
                window.take_grant()
            else:
                window.grow(window.size + count)
            self.assertEqual(window.allowed + window.unread + window.owed, window.size)
            self.assertGreaterEqual(min(window.allowed, window.unread, window.owed, pool.free), 0)
            self.assertEqual(pool.free + window.size - SPEC_WINDOW, 1 * MiB)
