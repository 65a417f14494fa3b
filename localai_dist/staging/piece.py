"""The body of one upload request: a slice of a file, read in a thread, handed over as the transport takes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IConsumer
from twisted.web.iweb import IBodyProducer
from zope.interface import implementer

from localai_dist.staging.errors import SourceChanged
from localai_dist.staging.reader import InThread, SourceReader
from localai_dist.units import KiB

READ: int = 256 * KiB
"""Bytes of one write, and so of one observation of progress."""

BATCH: int = 4
"""Reads per trip to the thread. While one batch is written the next one is read; more than two are never held."""


@implementer(IBodyProducer)
class PieceBody:
    """
    ``length`` bytes of ``path`` from ``start``.

    Args:
        taken: called with the number of bytes each time the transport has room again after a write. That, not the read
            from the disk, is progress: a read can outrun a socket that nobody drains.
    """

    def __init__(
        self, path: Path, start: int, length: int, *, in_thread: InThread, taken: Callable[[int], None]
    ) -> None:
        self.length = length
        self._path = path
        self._start = start
        self._in_thread = in_thread
        self._taken = taken
        self._paused = False
        self._stopped = False
        self._unacknowledged = 0
        self._wake: Deferred[None] | None = None

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        """
        Write everything to ``consumer``; errs with ``SourceChanged`` if the file ended early.

        The Deferred never fires once the producer was stopped, as ``IBodyProducer`` wants it.
        """
        done: Deferred[None] = Deferred(lambda _: writing.cancel())
        writing = Deferred.fromCoroutine(self._produce(consumer))
        writing.addBoth(self._finished, done)
        return done

    def _finished(self, result: Any, done: Deferred[None]) -> None:
        if not self._stopped:
            done.callback(result)

    def pauseProducing(self) -> None:
        """The transport is full."""
        self._paused = True

    def resumeProducing(self) -> None:
        """The transport has room: what was written before has been taken."""
        self._paused = False
        self._acknowledge()
        self._wake_up()

    def stopProducing(self) -> None:
        """The request is over, whole or not."""
        self._stopped = True
        self._wake_up()

    def confirmed(self) -> None:
        """The far side said that it has everything: what was written last counts too, room or not."""
        self._acknowledge()

    async def _produce(self, consumer: IConsumer) -> None:
        reader: SourceReader = await self._in_thread(SourceReader, self._path, self._start)
        left = self.length
        ahead = self._ahead(reader, left)
        try:
            while left:
                chunks = await ahead
                left -= sum(map(len, chunks))
                ahead = self._ahead(reader, left)
                for chunk in chunks:
                    if not chunk:
                        raise SourceChanged(f"{self._path} is shorter than it was; is it being replaced?")
                    if not await self._room():
                        return
                    self._write(consumer, chunk)
        finally:
            ahead.addErrback(lambda _: None)  # what nobody waits for any more may fail
            self._in_thread(reader.close)

    def _ahead(self, reader: SourceReader, left: int) -> Deferred[list[bytes]]:
        """The next batch, being read."""

        async def batch() -> list[bytes]:
            chunks: list[bytes] = await self._in_thread(reader.read_batch, min(READ * BATCH, left), READ)
            return chunks

        return Deferred.fromCoroutine(batch()) if left else succeed([])

    def _write(self, consumer: IConsumer, chunk: bytes) -> None:
        self._unacknowledged += len(chunk)
        consumer.write(chunk)
        if not self._paused:
            self._acknowledge()

    async def _room(self) -> bool:
        """Wait for room; whether to go on at all."""
        while self._paused and not self._stopped:
            self._wake = Deferred()
            await self._wake
        return not self._stopped

    def _wake_up(self) -> None:
        if self._wake is not None:
            wake, self._wake = self._wake, None
            wake.callback(None)

    def _acknowledge(self) -> None:
        count, self._unacknowledged = self._unacknowledged, 0
        if count:
            self._taken(count)
