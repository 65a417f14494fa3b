"""Notifications in their order of arrival, each with its payload, read from the table where it was too long."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.bus.envelope import Message, Spilled, decode
from localai_dist.bus.errors import BadEnvelope
from localai_dist.store.errors import StoreError

QUEUE: Final = 1024
"""Notifications that may wait for a payload before them; further ones are dropped, never blocking the socket."""

READERS: Final = 2
"""Spilled payloads that are read or held at once; half of the pool is left to requests."""


@dataclass(slots=True)
class _Place:
    """
    One message's place in the order, or a gap's.

    Attributes:
        subject: of the message; None for a gap left by notifications that found the queue full.
        message: stays None when its payload is lost.
    """

    subject: str | None
    spilled: Spilled | None
    message: Message | None
    ready: bool


class Resolver:
    """
    Puts payloads to notifications without changing their order.

    Args:
        read: the payload of a spilled message, None when its row is gone; raises ``StoreError``.
        wanted: whether anybody wants a subject; what nobody wants is not read.
        deliver: given each message.
        lost: told the subject of each message that will never be delivered; None: of any subject.

    Attributes:
        dropped: notifications that found the queue full.
        unresolved: messages whose payload could not be read.
        foreign: notifications that are none of ours.
    """

    log = Logger()

    def __init__(
        self,
        read: Callable[[Spilled], Awaitable[bytes | None]],
        *,
        wanted: Callable[[str], bool],
        deliver: Callable[[Message], None],
        lost: Callable[[str | None], None],
    ) -> None:
        self._read = read
        self._wanted = wanted
        self._deliver = deliver
        self._lost = lost
        self._queue: deque[_Place] = deque()
        self._unread: deque[_Place] = deque()
        self._held = 0
        self._reading: set[Deferred[None]] = set()
        self._stopped = False
        self.dropped = self.unresolved = self.foreign = 0

    def begin(self) -> None:
        """Deliver (again)."""
        self._stopped = False

    def arrived(self, text: str) -> None:
        """A notification; never raises."""
        if self._stopped:
            return
        try:
            decoded = decode(text)
        except BadEnvelope as error:
            self.foreign += 1
            self.log.warn("ignoring a notification: {error}", error=str(error))
            return
        if not self._wanted(decoded.subject):
            return
        if len(self._queue) >= QUEUE:
            self.dropped += 1
            if self._queue[-1].subject is not None:  # one gap, however long; it lies where the messages would
                self._queue.append(_Place(None, None, None, True))
            return
        if isinstance(decoded, Spilled):
            place = _Place(decoded.subject, decoded, None, False)
            self._unread.append(place)
        else:
            place = _Place(decoded.subject, None, decoded, True)
        self._queue.append(place)
        self._go_on()

    def stop(self) -> None:
        """Deliver no more."""
        self._stopped = True
        self._queue.clear()
        self._unread.clear()
        self._held = 0
        for reading in list(self._reading):
            reading.cancel()

    def _go_on(self) -> None:
        while self._unread and self._held < READERS:
            self._held += 1
            self._begin(self._unread.popleft())
        while self._queue and self._queue[0].ready:
            place = self._queue.popleft()
            if place.spilled is not None:
                self._held -= 1
            if place.message is not None:
                self._deliver(place.message)
            else:
                self._lost(place.subject)
        if self._unread and self._held < READERS:
            self._go_on()

    def _begin(self, place: _Place) -> None:
        reading = Deferred.fromCoroutine(self._fetch(place))
        self._reading.add(reading)
        reading.addErrback(lambda failure: None if self._stopped else self._broken(failure, place))
        reading.addCallback(self._ended, reading)

    async def _fetch(self, place: _Place) -> None:
        spilled = place.spilled
        assert spilled is not None
        try:
            payload = await self._read(spilled)
        except StoreError as error:
            self.log.warn("a message on {subject} is lost: {error}", subject=place.subject, error=str(error))
            payload = None
        if payload is None:
            self.unresolved += 1
        else:
            place.message = Message(spilled.subject, payload)
        place.ready = True

    def _broken(self, failure: Failure, place: _Place) -> None:
        self.log.failure("reading a message on {subject} failed", failure, subject=place.subject)
        self.unresolved += 1
        place.ready = True

    def _ended(self, _: object, reading: Deferred[None]) -> None:
        self._reading.discard(reading)
        if not self._stopped:
            self._go_on()
