"""Reading on what nobody wants: a client that is still sending sees the answer instead of a reset."""

from __future__ import annotations

from twisted.internet.defer import CancelledError
from twisted.internet.error import ConnectionClosed
from twisted.internet.interfaces import IReactorTime

from localai_dist.net.body import RequestBody
from localai_dist.net.request import DISCARD_MAX, DISCARD_TIME
from localai_dist.reach import Unreached
from localai_dist.serving.deadline import within


async def discard(body: RequestBody, *, clock: IReactorTime) -> None:
    """Drop what still comes of ``body``: at most ``DISCARD_MAX`` bytes, for at most ``DISCARD_TIME``; never fails."""

    async def drop() -> None:
        left = DISCARD_MAX
        while left > 0 and (chunk := await body.read()):
            left -= len(chunk)

    try:
        await within(clock, clock.seconds() + DISCARD_TIME, drop())
    except (CancelledError, ConnectionClosed, Unreached):
        return  # the client left, or had its time
