"""Ten thousand streams, a third of them broken off, twenty cuts of the link: nothing is left of any of it."""

from __future__ import annotations

import gc
import os
import random
import tracemalloc
from typing import Any

from twisted.internet import defer
from twisted.internet import reactor as untyped_reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.resource import Resource

from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import MuxError
from localai_dist.net.request import StreamingSite
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.stream import MuxStream
from localai_dist.net.websocket import accept, dial
from localai_dist.testing.memory import SessionPair
from localai_dist.units import KiB, MiB

reactor: Any = untyped_reactor
CONFIG = SessionConfig()
CYCLES = 10_000
AT_ONCE = 50
CUTS = 20
ABORTED = 0.3
SWING = 8 * MiB
"""What is held at one moment and not at another, caches and a session's own (bytes); lost by each stream it is 930."""


class Books:
    """What was opened and what was closed, at one end."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed = 0


class Kept(Protocol):
    """A stream's protocol that is counted."""

    transport: Any

    def __init__(self, books: Books, chance: random.Random) -> None:
        self.books = books
        self.chance = chance
        self.over: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        self.books.opened += 1

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self.books.closed += 1
        self.over.callback(None)


class Echo(Kept):
    """The far end: sends back, and now and then breaks off."""

    def dataReceived(self, data: bytes) -> None:
        if self.chance.random() < 0.1:
            self.transport.abortConnection()
        else:
            self.transport.write(data)


class Use(Kept):
    """The near end: sends something, reads it back, ends; or breaks off somewhere on the way."""

    left = 0

    def connectionMade(self) -> None:
        super().connectionMade()
        size = self.chance.choice((1, 100, 5 * KiB, 100 * KiB))
        self.left = size
        breaks_off = self.chance.random() < ABORTED
        self.break_at = self.chance.randrange(size + 1) if breaks_off else -1
        self.transport.write(bytes(size))
        if self.break_at == size:
            self.transport.abortConnection()

    def dataReceived(self, data: bytes) -> None:
        self.left -= len(data)
        if self.left <= self.break_at:
            self.transport.abortConnection()
        elif not self.left:
            self.transport.loseConnection()


class Door(Resource):
    """Accepts sessions."""

    isLeaf = True

    def __init__(self, on_stream: Any) -> None:
        super().__init__()
        self.sessions: list[MuxSession] = []
        self._on_stream = on_stream

    def render_GET(self, request: Any) -> Any:
        return accept(
            request,
            client=False,
            config=CONFIG,
            clock=reactor,
            on_session=self.sessions.append,
            on_stream=self._on_stream,
        )


def turn() -> Deferred[None]:
    """One turn of the reactor."""
    done: Deferred[None] = Deferred()
    reactor.callLater(0, done.callback, None)
    return done


def descriptors() -> int:
    """Open files and sockets of this process."""
    return len(os.listdir("/proc/self/fd"))


class CyclesTests(TestCase):
    timeout = 120

    async def setUp(self) -> None:
        debugging = defer.getDebugging()
        defer.setDebugging(False)  # it would keep a traceback per Deferred
        self.addCleanup(defer.setDebugging, debugging)
        self.chance = random.Random(17)
        self.near, self.far = Books(), Books()
        await self.listen()

    async def listen(self) -> None:
        """The far end, new."""
        self.door = Door(lambda stream: stream.start(Echo(self.far, self.chance)))
        self.port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(
            StreamingSite(self.door, max_body=1 * MiB, reactor=reactor)
        )

    async def dial(self) -> MuxSession:
        url = f"ws://127.0.0.1:{self.port.getHost().port}/"
        return await dial(reactor, url, headers={}, client=True, config=CONFIG)

    async def restart(self) -> None:
        """The far end goes away without a word and is there again, on another port."""
        for session in self.door.sessions:
            if session.is_open:
                session._carrier._wire.transport.abortConnection()  # type: ignore[attr-defined]
        await self.port.stopListening()
        await self.listen()

    async def batch(self, session: MuxSession) -> None:
        """So many streams at once, to their ends."""
        ends = []
        for _ in range(AT_ONCE):
            try:
                stream: MuxStream = await session.open(self.chance.choice(list(TrafficClass)))
            except MuxError:  # the link was cut meanwhile
                break
            use = Use(self.near, self.chance)
            stream.start(use)
            ends.append(use.over)
        await gatherResults(ends)

    async def test_ten_thousand(self) -> None:
        """10 000 opens and closes, 30 % broken off, 20 cuts and a restart: nothing is left (MUX-17, BR-049)."""
        session = await self.dial()
        cuts = sorted(self.chance.sample(range(2000, CYCLES), CUTS))
        baseline: tuple[int, int, int] | None = None
        while self.near.opened < CYCLES:
            running = Deferred.fromCoroutine(self.batch(session))
            while cuts and self.near.opened >= cuts[0]:
                cuts.pop(0)
                await turn()
                if len(cuts) == CUTS // 2:
                    await self.restart()
                else:
                    victim = self.chance.choice((session, self.door.sessions[-1]))
                    victim._carrier._wire.transport.abortConnection()  # type: ignore[attr-defined]
                await session.when_closed()
                await running
                session = await self.dial()
            await running
            if baseline is None and self.near.opened >= 1000:
                # What is allocated from here on and not given back; the process's own size swings with the machine.
                tracemalloc.start()
                self.addCleanup(tracemalloc.stop)
                baseline = await self.measured()
        self.assertEqual(cuts, [])
        while session.stream_count != self.door.sessions[-1].stream_count:
            await turn()  # the last endings are still on the wire; then both ends count the same
        assert baseline is not None
        after = await self.measured()
        self.assertEqual(after[0], baseline[0], "descriptors")
        self.assertLess(after[1], baseline[1] * 1.05, "objects")
        self.assertLess(after[2] - baseline[2], SWING, "memory")
        await self.end(session)
        self.assertGreaterEqual(self.near.opened, CYCLES)
        self.assertEqual((self.near.opened - self.near.closed, self.far.opened - self.far.closed), (0, 0))
        self.assertEqual([str(call) for call in reactor.getDelayedCalls() if "onTimeout" not in str(call)], [])

    async def measured(self) -> tuple[int, int, int]:
        """Descriptors, Python objects, memory in use (bytes); once the far end has heard of every ending."""
        while self.far.opened != self.far.closed:
            await turn()
        del self.door.sessions[:-1]
        gc.collect()
        return descriptors(), len(gc.get_objects()), tracemalloc.get_traced_memory()[0]

    async def end(self, session: MuxSession) -> None:
        """Close everything, and wait until the sockets are gone."""
        far = self.door.sessions[-1]
        while session.stream_count or far.stream_count:  # the last endings are still on the wire
            await turn()
        session.close()
        await far.when_closed()
        await self.port.stopListening()
        while any(type(end).__name__ in ("Server", "Client") for end in [*reactor.getReaders(), *reactor.getWriters()]):
            await turn()


class SessionCyclesTests(SynchronousTestCase):
    def test_thousand_sessions(self) -> None:
        """1000 sessions with pings all along, opens, closes and status reads: none locks, none stays (BR-068)."""
        chance = random.Random(68)
        config = SessionConfig(keepalive_interval=0.01, keepalive_timeout=15.0)
        for number in range(1000):
            pair = SessionPair(config=config)
            streams = [pair.client.open() for _ in range(3)]
            opened: list[MuxStream] = []
            for opening in streams:
                opening.addCallback(opened.append)
            for _ in range(3):
                pair.pass_time(0.01, step=0.01)
                self.assertTrue(pair.client.is_open)
                self.assertEqual(pair.client.stream_count, 3)
                chance.choice(opened).write(b"x")
            end = chance.choice((pair.client, pair.server))
            opened[0].abortConnection()
            # Closed in the middle of a ping and of an open.
            pair.client._ping()
            waiting = pair.server.open()
            waiting.addErrback(lambda failure: failure.trap(MuxError))
            chance.choice((end.close, lambda end=end: end.abort(ValueError("enough"))))()
            self.assertFalse(end.is_open)
            pair.settle()
            for session in (pair.client, pair.server):
                self.assertEqual((session.is_open, session.stream_count), (False, 0), number)
            self.assertEqual(pair.clock.getDelayedCalls(), [])
