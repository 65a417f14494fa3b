"""An object's bytes as they arrive: at most 256 KiB and one read of the socket wait here."""

from __future__ import annotations

from collections import deque
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone

from localai_dist.objects.errors import StoreAway
from localai_dist.units import KiB

_HIGH = 256 * KiB


class ObjectBody(Protocol):
    """
    Reads one response's body; give it to ``deliverBody``. One reader at a time.

    Attributes:
        taken: bytes handed out so far.
    """

    transport: Any

    def __init__(self) -> None:
        self.taken = 0
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._end: StoreAway | None = None
        self._over = False
        self._waiter: Deferred[None] | None = None

    async def read(self, count: int) -> bytes:
        """
        The next bytes, at most ``count``; empty at the end.

        Raises:
            StoreAway: it broke off.
        """
        while not self._chunks:
            if self._end is not None:
                raise self._end
            if self._over:
                return b""
            self._waiter = Deferred()
            await self._waiter
        chunk = self._chunks.popleft()
        if len(chunk) > count:
            self._chunks.appendleft(chunk[count:])
            chunk = chunk[:count]
        self._size -= len(chunk)
        self.taken += len(chunk)
        if not self._over and self._size <= _HIGH < self._size + len(chunk):
            self.transport.resumeProducing()
        return chunk

    def close(self) -> None:
        """Nobody wants the rest."""
        if not self._over and self.transport is not None:
            self.transport.loseConnection()

    def dataReceived(self, data: bytes) -> None:
        """Keep it; over the bound the store is not read from."""
        if self._size <= _HIGH < self._size + len(data):
            self.transport.pauseProducing()
        self._chunks.append(data)
        self._size += len(data)
        self._wake()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The end, clean or not."""
        self._over = True
        if reason.check(ResponseDone) is None:
            self._end = StoreAway(f"the object store broke off: {reason.getErrorMessage()}")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            waiter.callback(None)
