"""A bus without a database: notifications and rows are the test's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from twisted.internet.defer import Deferred

from localai_dist.bus.envelope import Message, Spilled, encode, payload_of
from localai_dist.store.errors import StoreUnavailable


class MemoryListener:
    """Channels, and what is said on them."""

    def __init__(self) -> None:
        self.listening: list[str] = []
        self.callbacks: dict[str, list[Callable[[str], None]]] = {}
        self.reconnected: list[Callable[[], None]] = []
        self.acknowledging: Deferred[None] | None = None
        self.down = False

    async def listen(self, channel: str, callback: Callable[[str], None]) -> None:
        """As ``Listener.listen``."""
        if self.acknowledging is not None:
            await self.acknowledging
        if self.down:
            raise StoreUnavailable("away")
        self.listening.append(channel)
        self.callbacks.setdefault(channel, []).append(callback)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """As ``Listener.on_reconnect``."""
        self.reconnected.append(callback)

    def notify(self, channel: str, text: str) -> None:
        """Something is said."""
        for callback in self.callbacks.get(channel, []):
            callback(text)

    def say(self, subject: str, value: object) -> None:
        """A message that fits."""
        text = encode(Message(subject, payload_of(value))).decode()
        self.notify(f"localai_{subject.split('.', 1)[0]}", text)

    def say_spilled(self, subject: str, id: str) -> None:
        """A message whose payload is in a row."""
        self.notify(f"localai_{subject.split('.', 1)[0]}", encode(Spilled(subject, id)).decode())


class Rows:
    """The pool: statements are kept; payloads are read from ``payloads``, each read waiting for the test if told to."""

    def __init__(self) -> None:
        self.sent: list[Mapping[str, Any]] = []
        self.payloads: dict[str, bytes] = {}
        self.reads: list[tuple[str, Deferred[None]]] = []
        self.held = False
        self.hanging: Deferred[None] | None = None
        self.down = False
        self.fault: Exception | None = None

    async def fetch(self, statement: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send."""
        if self.hanging is not None:
            await self.hanging
        if self.down:
            raise StoreUnavailable("away")
        if self.fault is not None:
            raise self.fault
        self.sent.append(params)
        return [{}]

    async def fetch_one(self, statement: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """Read a payload."""
        if self.held:
            waiting: Deferred[None] = Deferred()
            self.reads.append((params["id"], waiting))
            await waiting
        if self.down:
            raise StoreUnavailable("away")
        if self.fault is not None:
            raise self.fault
        found = self.payloads.get(params["id"])
        return None if found is None else {"payload": memoryview(found)}
