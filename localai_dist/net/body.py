"""The body of a request as it arrives, bounded: the client is not read from while nobody takes it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from localai_dist.units import KiB

BODY_HIGH: Final = 256 * KiB
"""The client is not read from while this much waits."""

BODY_LOW: Final = 64 * KiB

SMALL: Final = 4 * KiB
"""Chunks below this are put together while they wait, so that what they take is not many times their bytes."""


class RequestBody:
    """
    An asynchronous reader of one request's body.

    One reader at a time. What waits is at most 256 KiB, or as much as was gathered at a time if that is more, and one
    read of the socket.

    Attributes:
        received: bytes that arrived so far.
        ended: the whole body arrived.
        paused: the client is not read from.
    """

    def __init__(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self.received = 0
        self.ended = False
        self.paused = False
        self._pause = pause
        self._resume = resume
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._high = BODY_HIGH
        self._wanted = 1
        self._lost: Failure | None = None
        self._waiter: Deferred[None] | None = None

    async def read(self, count: int = -1) -> bytes:
        """
        The next bytes, at most ``count`` of them (-1: as they came); ``b""`` at the end.

        Cancelling takes nothing.

        Raises:
            ConnectionLost: (or what else ended the connection) the client left before the end.
        """
        while not self._chunks:
            if self._lost is not None:
                self._lost.raiseException()
            if self.ended or count == 0:
                return b""
            await self._more(1)
        chunk = self._chunks.popleft()
        if 0 <= count < len(chunk):
            self._chunks.appendleft(chunk[count:])
            chunk = chunk[:count]
        self._took(len(chunk))
        return chunk

    async def gather(self, count: int) -> list[bytes]:
        """
        Everything that is there, once it is ``count`` bytes: less at the end only, and there ``[]``.

        Chunks as they came, uncopied, for who takes a lot: its reader wakes up once, not for each of them. Cancelling
        takes nothing; a ``count`` of 0 neither waits nor raises.

        Raises:
            ConnectionLost: (or what else ended the connection) the client left, and what came before was taken.
        """
        self._high = max(self._high, count)
        while self._size < count and not self.ended and self._lost is None:
            await self._more(count)
        if count and not self._chunks and self._lost is not None:
            self._lost.raiseException()
        chunks = list(self._chunks)
        self._chunks.clear()
        self._took(self._size)
        return chunks

    def _took(self, count: int) -> None:
        self._size -= count
        if self.paused and self._size <= BODY_LOW:
            self.paused = False
            self._resume()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The chunks, as they come."""
        while chunk := await self.read():
            yield chunk

    def _more(self, wanted: int) -> Deferred[None]:
        """Fires once ``wanted`` bytes wait, or nothing more will come."""
        if self._waiter is not None:
            raise RuntimeError("somebody reads this body already")
        self._wanted = wanted
        waiter: Deferred[None] = Deferred(self._forget)
        self._waiter = waiter
        if self.paused:  # at less than is wanted now
            self.paused = False
            self._resume()
        return waiter

    def _forget(self, waiter: Deferred[None]) -> None:
        self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            waiter.callback(None)

    # -- called by the request ----------------------------------------------------------------------------------------

    def arrived(self, data: bytes) -> None:
        """Bytes of the body arrived."""
        self.received += len(data)
        if len(data) < SMALL and self._chunks and len(self._chunks[-1]) < SMALL:
            self._chunks[-1] += data
        else:
            self._chunks.append(data)
        self._size += len(data)
        if self._size > self._high and not self.paused:
            self.paused = True
            self._pause()
        if self._size >= self._wanted:
            self._wake()

    def end(self) -> None:
        """The body is whole."""
        self.ended = True
        if self.paused:
            self.paused = False
            self._resume()
        self._wake()

    def lose(self, reason: Failure) -> None:
        """The connection is gone; what arrived can still be read."""
        if not self.ended and self._lost is None:
            self._lost = reason
            self._wake()


def empty_body() -> RequestBody:
    """The body of a request that has none."""
    body = RequestBody(lambda: None, lambda: None)
    body.ended = True
    return body
