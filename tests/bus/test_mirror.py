"""A map that is the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.bus.mirror import Mirror
from localai_dist.bus.publisher import Publisher
from localai_dist.bus.subscriber import Subscriber
from localai_dist.store.errors import StoreUnavailable
from tests.bus.doubles import MemoryListener, Rows


class Cluster:
    """Frontends that hear each other, and the table the map is stored in."""

    def __init__(self) -> None:
        self.listeners: list[MemoryListener] = []
        self.table: dict[str, int] = {}
        self.reading: Deferred[None] | None = None
        self.down = False
        self.applied: list[tuple[str, str, int | None]] = []
        self.muted = False
        self.published = 0

    def frontend(self, origin: str) -> Mirror[int]:
        """One more."""
        listener = MemoryListener()
        self.listeners.append(listener)
        rows = Rows()
        subscriber = Subscriber(listener, rows)
        subscriber.begin()
        publisher = Publisher(rows)
        send = rows.fetch

        async def fetch(statement: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
            self.published += 1
            for each in self.listeners if not self.muted else []:
                each.notify(params["channel"], params["message"])
            return await send(statement, params)

        rows.fetch = fetch  # type: ignore[method-assign]
        return Mirror(
            "tasks",
            int,
            publisher=publisher,
            subscriber=subscriber,
            origin=origin,
            hydrate=self.hydrate,
            store=self.store,
            on_apply=lambda key, value: self.applied.append((origin, key, value)),
        )

    async def hydrate(self) -> dict[str, int]:
        """Read the table; what is read is what was there at the beginning."""
        found = dict(self.table)
        if self.reading is not None:
            await self.reading
        if self.down:
            raise StoreUnavailable("away")
        return found

    async def store(self, key: str, value: int | None) -> None:
        """Write one row."""
        if value is None:
            self.table.pop(key, None)
        else:
            self.table[key] = value


class MirrorTests(SynchronousTestCase):
    """Two frontends."""

    def setUp(self) -> None:
        self.cluster = Cluster()
        self.cluster.table["old"] = 1
        self.one, self.two = self.cluster.frontend("one"), self.cluster.frontend("two")
        for each in (self.one, self.two):
            self.do(each.start())

    def do(self, work: Any) -> Any:
        """The result, which is there at once."""
        return self.successResultOf(Deferred.fromCoroutine(work))

    def test_a_write_is_everywhere(self) -> None:
        """A write here is stored, then applied there; there it is neither stored nor sent on."""
        self.assertEqual((self.one.get("old"), list(self.two)), (1, ["old"]))
        self.do(self.one.put("a", 7))
        self.assertEqual((self.one.get("a"), self.two.get("a"), self.cluster.table["a"]), (7, 7, 7))
        self.do(self.two.delete("a"))
        self.assertEqual((self.one.get("a"), self.two.get("a")), (None, None))
        self.assertEqual(self.cluster.applied, [("two", "a", 7), ("one", "a", None)])
        self.assertEqual(self.cluster.published, 2)

    def test_what_was_missed_is_read_again(self) -> None:
        """After something may have been missed the whole map is read anew (CLUS-15)."""
        self.cluster.muted = True
        self.do(self.one.put("a", 7))
        self.do(self.one.delete("old"))
        self.assertEqual(list(self.two), ["old"])
        for callback in self.cluster.listeners[1].reconnected:
            callback()
        self.assertEqual((self.two.get("a"), self.two.get("old")), (7, None))

    def test_writes_during_a_read_win(self) -> None:
        """What is written or heard while the table is read is newer than what the read finds."""
        reading = self.cluster.reading = Deferred()
        hydrating = Deferred.fromCoroutine(self.two.hydrate())
        self.do(self.one.put("a", 7))
        self.do(self.two.put("b", 8))
        self.do(self.two.delete("old"))
        reading.callback(None)
        self.successResultOf(hydrating)
        self.assertEqual({key: self.two.get(key) for key in self.two}, {"a": 7, "b": 8})

    def test_a_start_without_a_database(self) -> None:
        """A mirror that could not read its table is not started, and hears nothing."""
        self.cluster.down = True
        late = self.cluster.frontend("late")
        self.failureResultOf(Deferred.fromCoroutine(late.start()), StoreUnavailable)
        self.do(self.one.put("a", 7))
        self.assertIsNone(late.get("a"))

    def test_stopped(self) -> None:
        """A stopped mirror hears no more."""
        self.two.stop()
        self.two.stop()
        self.do(self.one.put("a", 7))
        self.assertIsNone(self.two.get("a"))
