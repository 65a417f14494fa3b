"""
Files of single requests (an image, a recording): staged under ``ephemeral/<request>/…``, gone when the request is.

Bounded by ``quota``; what nobody releases is swept an hour after it was last written or asked about, never through a
link, never while it is written.

Source: wire contract §6 (ephemeral staging limits), LOAD-23.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from twisted.internet.defer import DeferredLock

from localai_dist.errors import InvalidName
from localai_dist.units import HOUR
from localai_dist.wire.files import PutRequest
from localai_dist.wire.keys import EPHEMERAL, Area, StagingKey, ephemeral_folder
from localai_dist.worker.containment import Areas
from localai_dist.worker.offload import Offload
from localai_dist.worker.quota import Quota, default_floor, default_limit

LEFT_OVER = HOUR
"""Age from which the files of a request that nobody released are removed (s)."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bytes; None is by the size of the file system. See ``quota``."""

    limit: int | None = None
    floor: int | None = None


class RequestFiles:
    """
    The ephemeral folder of this worker.

    Args:
        areas: where it is.
        now: the wall clock (s), which files' ages are told by.
    """

    def __init__(
        self, areas: Areas, *, offload: Offload, now: Callable[[], float], limits: RequestLimits | None = None
    ) -> None:
        self._areas = areas
        self._offload = offload
        self._now = now
        self._limits = limits or RequestLimits()
        self._quota: Quota | None = None
        self._deciding = DeferredLock()  # between a look at the disk and the reservation nobody else reserves

    @asynccontextmanager
    async def writing(self, key: StagingKey, request: PutRequest) -> AsyncIterator[None]:
        """
        Around one PUT; keys of other files pass.

        Raises:
            InvalidName: the key names no file of a request, or its size is not told.
            RequestOver, NoRoom: it is not taken.
        """
        if not is_ephemeral(key):
            yield
            return
        if len(key.parts) < 3:
            raise InvalidName(f"{key} names no file of a request: want {EPHEMERAL}/<request>/…")
        size = request.content_length if request.range is None else request.range.total
        if size is None:
            raise InvalidName("a request's file needs a Content-Length")
        _, owner, *rest = key.parts
        name = "/".join(rest)
        quota = await self._ready()
        await self._deciding.acquire()
        try:
            pending = {
                self._folder() / "/".join(file): of for file, of in quota.being_written(but=(owner, name)).items()
            }
            room = await self._offload(_room, self._areas.path(key), self._areas.root(Area.STAGING), pending)
            quota.begin(owner, name, size, there=room.there, free=room.free, now=self._now())
        finally:
            self._deciding.release()
        try:
            yield
        finally:
            quota.end(owner, name)
            if quota.is_over(owner, self._now()) and not quota.is_live(owner):
                await self._remove(quota, owner)

    def saw(self, key: StagingKey) -> None:
        """Somebody asked about ``key``: the request that it may be of goes on."""
        if self._quota is not None and is_ephemeral(key) and len(key.parts) > 1:
            self._quota.saw(key.parts[1], self._now())

    async def release(self, owner: str) -> None:
        """
        The request is over: its files go, at once or when the one that is being written ends; late ones are refused.

        Raises:
            InvalidName: no request is called that.
        """
        ephemeral_folder(owner)
        quota = await self._ready()
        quota.release(owner, self._now())
        if not quota.is_live(owner):
            await self._remove(quota, owner)

    async def sweep(self) -> list[str]:
        """Remove what is left of requests nobody released; which ones."""
        quota = await self._ready()
        ages = await self._offload(_ages, self._folder())
        gone = []
        for owner in sorted({*ages, *quota.requests()}):
            touched = max(ages.get(owner, 0.0), quota.last_seen(owner))
            if self._now() - touched <= LEFT_OVER or quota.is_live(owner):
                continue
            quota.release(owner, self._now())  # what comes while it is removed is refused, not removed half
            await self._remove(quota, owner)
            if owner in ages:
                gone.append(owner)
        return gone

    async def _remove(self, quota: Quota, owner: str) -> None:
        await self._offload(_remove, self._folder() / owner)
        quota.forget(owner)

    async def _ready(self) -> Quota:
        """The quota, with what was left on the disk by an earlier run."""
        if self._quota is None:
            root = self._areas.root(Area.STAGING)
            disk, left = await self._offload(_survey, root, self._folder())
            if self._quota is None:
                limits = self._limits
                self._quota = Quota(
                    limit=default_limit(disk) if limits.limit is None else limits.limit,
                    floor=default_floor(disk) if limits.floor is None else limits.floor,
                )
                for owner, name, size in left:
                    self._quota.found(owner, name, size)
        return self._quota

    def _folder(self) -> Path:
        return self._areas.root(Area.STAGING) / EPHEMERAL


def is_ephemeral(key: StagingKey) -> bool:
    """Whether ``key`` is of a single request's files."""
    return key.area is Area.STAGING and key.parts[0] == EPHEMERAL


@dataclass(frozen=True, slots=True)
class _Room:
    """Bytes of a file on the disk already, and bytes free, less what others that are being written still need."""

    there: int
    free: int


def _room(path: Path, root: Path, pending: Mapping[Path, int]) -> _Room:
    root.mkdir(parents=True, exist_ok=True)
    to_come = sum(max(0, size - _size(other)) for other, size in pending.items())
    return _Room(_size(path), shutil.disk_usage(root).free - to_come)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0  # it went between the two


def _survey(root: Path, folder: Path) -> tuple[int, list[tuple[str, str, int]]]:
    root.mkdir(parents=True, exist_ok=True)
    left = [
        (owner.name, os.path.relpath(path, owner.path), size)
        for owner in _owners(folder)
        for path, size, _ in _files(owner.path)
    ]
    return shutil.disk_usage(root).total, left


def _ages(folder: Path) -> dict[str, float]:
    """When each request's folder was last touched, any file in it included."""
    return {
        owner.name: max([owner.stat(follow_symlinks=False).st_mtime, *(at for *_, at in _files(owner.path))])
        for owner in _owners(folder)
    }


def _owners(folder: Path) -> list[os.DirEntry[str]]:
    if folder.is_symlink() or not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]


def _files(folder: str) -> Iterator[tuple[str, int, float]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue  # a writer renamed it meanwhile
            yield path, status.st_size, status.st_mtime


def _remove(folder: Path) -> None:
    if not folder.is_symlink() and folder.is_dir():
        shutil.rmtree(folder)  # removes links in it, follows none
