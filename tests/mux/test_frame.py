"""Headers and classes: values in and out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.frame import HEADER_SIZE, MAX_LENGTH, VERSION, Flag, FrameType, decode, encode


class FrameTests(SynchronousTestCase):
    @given(
        st.sampled_from(FrameType), st.integers(0, 15).map(Flag), st.integers(0, MAX_LENGTH), st.integers(0, MAX_LENGTH)
    )
    def test_round_trip(self, type_: FrameType, flags: Flag, stream_id: int, length: int) -> None:
        """Every header is decoded to what was encoded (MUX-1)."""
        data = encode(type_, flags, stream_id, length)
        self.assertEqual(len(data), HEADER_SIZE)
        self.assertEqual(decode(b"xx" + data, 2), (VERSION, type_, flags, stream_id, length))

    def test_known_bytes(self) -> None:
        """The header is laid out as the specification draws it."""
        self.assertEqual(encode(FrameType.DATA, Flag.FIN, 5, 0x01020304), bytes.fromhex("000000040000000501020304"))
        self.assertEqual(encode(FrameType.GO_AWAY, Flag.NONE, 0, 1), bytes.fromhex("000300000000000000000001"))


class TrafficClassTests(SynchronousTestCase):
    def test_letters(self) -> None:
        """Each class has one letter, and nothing else is a letter."""
        for traffic in TrafficClass:
            self.assertIs(TrafficClass.from_letter(traffic.letter), traffic)
        for bad in ("", "x", "ci", "B"):
            self.assertRaises(ValueError, TrafficClass.from_letter, bad)
