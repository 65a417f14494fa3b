"""Every offset, hash and size lie an uploader can tell, over HTTP: the stated answer, and nothing corrupted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from localai_dist.units import KiB
from tests.worker.test_server import ServerCase

TOTAL = 64 * KiB + 11
OURS = hashlib.shake_128(b"ours").digest(TOTAL)
OTHER = hashlib.shake_128(b"other").digest(TOTAL)
HALF = 32 * KiB
PATH = "/v1/files/models/tiny/sub/a%20b.gguf"


@dataclass(frozen=True)
class Put:
    """
    One PUT.

    Attributes:
        range: the header's value, or None.
        sha256: the header's value, or None.
        fingerprint: the header's value, or None.
    """

    range: str | None
    sha256: str | None
    body: bytes
    fingerprint: str | None = None


def piece(start: int, end: int = TOTAL, *, of: bytes = OURS, sha: bytes | None = None, total: int = TOTAL) -> Put:
    """The bytes of ``of`` from ``start`` to before ``end``, called what ``sha`` hashes to."""
    return Put(f"bytes {start}-{end - 1}/{total}", digest(of if sha is None else sha), of[start:end])


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


NOTHING: list[Put] = []
PART = [piece(0, HALF)]
PART_OF_OTHER = [piece(0, HALF, of=OTHER)]
WHOLE = [piece(0)]
WHOLE_OTHER = [piece(0, of=OTHER)]

KEPT, WIPED = "kept", "wiped"

LIES: list[tuple[str, list[Put], Put, int, str | bytes]] = [
    # what it is about, what is there, the lie, the answer, what is there afterwards
    ("an offset into nothing", NOTHING, piece(1), 416, KEPT),
    ("a far offset into nothing", NOTHING, piece(TOTAL - 1), 416, KEPT),
    ("from 0 again", PART, piece(0), 416, KEPT),
    ("an offset before the end", PART, piece(HALF - 1), 416, KEPT),
    ("an offset behind the end", PART, piece(HALF + 1), 416, KEPT),
    ("another hash at the right offset", PART, piece(HALF, sha=OTHER), 409, WIPED),
    ("another hash at a wrong offset", PART, piece(HALF + 1, sha=OTHER), 409, WIPED),
    ("a larger total", PART, piece(HALF, total=TOTAL + 1), 409, WIPED),
    ("a smaller total", PART, piece(HALF, TOTAL - 1, total=TOTAL - 1), 409, WIPED),
    ("a larger total from 0", PART, piece(0, HALF, total=TOTAL + 1), 308, OURS[:HALF]),
    ("another file from 0", PART, piece(0, HALF, of=OTHER), 308, OTHER[:HALF]),
    ("the rest of ours over another's beginning", PART_OF_OTHER, piece(HALF), 409, WIPED),
    ("other bytes as the rest", PART, Put(piece(HALF).range, digest(OURS), OTHER[HALF:]), 400, WIPED),
    ("other bytes as the whole", NOTHING, Put(piece(0).range, digest(OURS), OTHER), 400, WIPED),
    ("a body shorter than its range", PART, Put(piece(HALF).range, digest(OURS), OURS[HALF:-1]), 400, KEPT),
    ("a body longer than its range", PART, Put(piece(HALF, TOTAL - 1).range, digest(OURS), OURS[HALF:]), 400, KEPT),
    ("no hash", PART, Put(piece(HALF).range, None, OURS[HALF:]), 400, KEPT),
    ("a hash that is none", PART, Put(piece(HALF).range, "g" * 64, OURS[HALF:]), 400, KEPT),
    ("a short hash", PART, Put(piece(HALF).range, digest(OURS)[:-1], OURS[HALF:]), 400, KEPT),
    *(
        (f"the range {text!r}", PART, Put(text, digest(OURS), OURS[HALF:]), 400, KEPT)
        for text in (
            "bytes */5",
            "bytes -1-5/10",
            "bytes 5-4/10",
            "bytes 0-10/10",
            f"bytes {HALF}-{TOTAL - 1}/*",
            f"items {HALF}-{TOTAL - 1}/{TOTAL}",
            f"bytes {HALF}-{TOTAL - 1}",
            f"bytes {10**19}-{10**19 + 1}/{10**20}",
            "bytes ١-٢/٣",
            "",
        )
    ),
    ("a wrong fingerprint", PART, replace(piece(HALF, sha=OTHER), fingerprint=digest(b"")), 409, WIPED),
    (
        "the fingerprint of another total",
        PART,
        replace(piece(HALF, total=TOTAL + 1), fingerprint=digest(OURS)),
        409,
        WIPED,
    ),
    ("a fingerprint that is none", PART, replace(piece(HALF), fingerprint="none"), 400, KEPT),
    (
        "another file over ours by the fingerprint",
        PART,
        replace(piece(HALF, of=OTHER), fingerprint=digest(OURS)),
        400,
        WIPED,
    ),
    ("a fingerprint for the hash", NOTHING, piece(0, sha=b"a fingerprint"), 400, WIPED),
    ("ours again over ours", WHOLE, piece(0), 200, KEPT),
    ("the rest of ours over ours", WHOLE, piece(HALF), 200, KEPT),
    ("a piece of another over ours", WHOLE, piece(HALF, of=OTHER), 409, KEPT),
    ("another total over ours", WHOLE, piece(HALF, total=TOTAL + 1), 409, KEPT),
    ("the beginning of another over ours", WHOLE, piece(0, HALF, of=OTHER), 308, OTHER[:HALF]),
    ("the rest of ours over another", WHOLE_OTHER, piece(HALF), 409, KEPT),
    ("a whole that is not what it says", WHOLE, Put(None, digest(OTHER), OURS[:-1]), 400, KEPT),
]


class LiesTests(ServerCase):
    timeout = 60

    async def put(self, put: Put) -> tuple[int, dict[str, str], bytes]:
        names = ("X_Content_SHA256", "Content_Range", "X_Fingerprint_SHA256")
        headers = dict(zip(names, (put.sha256, put.range, put.fingerprint), strict=True))
        return await self.ask(
            "PUT", PATH, put.body, **{name: text for name, text in headers.items() if text is not None}
        )

    def on_disk(self) -> bytes | None:
        return self.local.read_bytes() if self.local.exists() else None

    async def test_every_lie(self) -> None:
        """
        Each lie gets the answer the wire document states and leaves what it states; the honest upload that follows
        ends with the right file (LOAD-10, LOAD-16).
        """
        self.local = self.folder / "models" / "tiny" / "sub" / "a b.gguf"
        for about, before, lie, status, after in LIES:
            for left in self.local.parent.glob("*") if self.local.parent.exists() else ():
                left.unlink()
            for put in before:
                await self.put(put)
            was = self.on_disk()
            got, headers, _ = await self.put(lie)
            self.assertEqual(got, status, about)
            there = self.on_disk()
            if after is KEPT:
                self.assertEqual(there, was, about)
            else:
                self.assertEqual(there, None if after is WIPED else after, about)
            if got == 416:
                self.assertEqual(headers["x-file-size"], str(len(was or b"")), about)
            await self.upload_honestly(about)

    async def upload_honestly(self, about: str) -> None:
        """As the document says: ask, go on there or start again from 0."""
        for _ in range(4):
            status, headers, _ = await self.ask("HEAD", PATH)
            if headers.get("x-content-sha256") == digest(OURS):
                break
            ours = status == 200 and headers.get("x-target-sha256") == digest(OURS)
            ours = ours and headers.get("x-target-size") == str(TOTAL)
            await self.put(piece(int(headers["x-file-size"]) if ours else 0))
        self.assertEqual(self.on_disk(), OURS, about)
        self.assertEqual(headers.get("x-content-sha256"), digest(OURS), about)

    async def test_two_at_once_are_one_after_the_other(self) -> None:
        """
        Eight uploads of one file at once: the bytes of the first are what the next one sees; one file, right (LOAD-10).
        """
        self.local = self.folder / "models" / "tiny" / "sub" / "a b.gguf"
        puts = [Deferred.fromCoroutine(self.put(piece(0, HALF))) for _ in range(8)]
        got: list[Any] = await gatherResults(puts, consumeErrors=True)
        self.assertEqual(sorted(status for status, _, _ in got), [308] + [416] * 7)
        self.assertEqual({headers["x-file-size"] for _, headers, _ in got}, {str(HALF)})
        self.assertEqual(self.on_disk(), OURS[:HALF])
        ends = [Deferred.fromCoroutine(self.put(piece(HALF))) for _ in range(8)]
        got = await gatherResults(ends, consumeErrors=True)
        self.assertEqual([status for status, _, _ in got], [200] * 8)
        self.assertEqual(self.on_disk(), OURS)
