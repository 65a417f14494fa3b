"""Durations, sizes and shares, in and out of text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist import units
from localai_dist.errors import InvalidQuantity


class DurationTests(SynchronousTestCase):
    """``1h30m``."""

    def test_values(self) -> None:
        """Each unit, and their combinations."""
        for text, seconds in [
            ("0", 0.0),
            ("90s", 90.0),
            ("15m", 900.0),
            ("1h30m", 5400.0),
            ("500ms", 0.5),
            ("250us", 0.00025),
            ("250µs", 0.00025),
            ("1ns", 1e-9),
            ("2d", 172800.0),
            (" 1.5s ", 1.5),
        ]:
            self.assertAlmostEqual(units.parse_duration(text), seconds, places=12)

    def test_malformed(self) -> None:
        """A number without a unit is a guess, and is refused like any other text."""
        for text in ("", "15", "m", "15 m", "-5s", "5s!", "1h-3m", "1,5s"):
            with self.assertRaises(InvalidQuantity):
                units.parse_duration(text)

    def test_format(self) -> None:
        """Durations print as a person writes them."""
        for seconds, text in [
            (0.35, "350ms"),
            (0, "0ms"),
            (42, "42s"),
            (900, "15m"),
            (5400, "1h30m"),
            (3661, "1h1m1s"),
        ]:
            self.assertEqual(units.format_duration(seconds), text)

    @given(st.integers(1, 10**7))
    def test_round_trip(self, seconds: int) -> None:
        """Whole seconds are read as they were printed."""
        self.assertEqual(units.parse_duration(units.format_duration(seconds)), seconds)


class SizeTests(SynchronousTestCase):
    """``12GiB``."""

    def test_values(self) -> None:
        """Decimal and binary units, a bare number, any case, a space before the unit."""
        for text, count in [
            ("0", 0),
            ("123", 123),
            ("123B", 123),
            ("12GB", 12 * 10**9),
            ("12GiB", 12 * 2**30),
            ("512 mib", 512 * 2**20),
            ("1.5KiB", 1536),
            ("2TB", 2 * 10**12),
            ("1TiB", 2**40),
            ("3kb", 3000),
            ("3MB", 3 * 10**6),
        ]:
            self.assertEqual(units.parse_size(text), count)

    def test_malformed(self) -> None:
        """Anything else is refused."""
        for text in ("", "GB", "-1GB", "1 G", "12XB", "1GB!"):
            with self.assertRaises(InvalidQuantity):
                units.parse_size(text)

    def test_format(self) -> None:
        """Sizes print in binary units, up to TiB."""
        for count, text in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (984 * 1024, "984.0 KiB"),
            (5 * 2**20, "5.0 MiB"),
            (4 * 2**30, "4.0 GiB"),
            (3 * 2**40, "3.0 TiB"),
            (5000 * 2**40, "5000.0 TiB"),
        ]:
            self.assertEqual(units.format_size(count), text)


class FractionTests(SynchronousTestCase):
    """``80%``."""

    def test_values(self) -> None:
        """A percentage or a plain number from 0 to 1."""
        for text, share in [("80%", 0.8), ("0.8", 0.8), ("0", 0.0), ("100%", 1.0), (" 1 ", 1.0)]:
            self.assertAlmostEqual(units.parse_fraction(text), share)

    def test_malformed(self) -> None:
        """Outside 0 to 100 %, or no number, is refused."""
        for text in ("", "%", "101%", "1.1", "-1%", "nan", "x"):
            with self.assertRaises(InvalidQuantity):
                units.parse_fraction(text)
