"""One subscriber's queue: bounded, in order, and nobody else's business."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Final, TypeAlias

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from localai_dist.bus.envelope import PAYLOAD_LIMIT, Filter, Message

QUEUE: Final = 256
"""Messages one subscriber may have waiting; further ones are dropped, counted, and told as missed."""

QUEUE_BYTES: Final = 4 * PAYLOAD_LIMIT
"""Payload bytes that may wait with them."""

OnMessage: TypeAlias = Callable[[Message], Awaitable[None] | None]
OnMissed: TypeAlias = Callable[[], Awaitable[None] | None]


class _Mark(Enum):
    MISSED = "something was missed here"


class Subscription:
    """
    Calls one subscriber, one thing at a time, in order of arrival.

    What it raises is logged. While it awaits, its messages wait here; nobody else's do. A callback that is no coroutine
    runs in the reactor and must be quick, like every other.

    Args:
        filter: what it wants.
        on_message: called with each message.
        on_missed: called when messages may have been lost, after those that arrived before: read the database again.

    Attributes:
        dropped: messages that found the queue full.
    """

    log = Logger()

    def __init__(self, filter: Filter, on_message: OnMessage, on_missed: OnMissed | None) -> None:
        self.filter = filter
        self.dropped = 0
        self._on_message = on_message
        self._on_missed = on_missed
        self._queue: deque[Message | _Mark] = deque()
        self._bytes = 0
        self._busy = False
        self._awaited: Deferred[None] | None = None
        self._cancelled = False

    @property
    def waiting(self) -> int:
        """How much waits for the subscriber."""
        return len(self._queue)

    def put(self, message: Message) -> None:
        """One message more."""
        if self._messages_full(len(message.payload)):
            self.dropped += 1
            self.missed()
            return
        self._bytes += len(message.payload)
        self._append(message)

    def missed(self) -> None:
        """Some messages never came; told once for each gap, where it is."""
        if self._on_missed is not None and not (self._queue and self._queue[-1] is _Mark.MISSED):
            self._append(_Mark.MISSED)

    def cancel(self) -> None:
        """Call the subscriber no more; what it awaits is cancelled."""
        self._cancelled = True
        self._queue.clear()
        if self._awaited is not None:
            self._awaited.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._cancelled

    def _messages_full(self, size: int) -> bool:
        # Marks lie between messages and are never two in a row, so they are bounded with them.
        messages = sum(each is not _Mark.MISSED for each in self._queue) if len(self._queue) >= QUEUE else 0
        return messages >= QUEUE or (self._bytes + size > QUEUE_BYTES and bool(self._queue))

    def _append(self, item: Message | _Mark) -> None:
        if self._cancelled:
            return
        self._queue.append(item)
        if not self._busy:
            self._busy = True
            Deferred.fromCoroutine(self._run()).addErrback(
                lambda failure: self.log.failure("the queue of {filter} stopped", failure, filter=str(self.filter))
            )

    async def _run(self) -> None:
        try:
            while self._queue:
                await self._call(self._queue.popleft())
        finally:
            self._busy = False

    async def _call(self, item: Message | _Mark) -> None:
        try:
            if isinstance(item, Message):
                self._bytes -= len(item.payload)
                result = self._on_message(item)
            else:
                result = self._on_missed() if self._on_missed is not None else None
            if result is not None:
                self._awaited = Deferred.fromCoroutine(_waited_for(result))
                await self._awaited
        except CancelledError:
            if not self._cancelled:
                self.log.failure("a subscriber of {filter} was cancelled by somebody else", filter=str(self.filter))
        except Exception:  # noqa: BLE001 - subscribers are isolated from each other; logged with its traceback
            self.log.failure("a subscriber of {filter} failed", filter=str(self.filter))
        finally:
            self._awaited = None


async def _waited_for(result: Awaitable[None]) -> None:
    await result
