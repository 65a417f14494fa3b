"""
One staged file in progress: its writer's lock, its running hash, and the catch-up that reads it again.

The hash has one user at a time. Bytes appended while a catch-up runs are written and left to it; it goes on until it
has seen everything that is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, DeferredLock
from twisted.logger import Logger

from localai_dist.wire.files import Stored
from localai_dist.worker import sums
from localai_dist.worker.offload import Offload


class Entry:
    """
    A file in progress.

    Attributes:
        path: the file.
        lock: held by whoever writes or settles it.
        waiting: uploads that wait for the lock.
        size: bytes on the disk, as far as this process wrote or saw them.
        failure: why the last verification ended early; told once.
    """

    _log = Logger()

    def __init__(self, path: Path, offload: Offload) -> None:
        self.path = path
        self.lock = DeferredLock()
        self.waiting = 0
        self.size = 0
        self.failure: Exception | None = None
        self._stamp = 0
        self._offload = offload
        self._hash = sums.RunningHash()
        self._catching_up = False
        self._catch_up_waiters: list[Deferred[None]] = []

    @property
    def verified(self) -> int:
        """Bytes hashed."""
        return self._hash.done

    @property
    def catching_up(self) -> bool:
        """Whether the file is being read again."""
        return self._catching_up

    @property
    def idle(self) -> bool:
        """Whether nobody uses it."""
        return not self.lock.locked and not self._catching_up

    @property
    def wanted(self) -> bool:
        """Whether an upload waits for the one that holds the lock."""
        return self.waiting > 0

    def seen(self, stored: Stored) -> None:
        """What is on the disk: a hash of bytes that somebody else has changed since is of no use."""
        if not self._catching_up and (stored.size, stored.stamp) != (self.size, self._stamp):
            self._hash, self.size, self._stamp = sums.RunningHash(), stored.size, stored.stamp

    async def restart(self) -> None:
        """The file is finished or about to be replaced: forget its hash, and wait until nobody reads it."""
        self._hash, self.size, self._stamp = sums.RunningHash(), 0, 0
        if self._catching_up:
            await self.caught_up()

    async def append(self, descriptor: int, block: Sequence[bytes]) -> None:
        """Write ``block`` at the end, and hash it unless a catch-up has to do that."""
        inline = not self._catching_up and self._hash.done == self.size
        hash_ = self._hash

        def work() -> int:
            stamp = sums.write_at(descriptor, self.size, block)
            if inline:
                hash_.add(block)
            return stamp

        self._stamp = await self._offload(work)
        self.size += sum(map(len, block))
        self.catch_up()

    def catch_up(self) -> None:
        """Hash what is not hashed yet; ``caught_up`` tells when."""
        if not self._catching_up and self._hash.done < self.size:
            self._catching_up = True
            self.failure = None
            running = Deferred.fromCoroutine(self._follow(self._hash))
            running.addBoth(self._followed)

    def caught_up(self) -> Deferred[None]:
        """Fires when no catch-up runs; each call its own. ``failure`` tells how it went."""
        waiter: Deferred[None] = Deferred(lambda cancelled: self._catch_up_waiters.remove(cancelled))
        if self._catching_up:
            self._catch_up_waiters.append(waiter)
        else:
            waiter.callback(None)
        return waiter

    async def sha256(self) -> str:
        """
        The hash of everything written.

        Raises:
            OSError: the file could not be read again.
        """
        self.catch_up()
        await self.caught_up()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return self._hash.hexdigest()

    async def _follow(self, hash_: sums.RunningHash) -> None:
        while hash_ is self._hash and hash_.done < self.size:
            await self._offload(hash_.follow, self.path, self.size)

    def _followed(self, result: Any) -> None:
        self._catching_up = False
        if result is not None:
            self.failure = result.value
            self._log.warn("{file} can't be verified: {error}", file=self.path.name, error=result.value)
        waiting, self._catch_up_waiters = self._catch_up_waiters, []
        for waiter in waiting:
            waiter.callback(None)
