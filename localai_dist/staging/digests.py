"""
SHA-256 of source files: hashed in a thread a slice at a time, remembered while the file does not change.

Remembered in memory and, where the folder is writable, in a sidecar ``NAME.sha256`` beside the file, so that a restart
need not read 600 GB again. A sidecar counts only if the inode, size and modification time in it are the file's; one
that somebody else wrote is neither trusted nor replaced.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localai_dist.staging.errors import SourceChanged, SourceMissing
from localai_dist.staging.reader import InThread, SourceReader
from localai_dist.units import KiB, MiB
from localai_dist.wire.keys import HASH_SUFFIX

SLICE: int = 1 * MiB
"""Bytes hashed per trip to the thread: each trip is one sign of progress (LOAD-3), and where a cancel takes effect."""

_MARK = "localai-dist"
_SAMPLES, _SAMPLE = 17, 64 * KiB  # of a fingerprint: how many, and bytes of each, from the first to the last
_KNOWN = 4096  # files remembered in memory


@dataclass(frozen=True, slots=True)
class _Stamp:
    inode: int
    size: int
    modified_ns: int


class Digests:
    """The hashes of this frontend's model files; a file is hashed again only after it changed."""

    def __init__(self, in_thread: InThread) -> None:
        self._in_thread = in_thread
        self._known: dict[Path, tuple[_Stamp, str]] = {}

    async def known(self, path: Path) -> str | None:
        """
        The SHA-256 of ``path`` if it need not be hashed for it.

        Raises:
            SourceMissing: it can't be opened or read.
        """
        return (await self._remembered(path))[1]

    async def fingerprint(self, path: Path) -> str:
        """
        What stands for the SHA-256 of ``path`` until that is found; the same for the same content on any frontend.

        Of the size and a sample of the bytes: it says which unfinished file on a worker is probably this one, no more.
        What arrives is verified by the SHA-256 of all of it.

        Raises:
            SourceMissing: it can't be opened or read.
        """
        found: str = await self._call(_fingerprint, path)
        return found

    async def of(self, path: Path, hashed: Callable[[int], None]) -> str:
        """
        The SHA-256 of ``path`` in lower-case hexadecimal.

        Args:
            path: the file.
            hashed: called with the number of bytes of each slice, as it is done.

        Raises:
            SourceMissing: it can't be opened or read.
            SourceChanged: it changed while it was hashed.
        """
        stamp, digest = await self._remembered(path)
        if digest is None:
            digest = await self._hash(path, hashed)
            if await self._call(_stamp, path) != stamp:
                raise SourceChanged(f"{path} changed while it was hashed; is it still being copied?")
            await self._call(_record, path, (stamp, digest))
        self._known[path] = (stamp, digest)
        while len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]
        return digest

    async def _remembered(self, path: Path) -> tuple[_Stamp, str | None]:
        """What ``path`` is like now, and its hash if one is remembered of just that."""
        stamp: _Stamp = await self._call(_stamp, path)
        known = self._known.get(path) or await self._call(_recall, path)
        return stamp, None if known is None or known[0] != stamp else known[1]

    async def _hash(self, path: Path, hashed: Callable[[int], None]) -> str:
        state = hashlib.sha256()
        reader: SourceReader = await self._call(SourceReader, path)
        try:
            while count := await self._call(_feed, reader, state):
                hashed(count)
        finally:
            self._in_thread(reader.close)
        return state.hexdigest()

    async def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await self._in_thread(call, *arguments)
        except OSError as error:
            raise SourceMissing(f"{error.filename or arguments[0]} can't be read: {error.strerror}") from error


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + HASH_SUFFIX)


def _recall(path: Path) -> tuple[_Stamp, str] | None:
    try:
        words = _sidecar(path).read_text("ascii").split()
    except (OSError, UnicodeDecodeError):
        return None
    if len(words) != 5 or words[1] != _MARK or not all(word.isdigit() for word in words[2:]):
        return None
    return _Stamp(int(words[2]), int(words[3]), int(words[4])), words[0]


def _record(path: Path, known: tuple[_Stamp, str]) -> None:
    sidecar = _sidecar(path)
    if sidecar.exists() and _recall(path) is None:
        return
    stamp, digest = known
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(f"{digest} {_MARK} {stamp.inode} {stamp.size} {stamp.modified_ns}\n", "ascii")
        draft.replace(sidecar)
    except OSError:
        return  # a read-only models folder costs a second hashing after a restart, nothing else


def _stamp(path: Path) -> _Stamp:
    found = os.stat(path)
    return _Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


def _fingerprint(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        state = hashlib.sha256(b"fingerprint %d\n" % size)
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE) * number // (_SAMPLES - 1))
            state.update(file.read(_SAMPLE))
    return state.hexdigest()


def _feed(reader: SourceReader, state: Any) -> int:
    # hashlib releases the lock that all Python threads share for slices of this size, so the reactor goes on.
    count = 0
    while count < SLICE and (piece := reader.read(min(MiB, SLICE - count))):
        state.update(piece)
        count += len(piece)
    return count
