"""
Files that came with requests, on this frontend: bounded by whoever writes them, each gone when its request is.

Each has a folder of its own below the frontend's data folder, because what is staged from it leaves a hash beside it.
What a killed frontend left is swept at the next start.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from localai_dist.serving.errors import DiskFull
from localai_dist.units import MiB

InThread = Callable[..., Deferred[Any]]

AT_ONCE = 1 * MiB
"""Bytes kept in memory before they go to the disk, by a thread."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TRIES = 3


@contextmanager
def _in_words() -> Iterator[None]:
    """A full disk as what it is to a client; any other trouble as it is."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull("the disk of this frontend is full: it can't take the file") from error
        raise


class ReceivedFiles:
    """
    The folder of them.

    Args:
        folder: this frontend's own; made when needed, readable by its user alone.
        in_thread: runs a blocking function off the reactor's thread.
    """

    def __init__(self, folder: Path, *, in_thread: InThread) -> None:
        self._folder = folder
        self._in_thread = in_thread
        self._lock: int | None = None

    def new(self, suffix: str) -> ReceivedFile:
        """
        An empty file, 0600.

        Args:
            suffix: of its name, like ``.wav``; made safe by the caller.

        Raises:
            DiskFull, OSError: the folder can't be written.
        """
        with _in_words():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            own = Path(tempfile.mkdtemp(prefix="request-", dir=self._folder))
            try:
                return ReceivedFile(own / f"{secrets.token_hex(4)}{suffix}", in_thread=self._in_thread)
            except BaseException:
                own.rmdir()
                raise

    def sweep(self) -> int:
        """
        Remove what an earlier run left, following no link; how many. Blocking, before the first request.

        Nothing is removed while another process uses the folder: two frontends that were given one by mistake.
        """
        lock = self._take_lock()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._remove_all()
        except BlockingIOError:
            return 0
        finally:
            fcntl.flock(lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """The folder is another one's to sweep."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> int:
        """Beside the folder, shared by all who use it: the kernel takes it from a process that was killed."""
        if self._lock is None:
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        return self._lock

    def _remove_all(self) -> int:
        if self._folder.is_symlink() or not self._folder.is_dir():
            return 0
        found = list(os.scandir(self._folder))
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)  # removes links in it, follows none
            else:
                os.unlink(entry.path)
        return len(found)


class ReceivedFile:
    """
    One file: written, closed, removed; in this order, but removed at any time.

    Attributes:
        path: where it is.
        size: bytes written so far.
    """

    log = Logger()

    def __init__(self, path: Path, *, in_thread: InThread) -> None:
        self.path = path
        self.size = 0
        self._in_thread = in_thread
        self._waiting = bytearray()
        # A cancelled coroutine leaves its write behind in a thread: that, closing and removing take turns.
        self._turn = threading.Lock()
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

    async def write(self, data: bytes) -> None:
        """
        Append; returns when there is room for more.

        Raises:
            DiskFull, OSError: it can't be written.
        """
        self._waiting += data
        self.size += len(data)
        if len(self._waiting) >= AT_ONCE:
            await self._flush(close=False)

    async def close(self) -> None:
        """
        Everything is on the disk.

        Raises:
            DiskFull, OSError: it can't be written.
        """
        await self._flush(close=True)

    def remove(self) -> Deferred[None]:
        """Have it gone, whatever is still being done with it; fires afterwards, and never fails."""
        removing: Deferred[None] = self._in_thread(self._remove)
        return removing.addErrback(
            lambda failure: self.log.failure("a request's file could not be removed: {path}", failure, path=self.path)
        )

    async def _flush(self, *, close: bool) -> None:
        data = bytes(self._waiting)
        self._waiting.clear()
        with _in_words():
            await self._in_thread(self._append, data, close)

    def _append(self, data: bytes, close: bool) -> None:
        with self._turn:
            if self._file.closed:
                return
            self._file.write(data)
            if close:
                self._file.close()

    def _remove(self) -> None:
        with self._turn:
            try:
                self._file.close()
            except OSError as error:
                if error.errno not in _FULL:  # what could not be written is not wanted any more
                    raise
            self._remove_folder()

    def _remove_folder(self) -> None:
        for last in (*[False] * (_TRIES - 1), True):
            try:
                shutil.rmtree(self.path.parent)
            except OSError as error:
                # A hash that was on its way to the disk came between.
                if last or error.errno != errno.ENOTEMPTY:
                    raise
            else:
                return
