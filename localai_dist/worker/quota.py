"""
Room for files of single requests: who may still bring how much. Pure; bytes and seconds come in as values.

Source: wire contract §6 (ephemeral staging limits), LOAD-23.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from localai_dist.units import HOUR, GiB, format_size
from localai_dist.worker.errors import NoRoom, RequestOver

TOMBSTONE = HOUR
"""How long a released request is remembered, so that a late file of it is refused (s)."""
TOMBSTONES = 16_384
"""How many are remembered; the oldest goes first."""


def default_limit(disk: int) -> int:
    """Bytes all request files together may have on a file system of ``disk`` bytes."""
    return min(10 * GiB, disk // 10)


def default_floor(disk: int) -> int:
    """Bytes that stay free on a file system of ``disk`` bytes."""
    return max(1 * GiB, disk // 20)


class Quota:
    """
    What request files are here or on their way.

    Args:
        limit: bytes they may have together.
        floor: bytes of the file system that they leave free.
    """

    def __init__(self, *, limit: int, floor: int) -> None:
        self._limit = limit
        self._floor = floor
        self._files: dict[tuple[str, str], int] = {}
        self._writing: Counter[tuple[str, str]] = Counter()
        self._seen: dict[str, float] = {}
        self._released: OrderedDict[str, float] = OrderedDict()

    @property
    def held(self) -> int:
        """Bytes reserved, written or not."""
        return sum(self._files.values())

    def is_live(self, request: str) -> bool:
        """Whether a file of ``request`` is being written."""
        return any(owner == request for owner, _ in self._writing)

    def requests(self) -> set[str]:
        """Requests that have files here, or room reserved for some."""
        return {owner for owner, _ in self._files}

    def being_written(self, *, but: tuple[str, str]) -> dict[tuple[str, str], int]:
        """What is reserved for each file that is being written, ``but`` one: request and name -> bytes."""
        return {file: self._files[file] for file in self._writing if file != but}

    def saw(self, request: str, now: float) -> None:
        """Somebody asked about a file of ``request``, so it goes on."""
        if request in self.requests():
            self._seen[request] = now

    def last_seen(self, request: str) -> float:
        """When somebody last wrote a file of ``request`` or asked about one, in this run; 0 is never."""
        return self._seen.get(request, 0.0)

    def is_over(self, request: str, now: float) -> bool:
        """Whether ``request`` was released."""
        while self._released and next(iter(self._released.values())) + TOMBSTONE <= now:
            self._released.popitem(last=False)
        return request in self._released

    def found(self, request: str, name: str, size: int) -> None:
        """A file that was here when we started."""
        self._files.setdefault((request, name), size)

    def begin(self, request: str, name: str, size: int, *, there: int, free: int, now: float) -> None:
        """
        Reserve ``size`` bytes for a file that is about to be written; ``end`` must follow.

        Args:
            there: bytes of it on the disk already.
            free: bytes free on the file system, less what is still to come of others that are being written.

        Raises:
            RequestOver: the request was released.
            NoRoom: more than the limit, or too little would stay free.
        """
        if self.is_over(request, now):
            raise RequestOver(f"request {request} is over: its files were released")
        others = self.held - self._files.get((request, name), 0)
        if others + size > self._limit:
            raise NoRoom(
                f"{format_size(size)} for request {request} is too much: request files may have "
                f"{format_size(self._limit)} on this node, {format_size(others)} are taken"
            )
        if free - max(0, size - there) < self._floor:
            raise NoRoom(
                f"{format_size(size)} for request {request} is too much: {format_size(self._floor)} of this node's "
                f"disk stay free, {format_size(free)} are left"
            )
        self._files[request, name] = size
        self._writing[request, name] += 1
        self._seen[request] = now

    def end(self, request: str, name: str) -> None:
        """One write is over; what it reserved stays until the request is forgotten."""
        self._writing[request, name] -= 1
        if not self._writing[request, name]:
            del self._writing[request, name]

    def release(self, request: str, now: float) -> None:
        """The request is over: late files of it are refused."""
        self._released.pop(request, None)
        self._released[request] = now
        while len(self._released) > TOMBSTONES:
            self._released.popitem(last=False)

    def forget(self, request: str) -> None:
        """Its files are gone."""
        for key in [key for key in self._files if key[0] == request]:
            del self._files[key]
        self._seen.pop(request, None)
