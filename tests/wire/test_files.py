"""The file protocol as values."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.wire.files import (
    AlreadyWhole,
    BadPut,
    ContentRange,
    Decision,
    InvalidHash,
    InvalidRange,
    PutRequest,
    StartOver,
    Stored,
    Target,
    WritePiece,
    WriteWhole,
    WrongOffset,
    decide_put,
    parse_content_range,
    parse_sha256,
)

OURS, OTHER = "a" * 64, "b" * 64


def piece(start: int, end: int, total: int = 100, sha256: str | None = OURS) -> PutRequest:
    return PutRequest(ContentRange(start, end, total), sha256, end - start + 1)


class RangeTests(SynchronousTestCase):
    @given(st.integers(0, 10**15), st.integers(0, 10**15), st.integers(1, 10**15))
    def test_round_trip(self, start: int, more: int, after: int) -> None:
        """A range printed and parsed is the same range."""
        range_ = ContentRange(start, start + more, start + more + after)
        self.assertEqual(parse_content_range(str(range_)), range_)
        self.assertEqual(range_.length, more + 1)
        self.assertEqual(range_.finishes, after == 1)

    def test_refused(self) -> None:
        """A range that can't be read, or contradicts itself, is refused."""
        for text in (
            "",
            "bytes 0-1",
            "bytes 5-4/10",
            "bytes 0-10/10",
            "items 0-1/2",
            "bytes -1-2/3",
            "bytes 0-1/*",
            "x" * 999,
        ):
            with self.assertRaises(InvalidRange):
                parse_content_range(text)

    def test_hash(self) -> None:
        """A hash is 64 hexadecimal digits, in either case."""
        self.assertEqual(parse_sha256(" " + "AB" * 32), "ab" * 32)
        for text in ("", "ab", "g" * 64, "a" * 65):
            with self.assertRaises(InvalidHash):
                parse_sha256(text)


class DecidePutTests(SynchronousTestCase):
    """Every kind of file on the disk against every kind of PUT."""

    absent = Stored()
    partial = Stored(40, True, Target(OURS, 100))
    other_partial = Stored(40, True, Target(OTHER, 100))
    other_size = Stored(40, True, Target(OURS, 200))
    no_total = Stored(40, True, Target(OURS))
    all_there = Stored(100, True, Target(OURS, 100))
    whole = Stored(100, True, None, OURS)
    other_whole = Stored(100, True, None, OTHER)
    unknown = Stored(100, True)

    def check(self, stored: Stored, request: PutRequest, decision: Decision) -> None:
        self.assertEqual(decide_put(stored, request), decision)

    def test_first_piece(self) -> None:
        """A first piece starts a new file, unless the beginning of this very file is there: then it says how much."""
        first = piece(0, 49)
        fresh = WritePiece(first.range, Target(OURS, 100), fresh=True)  # type: ignore[arg-type]
        for stored in (self.absent, self.other_partial, self.other_size, self.other_whole, self.unknown):
            self.check(stored, first, fresh)
        self.check(self.partial, first, WrongOffset(40))
        self.check(self.no_total, first, WrongOffset(40))
        self.check(self.all_there, first, WrongOffset(100))
        self.check(Stored(0, True, Target(OURS, 100)), first, fresh)

    def test_later_piece(self) -> None:
        """A later piece goes on exactly where the file ends; over another file's beginning the client starts again."""
        at_40, at_50 = piece(40, 99), piece(50, 99)
        go_on = WritePiece(at_40.range, Target(OURS, 100), fresh=False)  # type: ignore[arg-type]
        self.check(self.partial, at_40, go_on)
        self.check(self.no_total, at_40, go_on)
        self.check(self.partial, at_50, WrongOffset(40))
        self.check(self.absent, at_40, WrongOffset(0))
        self.check(self.other_partial, at_40, StartOver(wipe=True))
        self.check(self.other_size, at_40, StartOver(wipe=True))
        self.check(self.all_there, at_40, WrongOffset(100))

    def test_a_file_begun_under_its_fingerprint(self) -> None:
        """
        Pieces sent before the hash was found are gone on from once it is; another file's or total's are not (LOAD-10).
        """
        at_40, target = piece(40, 99), Target(OURS, 100)
        found = replace(at_40, fingerprint=OTHER)
        go_on = WritePiece(at_40.range, target, fresh=False)  # type: ignore[arg-type]
        self.check(self.other_partial, found, replace(go_on, renamed=True))
        self.check(self.partial, found, go_on)
        self.check(self.other_partial, replace(piece(50, 99), fingerprint=OTHER), WrongOffset(40))
        self.check(self.other_partial, replace(piece(0, 49), fingerprint=OTHER), WrongOffset(40))
        self.check(Stored(40, True, Target(OTHER, 200)), found, StartOver(wipe=True))
        self.check(Stored(40, True, Target("c" * 64, 100)), found, StartOver(wipe=True))

    def test_a_finished_file_is_never_wiped_by_a_resume(self) -> None:
        """A resume over a finished file of another hash is told to start again, and the file stays until then."""
        self.check(self.other_whole, piece(100, 199, 200), StartOver(wipe=False))
        self.check(self.unknown, piece(40, 99), StartOver(wipe=False))

    def test_already_there(self) -> None:
        """The very file that is there already is not written again."""
        self.check(self.whole, piece(0, 49), AlreadyWhole())
        self.check(self.whole, PutRequest(None, OURS, 100), AlreadyWhole())
        self.check(self.whole, PutRequest(None, OURS, None), AlreadyWhole())
        self.check(self.whole, PutRequest(None, OURS, 7), WriteWhole(OURS, 7))

    def test_whole(self) -> None:
        """Without a range the file is written anew, with or without a hash to compare."""
        self.check(self.partial, PutRequest(None, None, 5), WriteWhole(None, 5))
        self.check(self.absent, PutRequest(None, OURS, None), WriteWhole(OURS, None))

    def test_bad(self) -> None:
        """A range that doesn't fit the body, or has no hash with it, is refused."""
        self.assertIsInstance(decide_put(self.absent, PutRequest(ContentRange(0, 9, 10), OURS, 9)), BadPut)
        self.assertIsInstance(decide_put(self.absent, PutRequest(ContentRange(0, 9, 10), None, 10)), BadPut)
