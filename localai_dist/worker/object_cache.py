"""
What came from the object store, by its hash: hard links to staged files, so that it costs nothing while they are there.

When a model is deleted its files stay here as far as the bound allows, the least recently used go first. Where the file
system has no hard links there is no cache.

Source: LOAD-20.
"""

from __future__ import annotations

import os
from pathlib import Path

from localai_dist.units import GiB
from localai_dist.wire.keys import HASH_SUFFIX, TARGET_SUFFIX
from localai_dist.worker import sums
from localai_dist.worker.offload import Offload

DEFAULT_LIMIT = 10 * GiB
"""Bytes that only the cache still holds."""


class ObjectCache:
    """
    One folder of files called by their hashes.

    Args:
        folder: on the file system of the models folder, to be of use.
        limit: bytes that only the cache still holds.
    """

    def __init__(self, folder: Path, *, limit: int, offload: Offload) -> None:
        self._folder = folder
        self._limit = limit
        self._offload = offload

    async def fetch(self, sha256: str, path: Path) -> bool:
        """Put the file with this hash at ``path``; whether it was here."""
        return await self._offload(_fetch, self._folder / sha256, path, sha256)

    async def keep(self, sha256: str, path: Path) -> None:
        """Remember the verified file at ``path``, and make room."""
        await self._offload(_keep, path, self._folder / sha256, sha256)
        await self.trim()

    async def trim(self) -> None:
        """Remove what is over the bound."""
        await self._offload(_trim, self._folder, self._limit)


def _fetch(source: Path, path: Path, sha256: str) -> bool:
    if sums.look(source).sha256 != sha256:
        sums.wipe(source)
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    sums.wipe(path)
    try:
        os.link(source, path)
    except OSError:
        return False
    sums.finish(path, sha256)
    os.utime(source.with_name(source.name + HASH_SUFFIX))  # used just now
    return True


def _keep(path: Path, target: Path, sha256: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    sums.wipe(target)
    try:
        os.link(path, target)
    except OSError:
        return  # another file system, or one without hard links
    sums.finish(target, sha256)


def _trim(folder: Path, limit: int) -> None:
    if not folder.is_dir():
        return
    alone = []
    for path in folder.iterdir():
        if path.name.endswith((HASH_SUFFIX, TARGET_SUFFIX, ".tmp")):
            continue
        status = path.stat()
        if status.st_nlink == 1:
            alone.append((_used(path), status.st_size, path))
    held = sum(size for _, size, _ in alone)
    for _, size, path in sorted(alone):
        if held <= limit:
            return
        sums.wipe(path)
        held -= size


def _used(path: Path) -> float:
    try:
        return path.with_name(path.name + HASH_SUFFIX).stat().st_mtime
    except FileNotFoundError:
        return 0.0
