"""A test case with a database of its own, and a way to wait for facts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from localai_dist.store.listener import Listener
from localai_dist.store.pool import Pool
from localai_dist.store.schema import migrate_sync
from localai_dist.testing.databases import private_server, shared
from localai_dist.testing.postgres import PostgresServer


async def until(fact: Callable[[], Any], what: str, *, within: float = 10.0) -> Any:
    """The first true value of ``fact``; fails naming ``what`` if it does not come ``within`` seconds."""
    end = reactor.seconds() + within  # type: ignore[attr-defined]
    while True:
        found = fact()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return found
        if reactor.seconds() > end:  # type: ignore[attr-defined]
            raise AssertionError(f"not within {within:g} s: {what}")
        await deferLater(reactor, 0.01)


class DatabaseTestCase(TestCase):
    """A migrated database for the class; pools and listeners that end with the test."""

    timeout = 90
    url: str

    def setUp(self) -> None:
        """A fresh copy of the template at the class's first test (trial knows no setUpClass)."""
        if "url" not in type(self).__dict__:
            type(self).url = shared().fresh()

    async def pool(self, url: str | None = None, **options: Any) -> Pool:
        """A started pool that is stopped when the test ends."""
        pool = Pool(url or self.url, reactor=reactor, **{"size": 2, "chance": lambda: 0.0, **options})
        self.addCleanup(lambda: Deferred.fromCoroutine(pool.stop()))
        await pool.start()
        return pool

    async def listener(self, url: str | None = None, **options: Any) -> Listener:
        """A started listener that is stopped when the test ends."""
        listener = Listener(url or self.url, reactor, **{"chance": lambda: 0.0, **options})
        self.addCleanup(lambda: Deferred.fromCoroutine(listener.stop()))
        await listener.start()
        return listener

    async def assert_raises(self, kind: type[BaseException], awaited: Awaitable[Any]) -> Any:
        """The exception of that kind that ``awaited`` must raise."""
        try:
            result = await awaited
        except kind as error:
            return error
        raise AssertionError(f"{kind.__name__} not raised, got {result!r}")


class OwnServerCase(DatabaseTestCase):
    """A PostgreSQL of each test's own, because it goes down; its database is migrated."""

    server: PostgresServer

    def setUp(self) -> None:
        """Start it; it is stopped with the test."""
        self.server = private_server()
        self.addCleanup(self.server.stop)
        self.url = self.server.url()
        migrate_sync(self.url)
