"""The bus over real PostgreSQL: sizes, rows, restarts, cuts, frozen frontends."""

from __future__ import annotations

import contextlib
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall, deferLater

from localai_dist.bus.envelope import Message, encode, payload_of
from localai_dist.bus.service import RETENTION, Bus
from localai_dist.store.errors import StoreError, StoreUnavailable
from localai_dist.store.listener import Listener
from localai_dist.store.pool import Pool
from localai_dist.units import MiB
from tests.bus.test_envelope import FILLERS, padded
from tests.db.case import DatabaseTestCase, OwnServerCase, until
from tests.db.link import Link

ENDED_WITHIN = 3.0
"""What is left of a LISTEN connection goes within this (s) of the next one's start."""

LISTENERS = "select pid from pg_stat_activity where application_name = %(name)s"


class Heard:
    """What one frontend's subscriber was given."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.missed = 0

    def on_message(self, message: Message) -> None:
        """One more."""
        self.messages.append(message)

    def on_missed(self) -> None:
        """Told to look again."""
        self.missed += 1

    def values(self) -> list[Any]:
        """The payloads."""
        return [message.value() for message in self.messages]


class BusCase(DatabaseTestCase):
    """Frontends of one database."""

    async def bus(
        self, url: str = "", *, pool: Pool | None = None, sweeping: dict[str, float] | None = None, **listening: Any
    ) -> tuple[Bus, Heard]:
        """One frontend's bus, started, with a subscriber of ``cache.*``."""

        def make(dsn: str, clock: Any, **options: Any) -> Listener:
            return Listener(dsn, clock, **{"chance": lambda: 0.0, **options, **listening})

        bus = Bus(url or self.url, pool or await self.pool(), reactor=reactor, make=make, **(sweeping or {}))
        self.addCleanup(lambda: Deferred.fromCoroutine(bus.stop()))
        await bus.start()
        heard = Heard()
        await bus.subscriber.subscribe("cache.*", heard.on_message, heard.on_missed)
        return bus, heard

    async def one_listens(self, pool: Pool, bus: Bus) -> None:
        """Wait until the server has one LISTEN connection of that bus: one that it ended may take a moment to go."""

        async def one_is_left() -> bool:
            return len(await pool.fetch(LISTENERS, {"name": bus.name})) == 1

        await until(one_is_left, "one LISTEN connection is left")

    async def twins(self, bus: Bus) -> Twins:
        """Who looks from now on, and until the test ends, whether that bus has a second LISTEN connection."""
        twins = Twins(bus.name, await self.pool())
        self.addCleanup(lambda: Deferred.fromCoroutine(twins.stop()))
        return twins

    async def never_two(self, twins: Twins) -> None:
        """A second connection was never there for longer than its end takes."""
        looks = twins.looks
        await until(lambda: twins.looks > looks + 1, "two more looks")
        self.assertLess(twins.longest, ENDED_WITHIN)


class Twins:
    """
    Looks every 20 ms whether a bus has two LISTEN connections at the same time.

    Attributes:
        looks: how often the database answered.
        longest: how long a second one was there at most, by the database's clock (s).
    """

    STATEMENT = (
        "select extract(epoch from clock_timestamp() - max(backend_start))::float as age, count(*) as count"
        " from pg_stat_activity where application_name = %(name)s"
    )

    def __init__(self, name: str, pool: Pool) -> None:
        self.looks = 0
        self.longest = 0.0
        self._name = name
        self._pool = pool
        self._looking = LoopingCall(lambda: Deferred.fromCoroutine(self._look()))
        self._ended = self._looking.start(0.02)

    async def _look(self) -> None:
        with contextlib.suppress(StoreError):  # the database restarts
            (seen,) = await self._pool.fetch(self.STATEMENT, {"name": self._name})
            self.looks += 1
            if seen["count"] > 1:
                self.longest = max(self.longest, seen["age"])

    async def stop(self) -> None:
        """Look no more; raises what went wrong while looking."""
        if self._looking.running:
            self._looking.stop()
        await self._ended


class CarryTests(BusCase):
    """From one frontend to the other."""

    async def test_every_size_arrives_byte_for_byte(self) -> None:
        """
        Published at one frontend, read at the other and at the first: 7990 to 8010 encoded bytes of ASCII, 4-byte
        characters and escapes, and 5 MB; below 8000 bytes there is no row, from there on exactly one (CLUS-14).
        """
        one, here = await self.bus()
        _, there = await self.bus()
        pool = await self.pool()
        await pool.execute("delete from bus_messages")
        sent: list[bytes] = []
        for filler in FILLERS:
            for size in range(7990, 8011):
                message = padded(filler, size, "cache.models")
                await one.publisher.publish("cache.models", message.value())
                sent.append(message.payload)
                self.assertEqual(len(encode(message)), size)
        large = "".join(FILLERS) * (5 * MiB // len("".join(FILLERS).encode()))
        await one.publisher.publish("cache.models", large)
        sent.append(payload_of(large))
        for heard in (here, there):
            await until(lambda: len(heard.messages) == len(sent), "everything arrives", within=30.0)  # noqa: B023
            self.assertEqual([message.payload for message in heard.messages], sent)
            self.assertEqual(heard.missed, 0)
        rows = await pool.fetch("select length(payload) as length, subject from bus_messages order by created_at")
        self.assertEqual(len(rows), len(FILLERS) * 11 + 1)
        self.assertEqual(rows[-1], {"length": len(sent[-1]), "subject": "cache.models"})
        self.assertEqual(one.publisher.published.spilled, len(rows))
        self.assertEqual(one.publisher.published.inline, len(FILLERS) * 10)

    async def test_rows_go_after_their_time(self) -> None:
        """A spilled payload is swept by any frontend once it is older than its retention, and not before (CLUS-14)."""
        one, _ = await self.bus()
        two, _ = await self.bus()
        pool = await self.pool()
        await pool.execute("delete from bus_messages")
        for _ in range(2):
            await one.publisher.publish("cache.models", "x" * 9000)
        await pool.execute(
            "update bus_messages set created_at = now() - make_interval(secs => %(s)s)"
            " where id = (select min(id) from bus_messages)",
            {"s": RETENTION + 1},
        )
        await two.sweep()
        self.assertEqual((two.purged, len(await pool.fetch("select id from bus_messages"))), (1, 1))
        await one.sweep()
        self.assertEqual(one.purged, 0)

    async def test_every_frontend_sweeps_by_itself(self) -> None:
        """An old payload goes without anybody asking for a sweep, and another after it; a new one stays (CLUS-14)."""
        bus, _ = await self.bus(sweeping={"sweep": 0.1})
        pool = await self.pool()
        await pool.execute("delete from bus_messages")
        await bus.publisher.publish("cache.models", "x" * 9000)
        old = (
            "insert into bus_messages (id, subject, payload, created_at)"
            " values (%(id)s, 'cache.models', 'old', now() - make_interval(secs => %(s)s))"
        )
        for round_ in (1, 2):
            await pool.execute(old, {"id": f"old-{round_}", "s": RETENTION + 1})
            await until(lambda: bus.purged == round_, "the old payload is gone")  # noqa: B023
        (kept,) = await pool.fetch("select length(payload) as length from bus_messages")
        self.assertEqual(kept, {"length": 9002})

    async def test_a_row_that_is_gone_is_told_as_missed(self) -> None:
        """A payload that was swept before it was read is told as missed; the next message arrives (CLUS-16)."""
        one, heard = await self.bus()
        pool = await self.pool()
        await pool.fetch(
            "select pg_notify('localai_cache', %(message)s)", {"message": '{"s":"cache.models","i":"nowhere"}'}
        )
        await pool.fetch("select pg_notify('localai_cache', '')")
        await one.publisher.publish("cache.models", 1)
        await until(lambda: heard.values() == [1], "the next message")
        self.assertEqual((heard.missed, one.subscriber.resolver.foreign), (1, 1))

    async def test_each_hears_its_subjects(self) -> None:
        """Filters and channels hold over the database too, and one that blocks harms nobody (CLUS-16)."""
        one, heard = await self.bus()
        two, _ = await self.bus()
        jobs, stuck = Heard(), Deferred[None]()
        await one.subscriber.subscribe("jobs.*.progress", jobs.on_message)
        await one.subscriber.subscribe("cache.*", lambda message: stuck)
        for number in range(300):
            await two.publisher.publish("cache.models", number)
        await two.publisher.publish("jobs.7.progress", "p")
        await until(lambda: len(heard.messages) == 300 and jobs.messages, "everything arrives")
        self.assertEqual((heard.values(), jobs.values()), (list(range(300)), ["p"]))
        self.assertEqual(one.subscriber.dropped, 300 - 1 - 256)


class LossTests(BusCase):
    """The LISTEN connection goes."""

    async def test_a_killed_connection(self) -> None:
        """Its backend is killed: LISTEN anew within seconds, then the subscriber is told, once (CLUS-15)."""
        bus, heard = await self.bus()
        pool = await self.pool()
        twins = await self.twins(bus)
        await pool.fetch(f"select pg_terminate_backend(pid) from ({LISTENERS}) l", {"name": bus.name})
        await until(lambda: heard.missed == 1, "the subscriber is told")
        await bus.publisher.publish("cache.models", "after")
        await until(lambda: heard.values() == ["after"], "messages arrive again")
        self.assertEqual((bus.reconnections, heard.missed), (1, 1))
        await self.one_listens(pool, bus)
        await self.never_two(twins)

    async def test_a_silent_cut_is_noticed_within_ten_seconds(self) -> None:
        """
        The link is cut without a word, at the default times: noticed within 10 s, LISTEN anew, then the subscriber is
        told; the server ends what is left of the first connection within seconds, so that there are not two (CLUS-15).
        """
        link = Link(self.url)
        self.addCleanup(lambda: Deferred.fromCoroutine(link.close()))
        pool = await self.pool()
        bus, heard = await self.bus(link.url, pool=pool)
        twins = await self.twins(bus)
        link.freeze()
        link.frozen = False  # what is open stays dead; new connections pass
        began = reactor.seconds()
        await until(lambda: not bus.healthy, "the cut is noticed", within=10.0)
        await until(lambda: heard.missed == 1, "the subscriber is told", within=began + 12 - reactor.seconds())
        await self.one_listens(pool, bus)
        await bus.publisher.publish("cache.models", "after")
        await until(lambda: heard.values() == ["after"], "messages arrive again")
        await self.never_two(twins)

    async def test_a_frozen_frontend_blocks_nobody(self) -> None:
        """
        A frontend that takes nothing any more fails nobody's publishing; once the queue fills the next sweep ends its
        LISTEN connection and no other, and when it wakes up it is told that it missed something (CLUS-16).
        """
        link = Link(self.url)
        self.addCleanup(lambda: Deferred.fromCoroutine(link.close()))
        pool = await self.pool()
        frozen, heard = await self.bus(link.url, beat=1000.0)
        one, others = await self.bus(pool=pool, sweeping={"usage": -1.0, "silence": 0.0})
        while_there_is_room, _ = await self.bus(pool=pool, sweeping={"silence": 0.0})
        too_early, _ = await self.bus(pool=pool, sweeping={"usage": -1.0})
        link.freeze()
        for _ in range(400):
            await one.publisher.publish("cache.models", "x" * 7000)
        await until(lambda: len(others.messages) == 400, "the others hear everything")

        async def blocked() -> bool:
            waiting = await pool.fetch(
                "select pid from pg_stat_activity where application_name = %(name)s and wait_event = 'ClientWrite'",
                {"name": frozen.name},
            )
            return bool(waiting)

        await until(blocked, "the frozen one's backend is stuck")
        for patient in (while_there_is_room, too_early):
            await patient.sweep()
        self.assertFalse(await blocked_no_more(pool, frozen.name))
        await one.sweep()
        await until(lambda: blocked_no_more(pool, frozen.name), "its backend is ended")
        self.assertEqual(others.missed, 0)
        link.thaw()
        await until(lambda: heard.missed >= 1 and frozen.healthy, "it woke up and was told")
        await one.publisher.publish("cache.models", "after")
        await until(lambda: heard.values()[-1:] == ["after"], "it hears again")

    async def test_no_bus_without_a_database(self) -> None:
        """A start without the database fails within a bound, and may be tried again (CLUS-15)."""
        link = Link(self.url)
        self.addCleanup(lambda: Deferred.fromCoroutine(link.close()))
        pool = await self.pool()

        def make(dsn: str, clock: Any, **options: Any) -> Listener:
            return Listener(dsn, clock, connect_timeout=1.0, chance=lambda: 0.0, **options)

        bus = Bus(link.url, pool, reactor=reactor, make=make)
        self.addCleanup(lambda: Deferred.fromCoroutine(bus.stop()))
        link.freeze()
        await self.assert_raises(StoreUnavailable, bus.start())
        link.thaw()
        await bus.start()
        heard = Heard()
        await bus.subscriber.subscribe("cache.*", heard.on_message, heard.on_missed)
        link.cut()
        await until(lambda: heard.missed == 1, "a lost connection is told")


async def blocked_no_more(pool: Pool, name: str) -> bool:
    """Whether no backend has that application name."""
    return not await pool.fetch("select pid from pg_stat_activity where application_name = %(name)s", {"name": name})


class RestartTests(OwnServerCase, BusCase):
    """A server of its own, since it goes down."""

    async def test_the_database_restarts_and_crashes(self) -> None:
        """After each restart LISTEN is in force before the subscriber is told; no connection is left over (CLUS-15)."""
        pool = await self.pool()
        bus, heard = await self.bus(pool=pool)
        twins = await self.twins(bus)
        seen: list[int] = []

        async def look_again() -> None:
            # What is published from inside the callback must arrive: LISTEN was first.
            await until(lambda: pool.healthy, "the pool is back")
            await bus.publisher.publish("cache.again", bus.reconnections)

        await bus.subscriber.subscribe("cache.again", lambda message: seen.append(message.value()), look_again)
        for round_ in (1, 2, 3):
            if round_ % 2:
                self.server.restart()
            else:
                self.server.kill()
                self.server.start()
            await until(lambda: len(seen) == round_, "the message of the round", within=20.0)  # noqa: B023
            self.assertEqual(len(self.server.run(LISTENERS.replace("%(name)s", f"'{bus.name}'"))), 1)
        self.assertEqual((seen, heard.missed), ([1, 2, 3], 3))
        await self.never_two(twins)
        await deferLater(reactor, 0)
