"""One reader stops for ever: nobody else notices, and what is held for it is two windows."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux.classes import TrafficClass
from localai_dist.net.session import MuxSession
from localai_dist.net.splice import splice
from localai_dist.net.stream import MuxStream
from localai_dist.testing.memory import Recorder, SessionPair
from localai_dist.testing.streams import Source
from localai_dist.units import KiB, MiB

OFFERED = 500 * MiB
OTHERS = 20
WAITING = {TrafficClass.INFERENCE: 64 * KiB, TrafficClass.BULK: 256 * KiB}
"""What waits to be sent on each leg beside its window, at most (bytes)."""
BOOKS = 96 * KiB
"""What is kept of everything else (bytes)."""


@dataclass
class Way:
    """
    A way from where streams are opened to where they arrive, over one session or two.

    Attributes:
        sessions: every session on the way.
        opened: both ends of a new stream.
        arrived: the far ends so far.
        pass_time: lets so many seconds pass, in steps of so many.
    """

    sessions: list[MuxSession]
    opened: Callable[[TrafficClass], tuple[MuxStream, MuxStream]]
    pass_time: Callable[[float, float], None]


def direct(*, down: bool = False) -> Way:
    """One session, either direction."""
    pair = SessionPair()
    opener, other = (pair.server, pair.client) if down else (pair.client, pair.server)

    def opened(traffic: TrafficClass) -> tuple[MuxStream, MuxStream]:
        near: list[MuxStream] = []
        opener.open(traffic).addCallback(near.append)
        pair.settle()
        return near[0], pair.arrived[other][-1]

    return Way([pair.client, pair.server], opened, pair.pass_time)


def relayed(*, down: bool = False) -> Way:
    """
    A link and a tunnel, spliced in the middle as the owner does, which classes both legs alike.

    Args:
        down: the first ends are those at the worker, where the streams arrive, though all are opened at the other.
    """
    clock = Clock()
    link, tunnel = SessionPair(clock=clock), SessionPair(clock=clock)

    def join(stream: MuxStream) -> None:
        stream.traffic = wanted[0]
        tunnel.client.open(stream.traffic).addCallback(lambda ahead: splice(stream, ahead))

    link.server.on_stream = join
    wanted = [TrafficClass.INFERENCE]

    def pass_time(seconds: float, step: float) -> None:
        end = clock.seconds() + seconds
        while clock.seconds() < end - 1e-9:
            settle()
            clock.advance(min(step, end - clock.seconds()))
        settle()

    def settle() -> None:
        idle = 0
        while idle < 2:
            clock.advance(0)
            moved = [pair.carriers.pump() for pair in (link, tunnel)]
            idle = 0 if any(moved) else idle + 1

    def opened(traffic: TrafficClass) -> tuple[MuxStream, MuxStream]:
        near: list[MuxStream] = []
        wanted[0] = traffic
        link.client.open(traffic).addCallback(near.append)
        settle()
        ends = near[0], tunnel.arrived[tunnel.server][-1]
        return ends[::-1] if down else ends

    legs = [link.client, link.server, tunnel.client, tunnel.server]
    return Way(legs[::-1] if down else legs, opened, pass_time)


class Counter(Protocol):
    """Counts what arrives."""

    count = 0

    def dataReceived(self, data: bytes) -> None:
        self.count += len(data)


class StalledReaderTests(SynchronousTestCase):
    """500 MB are offered to a reader that stopped (MUX-13)."""

    def stall(self, way: Way, traffic: TrafficClass) -> int:
        """Stall one stream, use twenty others, close the first; the window it had (bytes)."""
        ends = [way.opened(traffic) for _ in range(1 + OTHERS)]
        counters = [Counter() for _ in ends]
        for (near, far), counter in zip(ends, counters, strict=True):
            near.start(Recorder())
            far.start(counter)
        (near, far), *others = ends
        far.traffic = traffic
        self.warm(way, others, counters[1:])
        far.pauseProducing()
        before = self.traced()
        source = Source(near, OFFERED)
        source.begin()
        way.pass_time(2, 0.05)
        window = sum(stream._core.receive_window.size for stream in (far, *self.relay_ends(way)))
        bound = window + WAITING[traffic] * (len(way.sessions) // 2) + BOOKS
        grown = self.traced() - before
        self.assertGreater(source.left, OFFERED - 3 * window - MiB)
        self.assertLess(grown, bound)
        self.warm(way, others, counters[1:])
        self.assertEqual(counters[0].count, 0)
        # Five more minutes change nothing.
        way.pass_time(300, 1.0)
        self.assertLess(self.traced() - before, bound)
        self.assertTrue(all(session.is_open for session in way.sessions))
        near.abortConnection()
        way.pass_time(0.2, 0.05)
        self.assertTrue(source.stopped)
        self.assertLess(self.traced() - before, 256 * KiB)
        self.assertEqual({session.stream_count for session in way.sessions}, {OTHERS})
        for near, _ in others:
            near.loseConnection()
        way.pass_time(0.2, 0.05)
        for session in way.sessions:
            self.assertEqual((session.stream_count, session.core.pool.free), (0, 64 * MiB))
            session.core.check()
        return window

    def relay_ends(self, way: Way) -> list[MuxStream]:
        """The end in the middle that receives on the first stream, where there is one."""
        return [] if len(way.sessions) == 2 else [way.sessions[1]._streams[1]]

    def warm(self, way: Way, others: list[tuple[MuxStream, MuxStream]], counters: list[Counter]) -> None:
        """Each of the others carries a megabyte in half a second of its own time."""
        wanted = [counter.count + MiB for counter in counters]
        for near, _ in others:
            for _ in range(16):
                near.write(b"y" * 64 * KiB)
        way.pass_time(0.5, 0.05)
        self.assertEqual([counter.count for counter in counters], wanted)

    def traced(self) -> int:
        """Bytes allocated by Python now."""
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    def setUp(self) -> None:
        tracemalloc.start(1)
        self.addCleanup(tracemalloc.stop)

    def test_both_directions(self) -> None:
        """Whichever end reads no more, 20 others go on and memory grows by two windows (MUX-13, BR-008)."""
        for down in (False, True):
            self.assertEqual(self.stall(direct(down=down), TrafficClass.INFERENCE), 256 * KiB)

    def test_across_a_relay(self) -> None:
        """Across a splice, in both directions, the windows of its two legs are all there is (MUX-13, BR-008)."""
        for down in (False, True):
            self.assertEqual(self.stall(relayed(down=down), TrafficClass.INFERENCE), 2 * 256 * KiB)

    def test_bulk(self) -> None:
        """A bulk stream's larger window is the bound, and bulk of others goes on beside it (MUX-13)."""
        self.assertEqual(self.stall(direct(), TrafficClass.BULK), 4 * MiB)

    def test_bulk_across_a_relay(self) -> None:
        """The same over two legs that are both bulk (MUX-13)."""
        self.assertEqual(self.stall(relayed(), TrafficClass.BULK), 8 * MiB)
