"""Opens that wait until the far side has accepted earlier ones, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import LocalProtocolError

if TYPE_CHECKING:
    from localai_dist.net.stream import MuxStream


class QueueOfOpens:
    """
    The waiting opens of one session.

    Args:
        open_now: opens a stream; raises ``LocalProtocolError`` when the session can't.
    """

    def __init__(self, open_now: Callable[[TrafficClass], MuxStream]) -> None:
        self._open_now = open_now
        self._waiting: deque[tuple[Deferred[MuxStream], TrafficClass]] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def join(self, traffic: TrafficClass) -> Deferred[MuxStream]:
        """Wait behind the others; cancelling gives the place up."""
        waiter: Deferred[MuxStream] = Deferred(self._give_up)
        self._waiting.append((waiter, traffic))
        return waiter

    def serve(self) -> None:
        """Open a stream for the first one."""
        waiter, traffic = self._waiting.popleft()
        try:
            stream = self._open_now(traffic)
        except LocalProtocolError:  # the last stream id went while it waited
            waiter.errback()
        else:
            waiter.callback(stream)

    def fail(self, reason: Failure) -> None:
        """Nobody is served any more."""
        waiting, self._waiting = self._waiting, deque()
        for waiter, _ in waiting:
            waiter.errback(reason)

    def _give_up(self, waiter: Deferred[MuxStream]) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not waiter)
