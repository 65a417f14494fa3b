"""A request's body in blocks of about one size, as long as it gives any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from localai_dist.units import MiB
from localai_dist.worker.timing import patient

BLOCK_BYTES = MiB
"""Bytes written and hashed at a time. Of one upload one such block is being written, one waits, one is gathered."""
BODY_SILENCE = 120.0
"""Seconds a body may be silent before the PUT is given up, so that it doesn't keep the key from the next one."""
WANTED_SILENCE = 3.0
"""The same while the next one waits: a sender whose way was cut unnoticed comes back on a new one (BR-070)."""


class Body(Protocol):
    """A request's body (``net.body``)."""

    @property
    def received(self) -> int:
        """Bytes that arrived so far."""

    async def gather(self, count: int) -> list[bytes]:
        """
        ``count`` bytes or more in chunks, less at the end, and there ``[]``; raises if the client is gone.

        Cancelling takes nothing; a ``count`` of 0 takes what is there, and neither waits nor raises.
        """


def nobody_waits() -> bool:
    """A body whose key nobody else wants."""
    return False


async def gather(body: Body, count: int, clock: Any, wanted: Callable[[], bool] = nobody_waits) -> list[bytes]:
    """
    ``count`` bytes or more of ``body`` in chunks; less at its end, and there ``[]``.

    Args:
        wanted: whether somebody else waits for this body's end.

    Raises:
        TooLate: no byte came for ``BODY_SILENCE``, or for ``WANTED_SILENCE`` while it was wanted; none was taken.
        Exception: what ``body.gather`` raised.
    """
    seen, heard = body.received, 0.0

    def over(waited: float) -> bool:
        nonlocal seen, heard
        if body.received != seen:
            seen, heard = body.received, waited
        silent = waited - heard
        return silent >= BODY_SILENCE or (silent >= WANTED_SILENCE and wanted())

    return await patient(body.gather(count), over, WANTED_SILENCE, clock, "no byte of the body came for {:.0f} s")


class Blocks:
    """
    The blocks of a body; when it breaks off, what it had given comes first and then its error.

    Args:
        first: chunks that were taken from it already.
        body: the rest.
        limit: bytes wanted in all, or None for everything.
        clock: for ``BODY_SILENCE``.
        wanted: as for ``gather``.
    """

    def __init__(
        self, first: list[bytes], body: Body, limit: int | None, clock: Any, wanted: Callable[[], bool] = nobody_waits
    ) -> None:
        self._first = first
        self._left = limit
        self._body = body
        self._clock = clock
        self._wanted = wanted
        self._over = not first
        self._failure: Exception | None = None

    async def next(self) -> list[bytes]:
        """
        The next block in chunks, of ``BLOCK_BYTES`` and a chunk at most; the last may be short; ``[]`` at the end.

        Raises:
            Exception: what the body raised, once everything before that was given.
        """
        chunks, self._first = self._first, []
        missing = BLOCK_BYTES if self._left is None else min(BLOCK_BYTES, self._left)
        missing -= sum(map(len, chunks))
        if missing > 0 and not self._over:
            chunks += await self._more(missing)
        if not chunks and self._failure is not None:
            raise self._failure
        return self._cut(chunks)

    async def _more(self, count: int) -> list[bytes]:
        try:
            chunks = await gather(self._body, count, self._clock, self._wanted)
        except Exception as error:  # noqa: BLE001 - kept, and raised by next() once what came before it is taken
            self._failure = error
            self._over = True
            return await self._body.gather(0)
        self._over = not chunks
        return chunks

    def _cut(self, chunks: list[bytes]) -> list[bytes]:
        """``chunks`` as far as they are within the limit."""
        if self._left is None:
            return chunks
        taken = []
        for chunk in chunks:
            if self._left:
                taken.append(chunk if len(chunk) <= self._left else chunk[: self._left])
                self._left -= len(taken[-1])
        return taken
