"""
The file protocol as values: ranges, headers, and what a worker does with one ``PUT``.

The worker's shell (``worker/uploads.py``) reads the disk into a ``Stored``, asks ``decide_put``, and does what the
decision says. The uploader uses ``ContentRange`` and the header names.

Differs from the original on purpose: the 409 means *restart from 0*; a finished file is never wiped by a resume; the
total is recorded, so two uploads with one hash and different sizes can't mix.

Source: docs/wire/files.md; surface §5.6, internals §4b.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TypeAlias

from localai_dist.errors import UserMistake
from localai_dist.units import MiB

FILES_PATH = "/v1/files/"
"""Followed by the key, for HEAD, PUT and GET."""
FILES_LIST_PATH = "/v1/files-list/"
"""Followed by a folder's key, for GET."""
FILES_TEMP_PATH = "/v1/files/temp"

FILE_SIZE = "X-File-Size"
"""Bytes on the worker's disk."""
LOCAL_PATH = "X-Local-Path"
"""Absolute path on the worker."""
CONTENT_SHA256 = "X-Content-SHA256"
"""Of a finished file (answer), or that the file is to have (request): 64 lower-case hexadecimal digits."""
TARGET_SHA256 = "X-Target-SHA256"
"""What an unfinished file is to have."""
TARGET_SIZE = "X-Target-Size"
"""Bytes an unfinished file is to have."""
FINGERPRINT = "X-Fingerprint-SHA256"
"""What earlier pieces said for the file's hash, which their sender had not found yet (request); that this worker knows
the header (answer to a HEAD of what is not there)."""
VERIFIED_BYTES = "X-Verified-Bytes"
"""How much of the file has been hashed so far, while that still runs: poll HEAD, it counts as progress."""
CONTENT_RANGE = "Content-Range"

PIECE_BYTES = 64 * MiB
"""The largest piece our uploader sends in one PUT; a worker takes larger ones."""

RESUME_INCOMPLETE = 308
"""More pieces are wanted; ``Range: bytes=0-n`` and ``X-File-Size`` tell how much is there."""

_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


class InvalidRange(UserMistake):
    """A ``Content-Range`` that can't be read or contradicts itself."""


class InvalidHash(UserMistake):
    """Text that is not a SHA-256 in hexadecimal."""


@dataclass(frozen=True, slots=True)
class ContentRange:
    """
    Which bytes of the whole one PUT carries.

    Attributes:
        start: first byte, from 0.
        end: last byte, included.
        total: bytes of the whole file.
    """

    start: int
    end: int
    total: int

    @property
    def length(self) -> int:
        """Bytes in the piece."""
        return self.end - self.start + 1

    @property
    def finishes(self) -> bool:
        """Whether the file is whole after this piece."""
        return self.end + 1 == self.total

    def __str__(self) -> str:
        """The header's value."""
        return f"bytes {self.start}-{self.end}/{self.total}"


def parse_content_range(text: str) -> ContentRange:
    """
    The range in ``text``, like ``bytes 0-1023/4096``.

    Raises:
        InvalidRange: another unit, no numbers, or start ≤ end < total does not hold.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise InvalidRange(f"{text[:80]!r} is not a Content-Range, want 'bytes start-end/total'")
    start, end, total = (int(number) for number in found.groups())
    if not start <= end < total:
        raise InvalidRange(f"{text[:80]!r} contradicts itself, want start <= end < total")
    return ContentRange(start, end, total)


def parse_sha256(text: str) -> str:
    """
    The SHA-256 in ``text``, in lower case.

    Raises:
        InvalidHash: not 64 hexadecimal digits.
    """
    if not _SHA256.fullmatch(text.strip()):
        raise InvalidHash(f"{text[:80]!r} is not a SHA-256, want 64 hexadecimal digits")
    return text.strip().lower()


@dataclass(frozen=True, slots=True)
class Target:
    """
    What an unfinished file is to become.

    Attributes:
        sha256: lower-case hexadecimal.
        total: bytes of the whole; None if the record is from a writer that did not know.
    """

    sha256: str
    total: int | None = None

    def agrees(self, other: Target) -> bool:
        """Whether both mean the same content."""
        return self.sha256 == other.sha256 and (None in (self.total, other.total) or self.total == other.total)


@dataclass(frozen=True, slots=True)
class Stored:
    """
    What is on the worker's disk under a key.

    Attributes:
        size: bytes there; 0 when the file is absent or empty.
        exists: whether there is a file.
        target: set while the file is unfinished.
        sha256: of a finished file, if it is known.
        stamp: changes when the file's bytes do (its modification time, ns).
    """

    size: int = 0
    exists: bool = False
    target: Target | None = None
    sha256: str | None = None
    stamp: int = 0


@dataclass(frozen=True, slots=True)
class PutRequest:
    """
    The head of one PUT.

    Attributes:
        range: None for a whole file in one go.
        sha256: what the finished file is to hash to, if the client said.
        content_length: bytes announced for the body, if announced.
        fingerprint: what stood for ``sha256`` in earlier pieces, if the client said.
    """

    range: ContentRange | None = None
    sha256: str | None = None
    content_length: int | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class WriteWhole:
    """Write a new file, whatever was there; its hash is compared if ``sha256`` is given."""

    sha256: str | None
    length: int | None


@dataclass(frozen=True, slots=True)
class WritePiece:
    """
    Write ``range`` at the end of what is there.

    Attributes:
        range: what the piece carries.
        target: what the file is to become.
        fresh: first throw away what is there, and record the target.
        renamed: the target was recorded under its fingerprint: record this one before anything is written.
    """

    range: ContentRange
    target: Target
    fresh: bool
    renamed: bool = False


@dataclass(frozen=True, slots=True)
class AlreadyWhole:
    """The very file is there: answer 200, keep it."""


@dataclass(frozen=True, slots=True)
class WrongOffset:
    """Answer 416 with ``X-File-Size: size``: continue from there."""

    size: int


@dataclass(frozen=True, slots=True)
class StartOver:
    """Answer 409: what is there is not the beginning of this file; ``wipe`` it and restart from 0."""

    wipe: bool


@dataclass(frozen=True, slots=True)
class BadPut:
    """Answer 400 with ``text``."""

    text: str


Decision: TypeAlias = WriteWhole | WritePiece | AlreadyWhole | WrongOffset | StartOver | BadPut


def decide_put(stored: Stored, request: PutRequest) -> Decision:
    """What to do with a PUT, given what is on the disk."""
    total = request.content_length if request.range is None else request.range.total
    if stored.sha256 is not None and request.sha256 == stored.sha256 and total in (None, stored.size):
        return AlreadyWhole()
    if request.range is None:
        return WriteWhole(request.sha256, request.content_length)
    if request.content_length is not None and request.content_length != request.range.length:
        return BadPut(f"Content-Length {request.content_length} does not fit Content-Range {request.range}")
    if request.sha256 is None:
        return BadPut(f"a PUT with Content-Range needs {CONTENT_SHA256}, the hash of the whole file")
    target = Target(request.sha256, request.range.total)
    renamed = request.fingerprint is not None and stored.target == Target(request.fingerprint, target.total)
    if renamed:
        stored = replace(stored, target=target)
    if request.range.start == 0:
        return _first_piece(stored, request.range, target)
    return _later_piece(stored, request.range, target, renamed)


def _first_piece(stored: Stored, range_: ContentRange, target: Target) -> Decision:
    if stored.size and stored.target is not None and stored.target.agrees(target):
        return WrongOffset(stored.size)
    return WritePiece(range_, target, fresh=True)


def _later_piece(stored: Stored, range_: ContentRange, target: Target, renamed: bool) -> Decision:
    if stored.target is not None and not stored.target.agrees(target):
        return StartOver(wipe=True)
    if stored.target is None and stored.size:
        return StartOver(wipe=False)
    if range_.start != stored.size:
        return WrongOffset(stored.size)
    return WritePiece(range_, target, fresh=False, renamed=renamed)
