"""One call: the replies that came and were not read yet, what was credited for them, and how it ended."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from localai_dist.grpcclient.framing import MessageBuffer
from localai_dist.grpcclient.status import Origin, RpcError, StatusCode
from localai_dist.units import KiB

WINDOW: Final = 256 * KiB
"""Bytes a backend may send of one call before somebody reads them."""

_PREFIX: Final = 5


class CallOwner(Protocol):
    """What a call needs of its connection."""

    def reset(self, stream_id: int) -> None:
        """Tell the backend that nobody wants this call any more; forget it."""

    def credit(self, stream_id: int, count: int) -> None:
        """Let the backend send ``count`` more bytes of this call."""


class Call:
    """
    One call on a connection.

    Bytes are credited when they are *read*, so a reader that stops stops the backend after ``WINDOW`` bytes. While a
    reader waits, the bytes of the message it waits for are credited as they come: a message may be larger than the
    window (up to ``framing.MESSAGE_LIMIT``).
    """

    def __init__(self, owner: CallOwner, stream_id: int, clock: IReactorTime, timeout: float | None) -> None:
        self.stream_id: Final = stream_id
        self._owner = owner
        self._clock = clock
        self._buffer = MessageBuffer()
        self._ready: deque[bytes] = deque()
        self._waiter: Deferred[None] | None = None
        self._ended = False
        self._error: RpcError | None = None
        self._unread = 0  # bytes received and neither read nor credited early
        self._early = 0  # bytes of the unfinished message that were credited before it was whole
        self._owed = 0  # bytes read that the backend was not told about yet
        self._deadline = None if timeout is None else clock.seconds() + timeout
        self._timer: IDelayedCall | None = None
        if timeout is not None:
            self._timer = clock.callLater(max(0.0, timeout), self._expire)

    async def read(self) -> bytes | None:
        """
        The next reply, or None after the last one. Cancelling it cancels the call on the backend.

        Raises:
            RpcError: how the call ended, after the replies that came before.
        """
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            if self._waiter is not None:
                raise RuntimeError("this call is being read already")
            self._credit_waiting()
            waiter: Deferred[None] = Deferred(self._abandon)
            self._waiter = waiter
            await waiter
        message = self._ready.popleft()
        self._release(len(message) + _PREFIX - self._early)
        self._early = 0
        return message

    def cancel(self) -> None:
        """Stop the call on the backend (RST_STREAM); its reader gets CANCELLED. Nothing once the call is over."""
        self._stop(RpcError(StatusCode.CANCELLED, "the call was cancelled here", Origin.CALLER))

    def received(self, chunk: bytes, flow_controlled: int) -> None:
        """
        Bytes of replies came (called by the connection, which calls ``wake`` when it is through with its input).

        Args:
            chunk: the bytes.
            flow_controlled: what they count against the window, padding included.
        """
        if self._ended:
            return
        self._unread += flow_controlled
        try:
            self._ready.extend(self._buffer.feed(chunk))
        except RpcError as error:
            self._stop(error)
            return
        if self._waiter is not None and not self._ready:
            self._credit_waiting()

    def finish(self, error: RpcError | None) -> None:
        """The call ended, well (None) or not (called by the connection, which calls ``wake`` afterwards)."""
        if self._ended:
            return
        if error is None and len(self._buffer):
            error = RpcError(StatusCode.INTERNAL, "the backend ended the call in the middle of a reply")
        self._ended = True
        self._error = self._blamed(error)
        if self._timer is not None and self._timer.active():
            self._timer.cancel()

    def wake(self) -> None:
        """Let the waiting reader go on, if there is one and something for it."""
        if self._waiter is not None and (self._ready or self._ended):
            waiter, self._waiter = self._waiter, None
            waiter.callback(None)

    def _blamed(self, error: RpcError | None) -> RpcError | None:
        """A backend that watches the caller's deadline too may say so first: that is still the caller's deadline."""
        if error is None or self._deadline is None or error.origin is not Origin.BACKEND:
            return error
        late = error.status is StatusCode.CANCELLED and self._clock.seconds() >= self._deadline
        if late or error.status is StatusCode.DEADLINE_EXCEEDED:
            return RpcError(StatusCode.DEADLINE_EXCEEDED, "the caller's deadline passed", Origin.CALLER)
        return error

    def _expire(self) -> None:
        self._stop(RpcError(StatusCode.DEADLINE_EXCEEDED, "the caller's deadline passed", Origin.CALLER))

    def _stop(self, error: RpcError) -> None:
        if self._ended:
            return
        self._ready.clear()
        self.finish(error)
        self._owner.reset(self.stream_id)
        self.wake()

    def _abandon(self, _waiter: Deferred[None]) -> None:
        self._waiter = None
        self.cancel()

    def _credit_waiting(self) -> None:
        self._early = len(self._buffer)
        self._release(self._unread)

    def _release(self, count: int) -> None:
        count = max(0, min(count, self._unread))
        self._unread -= count
        self._owed += count
        if self._owed >= WINDOW // 2 and not self._ended:
            owed, self._owed = self._owed, 0
            self._owner.credit(self.stream_id, owed)
