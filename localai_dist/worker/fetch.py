"""
One file on its way from the object store: how far it is, who waits for it, and how it is stopped.

Source: LOAD-17, LOAD-20.
"""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall

from localai_dist.objects.body import ObjectBody
from localai_dist.units import MINUTE
from localai_dist.wire import file_verbs as wire
from localai_dist.wire.files import ContentRange, PutRequest
from localai_dist.worker.errors import WorkerError

T = TypeVar("T")

UNASKED = MINUTE
"""A fetch stops when nobody has asked for so long (s)."""
LEFT_ALONE = 1.0
"""The same when whoever asked last went away without an answer: its load was cancelled, or its way broke (s)."""


class Unasked(WorkerError):
    """Nobody asks for this file any more."""


class Fetch:
    """
    One file under way.

    Attributes:
        reply: what the next one who asks is told.
        asked_at: when somebody asked last, on the clock.
        stopped: it has to end.
    """

    def __init__(self, request: wire.EnsureRequest, sha256: str, path: Path) -> None:
        self.request = request
        self.sha256 = sha256
        self.path = path
        self.reply = wire.EnsureReply()
        self.asked_at = 0.0
        self.stopped = False
        self._over = False
        self._step: Deferred[Any] | None = None
        self._leaving: IDelayedCall | None = None
        self._waiting: list[Deferred[None]] = []

    def is_for(self, request: wire.EnsureRequest) -> bool:
        """Whether it fetches what is asked for."""
        return (request.sha256.lower(), request.size) == (self.sha256, self.request.size)

    def put_from(self, offset: int) -> PutRequest:
        """What an uploader would send."""
        size = self.request.size
        if not size:
            return PutRequest(None, self.sha256, 0)
        return PutRequest(ContentRange(offset, size - 1, size), self.sha256)

    def received(self, count: int) -> None:
        """So many bytes are here."""
        self.reply = wire.EnsureReply(received=count)

    def verified(self, count: int) -> None:
        """So many bytes of what is here are hashed."""
        self.reply = wire.EnsureReply(received=self.reply.received, verified=count)

    def asked(self, now: float) -> None:
        """Somebody asks."""
        self.asked_at = now
        self._stays()

    def left(self, clock: Any) -> None:
        """Whoever asked went away: it stops soon, unless somebody asks again."""
        self._stays()
        if not self._over:
            self._leaving = clock.callLater(LEFT_ALONE, self.stop)

    def stop(self) -> None:
        """End it: what it waits for is given up, what came stays."""
        self.stopped = True
        self._stays()
        if self._step is not None:
            self._step.cancel()

    def check(self, now: float) -> None:
        """Raise ``Unasked`` if it has to end."""
        if self.stopped or now - self.asked_at > UNASKED:
            raise Unasked("nobody asks for this file any more")

    async def unless_stopped(self, work: Awaitable[T]) -> T:
        """
        The result of ``work``, which is cancelled by ``stop``. One at a time.

        Raises:
            Unasked: it was stopped.
        """

        async def waited() -> T:
            return await work

        self._step = Deferred.fromCoroutine(waited())
        try:
            return await self._step
        except CancelledError:
            if self.stopped:
                raise Unasked("nobody asks for this file any more") from None
            raise
        finally:
            self._step = None

    def over(self) -> Deferred[None]:
        """Fires at its end; each call its own."""
        waiter: Deferred[None] = Deferred(lambda cancelled: self._waiting.remove(cancelled))
        if self._over:
            waiter.callback(None)
        else:
            self._waiting.append(waiter)
        return waiter

    def end(self, **outcome: Any) -> None:
        """Tell everybody."""
        received = self.request.size if outcome.get("local_path") else self.reply.received
        self.reply = wire.EnsureReply(received=received, **outcome)
        self._over = True
        self._stays()
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.callback(None)

    def _stays(self) -> None:
        if self._leaving is not None and self._leaving.active():
            self._leaving.cancel()
        self._leaving = None


class FetchBody:
    """A body that counts for its fetch, and ends when nobody asks any more."""

    def __init__(self, body: ObjectBody, fetch: Fetch, offset: int, clock: Any) -> None:
        self._body = body
        self._fetch = fetch
        self._offset = offset
        self._clock = clock
        self._chunks: list[bytes] = []
        self._size = 0

    @property
    def whole(self) -> bool:
        """Whether every byte came."""
        return self._offset + self._body.taken == self._fetch.request.size

    @property
    def received(self) -> int:
        """Bytes read so far."""
        return self._body.taken

    async def gather(self, count: int) -> list[bytes]:
        """See ``blocks.Body``; what was read is kept until it is taken."""
        while self._size < count and (chunk := await self._read(count)):
            self._chunks.append(chunk)
            self._size += len(chunk)
        chunks, self._chunks, self._size = self._chunks, [], 0
        return chunks

    async def _read(self, n: int) -> bytes:
        self._fetch.check(self._clock.seconds())
        chunk = await self._fetch.unless_stopped(self._body.read(n))
        self._fetch.received(self._offset + self._body.taken)
        return chunk

    def close(self) -> None:
        """Nobody wants the rest."""
        self._body.close()
