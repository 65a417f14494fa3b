"""
Staged files and their hash files on the disk, and a SHA-256 that follows a file as it grows. Blocking: used in threads.

Beside a finished file lies ``<name>.sha256`` (trusted while it is not older than the file); beside an unfinished one
``<name>.sha256.target`` with the hash it is to have and its size. The target is written before the first byte and
removed after the last check, so that a crash at any point leaves a file that is either resumable or verified.

Source: surface §5.6.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from localai_dist.errors import UserMistake
from localai_dist.units import MiB
from localai_dist.wire.files import Stored, Target, parse_sha256
from localai_dist.wire.keys import HASH_SUFFIX, TARGET_SUFFIX

DRAFT_SUFFIX = ".upload-tmp"
"""Beside a file that is being sent in one go, until it is right."""

WRITE_BACK = 16 * MiB
"""Bytes whose way to the disk is begun at a time."""

VECTOR = 512
"""Chunks given to the kernel in one call; it takes 1024."""

STEP_BYTES = 8 * MiB
"""How much one ``RunningHash.follow`` reads at most, in pieces of 1 MiB."""


def look(path: Path) -> Stored:
    """
    What is under ``path``.

    Raises:
        OSError: the disk said no, or it is not a plain file.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Stored(target=read_target(path))
    if not path.is_file():
        raise IsADirectoryError(errno.EISDIR, "not a plain file", path.name)
    sha256 = _read_sum(path, status.st_mtime_ns)
    target = None if sha256 is not None else read_target(path)
    return Stored(status.st_size, True, target, sha256, status.st_mtime_ns)


def read_target(path: Path) -> Target | None:
    """What the unfinished file at ``path`` is to become; None if it is not unfinished, or that can't be read."""
    try:
        sha256, _, total = _beside(path, TARGET_SUFFIX).read_text("ascii").partition("\n")
        return Target(parse_sha256(sha256), int(total) if total.strip().isdecimal() else None)
    except (OSError, UnicodeDecodeError, UserMistake):
        return None


def begin(path: Path, target: Target) -> None:
    """Throw away what is at ``path`` and start an empty file that is to become ``target``."""
    wipe(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    record(path, target)
    create(path)


def record(path: Path, target: Target) -> None:
    """Write down that what is at ``path`` is to become ``target``."""
    _write(_beside(path, TARGET_SUFFIX), f"{target.sha256}\n{target.total or ''}\n")


def create(path: Path) -> None:
    """An empty file at ``path``, a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def replace(draft: Path, path: Path, sha256: str) -> None:
    """Put ``draft``, which hashes to ``sha256``, in the place of what is at ``path``."""
    wipe(path)
    draft.rename(path)
    finish(path, sha256)


def finish(path: Path, sha256: str) -> None:
    """Write down that the file at ``path`` is whole and hashes to ``sha256``; its bytes are flushed first."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        stamp = os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)
    beside = _beside(path, HASH_SUFFIX)
    _write(beside, f"{sha256}\n")
    if beside.stat().st_mtime_ns < stamp:
        # A file from the future (a clock that was wrong): its hash file must not look older for ever.
        os.utime(beside, ns=(stamp, stamp))
    _beside(path, TARGET_SUFFIX).unlink(missing_ok=True)


def wipe(path: Path) -> None:
    """Remove the file at ``path`` and what lies beside it. Whoever has it open keeps reading the old one."""
    for victim in (_beside(path, HASH_SUFFIX), path, _beside(path, TARGET_SUFFIX)):
        victim.unlink(missing_ok=True)


def unfinished(root: Path, before: float) -> list[Path]:
    """The files below ``root`` that are not whole and were not touched since ``before`` (s); no link is followed."""
    marked = {
        Path(parent, name.removesuffix(suffix))
        for parent, _, names in os.walk(os.path.realpath(root))
        for name in names
        for suffix in (TARGET_SUFFIX, DRAFT_SUFFIX)
        if name.endswith(suffix)
    }
    return sorted(path for path in marked if _touched(path) < before)


def partials(roots: Sequence[Path]) -> list[tuple[float, int, Path]]:
    """Every unfinished file below ``roots``, the newest first: when it was touched (s), its bytes, where it is."""
    found = []
    for path in (path for root in roots for path in unfinished(root, math.inf)):
        held = 0
        for part in (path, _beside(path, DRAFT_SUFFIX)):
            try:
                held += os.lstat(part).st_size
            except FileNotFoundError:
                continue
        found.append((_touched(path), held, path))
    return sorted(found, reverse=True)


def volume_size(folder: Path) -> int:
    """Bytes of the file system that ``folder`` is on, or will be."""
    there = next(one for one in (folder, *folder.parents) if one.exists())
    return shutil.disk_usage(there).total


def drop_unfinished(path: Path, before: float) -> bool:
    """Remove ``path`` if it is unfinished and untouched since ``before`` (s); whether it was."""
    if _touched(path) >= before:
        return False
    _beside(path, DRAFT_SUFFIX).unlink(missing_ok=True)
    if look(path).sha256 is not None:
        _beside(path, TARGET_SUFFIX).unlink(missing_ok=True)  # a crash came between the last two steps of finish()
        return False
    if not _beside(path, TARGET_SUFFIX).exists():
        return False
    wipe(path)
    return True


def _touched(path: Path) -> float:
    """The last change of an unfinished file, or of what marks it as such (s)."""
    stamps = [0.0]
    for marked in (path, _beside(path, TARGET_SUFFIX), _beside(path, DRAFT_SUFFIX)):
        try:
            stamps.append(os.lstat(marked).st_mtime)
        except FileNotFoundError:
            continue
    return max(stamps)


def write_at(descriptor: int, offset: int, block: Sequence[bytes]) -> int:
    """Write all of ``block`` at ``offset``; the file's stamp afterwards."""
    begun, rest = offset, [memoryview(chunk) for chunk in block]
    while rest:
        written = os.pwritev(descriptor, rest[:VECTOR], offset)
        offset += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]
    _write_back(descriptor, begun, offset)
    return os.fstat(descriptor).st_mtime_ns


def _write_back(descriptor: int, begun: int, end: int) -> None:
    """
    Have the disk begin with each ``WRITE_BACK`` bytes as they are complete, without waiting for it.

    What is dirty yet is only started by this call, and stays in the cache for the backend that will read it. Left to
    the kernel, it comes late and at once: the last flush of a large model took longer than all its writing.
    """
    first, last = begun // WRITE_BACK * WRITE_BACK, end // WRITE_BACK * WRITE_BACK
    if last > first:
        os.posix_fadvise(descriptor, first, last - first, os.POSIX_FADV_DONTNEED)


class RunningHash:
    """
    The SHA-256 of the first ``done`` bytes of a file.

    One user at a time: whoever writes the file, or whoever catches up with it.
    """

    def __init__(self) -> None:
        self.done = 0
        self._sha256 = hashlib.sha256()

    def add(self, block: Sequence[bytes]) -> None:
        """The next bytes, just written."""
        for chunk in block:
            self._sha256.update(chunk)
            self.done += len(chunk)

    def follow(self, path: Path, until: int) -> None:
        """
        Read on from the file, at most ``STEP_BYTES`` and not beyond ``until``.

        Raises:
            OSError: it can't be read, or ended before ``until``.
        """
        with open(path, "rb", buffering=0) as file:
            file.seek(self.done)
            stop = min(until, self.done + STEP_BYTES)
            while self.done < stop:
                block = file.read(min(MiB, stop - self.done))
                if not block:
                    raise OSError(f"{path.name} is shorter than it was")
                self.add((block,))

    def hexdigest(self) -> str:
        """The hash so far."""
        return self._sha256.hexdigest()


def _read_sum(path: Path, not_older_than: int) -> str | None:
    beside = _beside(path, HASH_SUFFIX)
    try:
        if beside.stat().st_mtime_ns < not_older_than:
            return None
        return parse_sha256(beside.read_text("ascii"))
    except (OSError, UnicodeDecodeError, UserMistake):
        return None


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _write(path: Path, text: str) -> None:
    """Write the small file at ``path`` whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, "ascii")
    draft.rename(path)
