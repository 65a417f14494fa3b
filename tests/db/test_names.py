"""A database known by name."""

from __future__ import annotations

import threading

from twisted.internet import reactor
from twisted.internet.defer import Deferred

from localai_dist.store.connection import Connection
from localai_dist.store.errors import StoreUnavailable
from localai_dist.store.names import Names, look_up
from tests.db.case import DatabaseTestCase, until
from tests.db.link import Link


class NamesTests(DatabaseTestCase):
    """Looked up in a thread."""

    async def test_one_lookup_at_a_time(self) -> None:
        """Many ask for one name: one thread looks it up, all get the answer."""
        asked: list[str] = []
        release = threading.Event()

        def blocking(name: str) -> list[str]:
            asked.append(name)
            release.wait(10)
            return ["127.0.0.1"]

        names = Names(reactor, blocking=blocking)
        waiting = [Deferred.fromCoroutine(names.resolved("host=db.example")) for _ in range(5)]
        await until(lambda: asked, "the lookup began")
        release.set()
        for each in waiting:
            self.assertIn("hostaddr=127.0.0.1", await each)
        self.assertEqual(asked, ["db.example"])

    async def test_a_name_server_that_is_away_costs_no_more_than_the_timeout(self) -> None:
        """While a name is looked up nothing blocks, and opening fails in time."""
        release = threading.Event()

        def blocking(name: str) -> list[str]:
            release.wait(10)
            return ["127.0.0.1"]

        names = Names(reactor, blocking=blocking)
        connection = Connection("host=db.example dbname=x", reactor=reactor, connect_timeout=0.1, names=names)
        error = await self.assert_raises(StoreUnavailable, connection.open())
        self.assertIn("did not accept a connection in 0.1 s", str(error))
        release.set()
        await until(lambda: not names._asked, "the lookup ended")

    async def test_an_unknown_name_is_unavailable(self) -> None:
        """A name without an address fails the opening, naming host and cause."""

        def blocking(name: str) -> list[str]:
            raise OSError("Name or service not known")

        connection = Connection("host=db.example", reactor=reactor, names=Names(reactor, blocking=blocking))
        error = await self.assert_raises(StoreUnavailable, connection.open())
        self.assertIn("db.example/: Name or service not known", str(error))

    async def test_a_database_known_by_name(self) -> None:
        """Over TCP, by a name that may have several addresses: statements work, and again after the link was cut."""
        link = Link(self.url, tcp=True)
        self.addCleanup(lambda: Deferred.fromCoroutine(link.close()))
        pool = await self.pool(link.url, size=1)
        self.assertEqual(await pool.fetch("select 1 as one"), [{"one": 1}])
        link.cut()
        await until(lambda: not pool.healthy, "the loss is noticed")
        await until(lambda: pool.healthy, "the pool is back")
        self.assertEqual(await pool.fetch("select 1 as one"), [{"one": 1}])

    def test_localhost(self) -> None:
        """The system's own lookup gives addresses, each once."""
        found = look_up("localhost")
        self.assertIn("127.0.0.1", found)
        self.assertEqual(len(found), len(set(found)))
