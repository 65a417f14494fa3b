"""Who wants which messages, on the one LISTEN connection of this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from localai_dist.bus.envelope import Filter, Message, Spilled, channel_of
from localai_dist.bus.publisher import SQL
from localai_dist.bus.resolver import Resolver
from localai_dist.bus.subscription import OnMessage, OnMissed, Subscription


class Listens(Protocol):
    """What is needed of ``store.Listener``."""

    def listen(self, channel: str, callback: Callable[[str], None]) -> Awaitable[None]:
        """Returns when LISTEN is acknowledged; raises ``StoreError``."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Called after each reconnection, when LISTEN is in force again."""


class Reads(Protocol):
    """What is needed of the pool."""

    def fetch_one(self, statement: str, params: Mapping[str, Any]) -> Awaitable[dict[str, Any] | None]:
        """One row; raises ``StoreError``."""


class Subscriber:
    """
    The subscriptions of this process.

    A channel that was listened to once is listened to until the end: there are ten, and a message nobody wants costs
    one comparison, while a LISTEN that races with an UNLISTEN costs messages.
    """

    log = Logger()

    def __init__(self, listener: Listens, pool: Reads) -> None:
        self._listener = listener
        self._pool = pool
        self._lock = DeferredLock()  # whether to LISTEN, and the LISTEN itself, are one step
        self._channels: set[str] = set()
        self._subscriptions: list[Subscription] = []
        self.resolver = Resolver(self._payload, wanted=self._wanted, deliver=self._deliver, lost=self._lost)

    @property
    def dropped(self) -> int:
        """Messages that some subscriber of now did not get because its queue was full."""
        return sum(each.dropped for each in self._subscriptions)

    def begin(self) -> None:
        """Hear of reconnections; called whenever the listener was started."""
        self.resolver.begin()
        self._listener.on_reconnect(self.missed)

    async def subscribe(self, subjects: str, on_message: OnMessage, on_missed: OnMissed | None = None) -> Subscription:
        """
        Be called with each message on ``subjects`` that is published after this returns.

        Args:
            subjects: a subject, or a filter with ``*`` for single words.
            on_message: see ``Subscription``.
            on_missed: see ``Subscription``; called after a reconnection, a drop, or a payload that was lost.

        Raises:
            UnknownSubject: a filter this program may not use.
            StoreError: LISTEN was not acknowledged; nothing is subscribed.
        """
        subscription = Subscription(Filter.parse(subjects), on_message, on_missed)
        channel = channel_of(str(subscription.filter).replace("*", "any"))
        await self._lock.acquire()
        try:
            if channel not in self._channels:
                await self._listener.listen(channel, self.resolver.arrived)
                self._channels.add(channel)
        finally:
            self._lock.release()
        self._subscriptions.append(subscription)
        return subscription

    def missed(self) -> None:
        """Tell everybody that something may have been missed."""
        for each in self._living():
            each.missed()

    def stop(self) -> None:
        """Call nobody any more; every subscription is over, also for a later ``begin``."""
        self.resolver.stop()
        for each in self._subscriptions:
            each.cancel()
        self._subscriptions.clear()
        self._channels.clear()

    def _living(self) -> list[Subscription]:
        self._subscriptions = [each for each in self._subscriptions if not each.cancelled]
        return list(self._subscriptions)

    def _matching(self, subject: str) -> list[Subscription]:
        return [each for each in self._living() if each.filter.matches(subject)]

    def _wanted(self, subject: str) -> bool:
        return bool(self._matching(subject))

    def _deliver(self, message: Message) -> None:
        for each in self._matching(message.subject):
            each.put(message)

    def _lost(self, subject: str | None) -> None:
        for each in self._living() if subject is None else self._matching(subject):
            each.missed()

    async def _payload(self, spilled: Spilled) -> bytes | None:
        row = await self._pool.fetch_one(SQL["payload"], {"id": spilled.id})
        return None if row is None else bytes(row["payload"])
