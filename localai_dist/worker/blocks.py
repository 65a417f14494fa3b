"""A request's body in blocks of one size, as long as it gives any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from localai_dist.units import MiB
from localai_dist.worker.timing import patient

BLOCK_BYTES = MiB
"""Bytes written and hashed at a time; at most two such blocks of one upload are in memory."""
BODY_SILENCE = 120.0
"""Seconds a body may be silent before the PUT is given up, so that it doesn't keep the key from the next one."""
WANTED_SILENCE = 3.0
"""The same while the next one waits: a sender whose way was cut unnoticed comes back on a new one (BR-070)."""


class Body(Protocol):
    """A request's body (``net.request``)."""

    async def read(self, n: int) -> bytes:
        """Up to ``n`` bytes; empty at the end; raises if the client is gone."""


def nobody_waits() -> bool:
    """A body whose key nobody else wants."""
    return False


async def read_some(body: Body, count: int, clock: Any, wanted: Callable[[], bool] = nobody_waits) -> bytes:
    """
    Up to ``count`` bytes of ``body``; empty at its end.

    Args:
        wanted: whether somebody else waits for this body's end.

    Raises:
        TooLate: nothing came for ``BODY_SILENCE``, or for ``WANTED_SILENCE`` while it was wanted.
        Exception: what ``body.read`` raised.
    """

    def over(silent: float) -> bool:
        return silent >= BODY_SILENCE or wanted()

    return await patient(body.read(count), over, WANTED_SILENCE, clock, "no byte of the body came for {:.0f} s")


class Blocks:
    """
    The blocks of a body; when it breaks off, what it had given comes first and then its error.

    Args:
        first: bytes that were read from it already.
        body: the rest.
        limit: bytes wanted in all, or None for everything.
        clock: for ``BODY_SILENCE``.
        wanted: as for ``read_some``.
    """

    def __init__(
        self, first: bytes, body: Body, limit: int | None, clock: Any, wanted: Callable[[], bool] = nobody_waits
    ) -> None:
        self._block = bytearray(first if limit is None else first[:limit])
        self._left = None if limit is None else limit - len(self._block)
        self._body = body
        self._clock = clock
        self._wanted = wanted
        self._over = not first
        self._failure: Exception | None = None

    async def next(self) -> bytes:
        """
        The next block, full unless it is the last; empty at the end.

        Raises:
            Exception: what the body raised, once everything before that was given.
        """
        while not self._over and self._left != 0 and len(self._block) < BLOCK_BYTES:
            await self._more()
        if not self._block and self._failure is not None:
            raise self._failure
        block = bytes(self._block)
        self._block.clear()
        return block

    async def _more(self) -> None:
        room = BLOCK_BYTES - len(self._block)
        count = room if self._left is None else min(room, self._left)
        try:
            chunk = await read_some(self._body, count, self._clock, self._wanted)
        except Exception as error:  # noqa: BLE001 - kept, and raised by next() once what came before it is taken
            self._failure = error
            self._over = True
            return
        self._over = not chunk
        self._block += chunk
        if self._left is not None:
            self._left -= len(chunk)
