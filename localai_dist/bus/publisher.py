"""Sends messages to every frontend, this one included."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.bus.envelope import Message, Spilled, channel_of, encode, fits, payload_of
from localai_dist.store.errors import StoreError
from localai_dist.store.statements import load_statements

T = TypeVar("T")

SQL = load_statements("bus.sql")

HINTS_UNDER_WAY: Final = 64
"""Hints that may wait for the database at once; further ones are dropped."""


class Runs(Protocol):
    """What is needed of the pool."""

    def fetch(self, statement: str, params: Mapping[str, Any]) -> Awaitable[list[dict[str, Any]]]:
        """Rows; raises ``StoreError``."""


@dataclass(slots=True)
class Published:
    """
    What was sent so far.

    Attributes:
        inline: messages in one notification.
        spilled: messages with a row.
        dropped: hints that were not sent.
    """

    inline: int = 0
    spilled: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class _Packed:
    """A message as a statement and its parameters."""

    statement: str
    values: Mapping[str, Any]


class Publisher:
    """
    Publishes.

    Args:
        pool: the database.
        fresh_id: a new unique id for each spilled payload.
    """

    log = Logger()

    def __init__(self, pool: Runs, *, fresh_id: Callable[[], str] = lambda: str(uuid.uuid4())) -> None:
        self._pool = pool
        self._fresh_id = fresh_id
        self._under_way: set[Deferred[None]] = set()
        self.published = Published()

    async def publish(self, subject: str, value: object) -> None:
        """
        Send ``value`` on ``subject``; returns when PostgreSQL has it, which says nothing about who hears it.

        Raises:
            UnknownSubject, Unpublishable: a mistake of the caller; nothing was sent.
            StoreError: not known whether it was sent.
        """
        await self._send(self._packed(subject, value))

    def hint(self, subject: str, value: object) -> None:
        """
        Send it some time soon, or not at all: for what is found out anyway, only later.

        Raises:
            UnknownSubject, Unpublishable: a mistake of the caller.
        """
        packed = self._packed(subject, value)
        if len(self._under_way) >= HINTS_UNDER_WAY:
            self.published.dropped += 1
            return
        sending = Deferred.fromCoroutine(self._send(packed))
        self._under_way.add(sending)
        sending.addBoth(self._arrived, sending)
        sending.addErrback(self._not_sent, subject)

    def stop(self) -> None:
        """Give up what is under way."""
        for sending in list(self._under_way):
            sending.cancel()

    def _packed(self, subject: str, value: object) -> _Packed:
        channel = channel_of(subject)
        message = Message(subject, payload_of(value))
        encoded = encode(message)
        if fits(encoded):
            return _Packed("notify", {"channel": channel, "message": encoded.decode()})
        spilled = Spilled(subject, self._fresh_id())
        row = {"id": spilled.id, "subject": subject, "payload": message.payload}
        return _Packed("spill", {**row, "channel": channel, "message": encode(spilled).decode()})

    async def _send(self, packed: _Packed) -> None:
        await self._pool.fetch(SQL[packed.statement], packed.values)
        if packed.statement == "spill":
            self.published.spilled += 1
        else:
            self.published.inline += 1

    def _arrived(self, result: T, sending: Deferred[None]) -> T:
        self._under_way.discard(sending)
        return result

    def _not_sent(self, failure: Failure, subject: str) -> None:
        self.published.dropped += 1
        if failure.check(StoreError, CancelledError) is None:
            self.log.failure("publishing on {subject} failed", failure, subject=subject)
        else:
            self.log.info("not told on {subject}: {why}", subject=subject, why=failure.getErrorMessage())
