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


class RequestBody:
    """
    An asynchronous reader of one request's body.

    One reader at a time. What waits is at most 256 KiB and one read of the socket.

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
            await self._more()
        chunk = self._chunks.popleft()
        if 0 <= count < len(chunk):
            self._chunks.appendleft(chunk[count:])
            chunk = chunk[:count]
        self._size -= len(chunk)
        if self.paused and self._size <= BODY_LOW:
            self.paused = False
            self._resume()
        return chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The chunks, as they come."""
        while chunk := await self.read():
            yield chunk

    def _more(self) -> Deferred[None]:
        if self._waiter is not None:
            raise RuntimeError("somebody reads this body already")
        self._waiter = Deferred(self._forget)
        return self._waiter

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
        self._chunks.append(data)
        self._size += len(data)
        if self._size > BODY_HIGH and not self.paused:
            self.paused = True
            self._pause()
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
