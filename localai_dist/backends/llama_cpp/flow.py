"""Chunks from an engine's thread to the event loop: bounded, stoppable from either side."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

_DEPTH = 256


class Flow:
    """
    A queue of at most ``_DEPTH`` chunks. A consumer that stops reading blocks the engine's thread in ``offer``;
    ``stop`` frees it and has the engine give up its slot.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._room = threading.Semaphore(_DEPTH)
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopped

    def offer(self, chunk: dict[str, Any]) -> bool:
        """Called by the engine in its thread; True tells it to stop."""
        self._room.acquire()
        if self._stopped:
            return True
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, chunk)
        except RuntimeError:  # the loop is closed: the program ends
            return True
        return False

    def end(self) -> None:
        """Nothing more comes (called in the loop)."""
        self._queue.put_nowait(None)

    def stop(self) -> None:
        """Nobody reads any more (called in the loop)."""
        self._stopped = True
        self._room.release()

    async def next(self) -> dict[str, Any] | None:
        """The next chunk, or None at the end."""
        chunk = await self._queue.get()
        self._room.release()
        return chunk
