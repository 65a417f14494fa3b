"""
A map that is the same on every frontend: a write here is published, a write elsewhere is applied here.

What is applied is never stored again nor sent on. Messages may be lost, so the map is read anew from where it is
stored: at the start, and whenever something may have been missed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from localai_dist.bus.envelope import Message
from localai_dist.bus.subscription import OnMessage, OnMissed, Subscription

V = TypeVar("V")


class Publishes(Protocol):
    """``Publisher``."""

    def publish(self, subject: str, value: object) -> Awaitable[None]:
        """Send it; raises ``StoreError``."""


class Subscribes(Protocol):
    """``Subscriber``."""

    def subscribe(
        self, subjects: str, on_message: OnMessage, on_missed: OnMissed | None = None
    ) -> Awaitable[Subscription]:
        """Be called."""


class _Delta(msgspec.Struct, frozen=True):
    """One write: ``o`` who wrote, ``k`` the key, ``v`` the value; absent when the key was deleted."""

    o: str
    k: str
    v: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Mirror(Generic[V]):
    """
    One replicated map from text to values of one kind.

    Args:
        name: of the map; its subject is ``state.<name>.delta``.
        kind: the values' type, as ``msgspec`` reads it.
        origin: this frontend, so that it ignores its own messages.
        hydrate: reads the whole map from where it is stored.
        store: writes one value there before anybody hears of it (None: deleted); without it the map lives in memory.
        on_apply: told of each write of another frontend.
    """

    log = Logger()

    def __init__(
        self,
        name: str,
        kind: type[V],
        *,
        publisher: Publishes,
        subscriber: Subscribes,
        origin: str,
        hydrate: Callable[[], Awaitable[Mapping[str, V]]],
        store: Callable[[str, V | None], Awaitable[None]] | None = None,
        on_apply: Callable[[str, V | None], None] | None = None,
    ) -> None:
        self.subject = f"state.{name}.delta"
        self._kind: Any = kind
        self._publisher = publisher
        self._subscriber = subscriber
        self._origin = origin
        self._hydrate = hydrate
        self._store = store
        self._on_apply = on_apply
        self._values: dict[str, V] = {}
        self._hydrating = DeferredLock()
        self._meanwhile: set[str] | None = None
        self._subscription: Subscription | None = None

    def __iter__(self) -> Iterator[str]:
        """The keys there are now."""
        return iter(list(self._values))

    def get(self, key: str) -> V | None:
        """The value of ``key`` as known here."""
        return self._values.get(key)

    async def start(self) -> None:
        """
        Subscribe first, then read the whole.

        Raises:
            StoreError: the database did not answer; not started.
        """
        self._subscription = await self._subscriber.subscribe(self.subject, self._heard, self.hydrate)
        try:
            await self.hydrate()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Hear no more."""
        if self._subscription is not None:
            self._subscription.cancel()
            self._subscription = None

    async def put(self, key: str, value: V) -> None:
        """Write ``key`` here and everywhere; raises ``StoreError``: not stored, or not told."""
        await self._write(key, value)

    async def delete(self, key: str) -> None:
        """Remove ``key`` here and everywhere; raises as ``put``."""
        await self._write(key, None)

    async def hydrate(self) -> None:
        """
        Replace the map by what is stored; what is written or heard meanwhile stays, because it is no older.

        Raises:
            StoreError: the database did not answer; the map is as it was.
        """
        await self._hydrating.acquire()
        written = self._meanwhile = set()
        try:
            found = dict(await self._hydrate())
        finally:
            self._meanwhile = None
            self._hydrating.release()
        for key in written:
            found.pop(key, None)
            if key in self._values:
                found[key] = self._values[key]
        self._values = found

    async def _write(self, key: str, value: V | None) -> None:
        if self._store is not None:
            await self._store(key, value)
        self._set(key, value)
        raw = msgspec.UNSET if value is None else msgspec.Raw(msgspec.json.encode(value))
        await self._publisher.publish(self.subject, _Delta(self._origin, key, raw))

    def _heard(self, message: Message) -> None:
        delta = message.read(_Delta)
        if delta.o == self._origin:
            return
        value = None if isinstance(delta.v, msgspec.UnsetType) else msgspec.json.decode(delta.v, type=self._kind)
        self._set(delta.k, value)
        if self._on_apply is not None:
            self._on_apply(delta.k, value)

    def _set(self, key: str, value: V | None) -> None:
        if self._meanwhile is not None:
            self._meanwhile.add(key)
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value
