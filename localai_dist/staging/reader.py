"""A file read by worker threads: whoever closes it waits for the read that is still going on."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol


class InThread(Protocol):
    """Runs a blocking call off the reactor (``deferToThreadPool`` with its first arguments bound)."""

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        """The call's result."""


class SourceReader:
    """
    An open file for one reader at a time.

    A cancelled coroutine leaves its read behind in the thread. Closing the descriptor under it could make that read
    take bytes from whatever gets the number next, so both go through one lock. Blocking: call it in a thread.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self._lock = threading.Lock()
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - close() is this class's verb
        self._file.seek(start)

    def read(self, count: int) -> bytes:
        """Up to ``count`` bytes; empty at the end, or once it was closed."""
        with self._lock:
            return b"" if self._file.closed else self._file.read(count)

    def read_batch(self, count: int, each: int) -> list[bytes]:
        """``count`` bytes in reads of ``each``; where the file ends before, or was closed, the last one is empty."""
        chunks = []
        while count:
            chunks.append(self.read(min(each, count)))
            if not chunks[-1]:
                break
            count -= len(chunks[-1])
        return chunks

    def close(self) -> None:
        """Give the descriptor back."""
        with self._lock:
            self._file.close()
