"""Slow and long links, in the tests' own time: who goes first, how fast one transfer is, what keeps a session alive."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import KeepaliveTimeout
from localai_dist.mux.frame import HEADER_SIZE, FrameType, decode
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.splice import splice
from localai_dist.net.stream import MuxStream
from localai_dist.testing.links import LinkedPair, run
from localai_dist.testing.memory import Recorder, SessionPair
from localai_dist.testing.streams import Source
from localai_dist.units import KiB, MiB


class Counter(Protocol):
    """Counts what arrives."""

    count = 0

    def dataReceived(self, data: bytes) -> None:
        self.count += len(data)


class Answer(Protocol):
    """A server's end of a request: 1 KiB back for 1 KiB."""

    got = 0

    def dataReceived(self, data: bytes) -> None:
        self.got += len(data)
        if self.got == KiB:
            assert self.transport is not None
            self.transport.write(bytes(KiB))
            self.transport.loseConnection()


@dataclass
class Requests:
    """
    Requests of 1 KiB, one every ``every`` seconds, each on a stream of its own.

    Attributes:
        took: how long each took (s).
    """

    session: MuxSession
    clock: Clock
    every: float = 0.01
    traffic: TrafficClass = TrafficClass.INFERENCE
    took: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """Ask, and again after a while."""
        asked_at = self.clock.seconds()
        requests = self

        class Asking(Protocol):
            def connectionMade(self) -> None:
                assert self.transport is not None
                self.transport.write(bytes(KiB))

            def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
                requests.took.append(requests.clock.seconds() - asked_at)

        def opened(stream: MuxStream) -> None:
            stream.start(Asking())

        if self.session.is_open:
            self.session.open(self.traffic).addCallback(opened)
            self.clock.callLater(self.every, self.begin)

    def quantile(self, share: float) -> float:
        """The time (s) that this share of the requests stayed under."""
        return sorted(self.took)[min(len(self.took) - 1, int(share * len(self.took)))]


def serve(stream: MuxStream) -> None:
    """The server's side: bulk is told by its first byte, everything else is a request."""
    stream.start(Answer())


class SlowLinkTests(SynchronousTestCase):
    """100 Mbit/s with 20 ms round trip; the queue stands in the network."""

    RATE = 12e6
    DELAY = 0.010

    def both(self, *, bulk: bool, seconds: float = 6.0) -> tuple[Requests, float, LinkedPair]:
        """Requests beside a transfer, or alone; the rate of the transfer once it is up (bytes/s)."""
        pair = LinkedPair(rate=self.RATE, delay=self.DELAY)
        near, far = pair.open(traffic=TrafficClass.BULK)
        counter = Counter()
        far.start(counter)
        far.traffic = TrafficClass.BULK
        near.start(Recorder())
        pair.server.on_stream = serve
        if bulk:
            Source(near, 500 * MiB).begin()
            pair.run(3.0)
        requests = Requests(pair.client, pair.clock)
        before = counter.count
        requests.begin()
        pair.run(seconds)
        return requests, (counter.count - before) / seconds, pair

    def test_requests_beside_a_transfer(self) -> None:
        """A full link adds at most 12 ms to 99 of 100 requests, and the transfer keeps 90 % of it (MUX-15)."""
        idle, _, _ = self.both(bulk=False, seconds=2.0)
        loaded, rate, _ = self.both(bulk=True)
        self.assertGreater(len(loaded.took), 300)
        self.assertLess(idle.quantile(0.99), 0.025)
        self.assertLess(loaded.quantile(0.99) - idle.quantile(0.99), 0.012)
        self.assertGreater(rate, 0.9 * self.RATE)

    def test_the_next_frame_on_the_wire(self) -> None:
        """On a full link control and inference frames go next: no bulk is sent between asking and them (MUX-15)."""
        _, _, pair = self.both(bulk=True, seconds=0.2)
        for traffic in (TrafficClass.CONTROL, TrafficClass.INFERENCE):
            urgent = self.successResultOf(pair.client.open(traffic))
            urgent.start(Recorder())
            pair.up.sent = []
            urgent.write(b"now")
            pair.run(0.2)
            frames = [decode(message, at) for _, message in pair.up.sent for at in starts(message)]
            data = [header for header in frames if header.type == FrameType.DATA]
            self.assertEqual((data[0].stream_id, data[0].length), (urgent.id, 3))
            # Positive control: bulk went on behind it.
            self.assertGreater(sum(header.length for header in data[1:]), 500 * KiB)

    def test_bulk_keeps_its_floor(self) -> None:
        """Beside an inference stream that wants everything, bulk still gets about a fifth of the link (MUX-15)."""
        pair = LinkedPair(rate=self.RATE, delay=self.DELAY)
        counters = [Counter(), Counter()]
        for counter, traffic in zip(counters, (TrafficClass.BULK, TrafficClass.CONTROL), strict=True):
            near, far = pair.open(traffic=traffic)
            far.start(counter)
            far.traffic = TrafficClass.BULK  # both with the large window; the class of the sending end decides
            near.start(Recorder())
            Source(near, 500 * MiB).begin()
        pair.run(8.0)
        share = counters[0].count / sum(counter.count for counter in counters)
        self.assertGreater(share, 0.1)
        self.assertLess(share, 0.35)

    def test_a_stream_nobody_classed(self) -> None:
        """It is inference, turns bulk after 1 MiB without a pause, and so makes room for requests (MUX-15)."""
        pair = LinkedPair(rate=self.RATE, delay=self.DELAY)
        near, far = pair.open()
        far.start(Counter())
        near.start(Recorder())
        self.assertIs(near._core.traffic, TrafficClass.INFERENCE)
        Source(near, 100 * MiB).begin()
        pair.run(3.0)
        self.assertIs(near._core.traffic, TrafficClass.BULK)
        pair.server.on_stream = serve
        requests = Requests(pair.client, pair.clock)
        requests.begin()
        pair.run(2.0)
        self.assertLess(requests.quantile(0.99), 0.040)


def starts(message: bytes) -> list[int]:
    """Where the frames of a carrier message begin."""
    found, at = [], 0
    while at < len(message):
        found.append(at)
        header = decode(message, at)
        at += HEADER_SIZE + (header.length if header.type == FrameType.DATA else 0)
    return found


class LongLinkTests(SynchronousTestCase):
    """1 Gbit/s with 50 ms round trip: a window of 256 KiB would give 5 MB/s (BR-037)."""

    def transfer(self, *, relayed: bool) -> None:
        clock = Clock()
        tunnel = LinkedPair(rate=125e6, delay=0.025, clock=clock)
        near, far = tunnel.open(traffic=TrafficClass.BULK)
        asking = tunnel.client
        if relayed:
            link = LinkedPair(rate=1e9, delay=0.0002, clock=clock)
            asking = link.client
            outer, inner = link.open(traffic=TrafficClass.BULK)
            splice(inner, near)
            near, tunnel.server.on_stream = outer, serve
            link.server.on_stream = lambda stream: tunnel.client.open().addCallback(lambda on: splice(stream, on))
        tunnel.server.on_stream = serve
        far.traffic = TrafficClass.BULK
        counter = Counter()
        far.start(counter)
        near.start(Recorder())
        self.assertEqual(far._core.receive_window.size, 4 * MiB)
        Source(near, 1024 * MiB).begin()
        requests = Requests(asking, clock, every=0.05)
        requests.begin()
        run(clock, 2.0)
        self.assertGreater(counter.count / 2.0, 40e6)
        self.assertLess(requests.quantile(0.95), 0.3)

    def test_one_transfer_through_the_tunnel(self) -> None:
        """One stream carries 40 MB/s and more while requests keep a p95 under 300 ms (BR-037)."""
        self.transfer(relayed=False)

    def test_one_transfer_through_the_relay(self) -> None:
        """The same across a relay's splice (BR-037)."""
        self.transfer(relayed=True)


class KeepaliveTests(SynchronousTestCase):
    """What balancers and firewalls on the way see, and what silence means."""

    def test_idle_traffic_both_ways(self) -> None:
        """An idle session sends something each way at least every interval, for ten minutes (BR-022)."""
        for interval in (5.0, 2.0):
            config = SessionConfig(keepalive_interval=interval, keepalive_timeout=3 * interval)
            pair = LinkedPair(rate=1e9, delay=0.001, config=config)
            pair.up.sent, pair.down.sent = [], []
            pair.run(600)
            for end in (pair.up, pair.down):
                times = [0.0, *(at for at, _ in end.sent or []), 600.0]
                gaps = [later - earlier for earlier, later in pairwise(times)]
                self.assertLess(max(gaps), interval + 0.5)
                # The setting takes effect, and no more is sent than it asks for.
                self.assertGreater(len(times), 600 / interval / 2)
                self.assertLess(len(times), 3 * 600 / interval)
            self.assertTrue(pair.client.is_open and pair.server.is_open)

    def test_a_way_that_swallows_everything(self) -> None:
        """Bytes that vanish both ways: both ends know within three intervals and a second (BR-010)."""
        pair = SessionPair()
        pair.pass_time(60, step=0.5)
        pair.carriers.frozen = True
        ends = [session.when_closed() for session in (pair.client, pair.server)]
        pair.pass_time(16.0)
        for end in ends:
            self.assertTrue(self.successResultOf(end).check(KeepaliveTimeout))

    def test_one_way_only(self) -> None:
        """When only one direction is swallowed the end that hears nothing ends it, and the other follows (BR-010)."""
        pair = LinkedPair(rate=1e9, delay=0.001)
        pair.up.far = LinkEndOfNothing(pair)
        lost = pair.server.when_closed()
        pair.run(16.0)
        self.assertTrue(self.successResultOf(lost).check(KeepaliveTimeout))
        self.assertTrue(pair.down.aborted)

    def test_a_peer_that_is_starved(self) -> None:
        """A peer that stands still for 5 s at a time, for five minutes, keeps its session and its bytes (BR-123)."""
        pair = SessionPair()
        near, far = pair.open(traffic=TrafficClass.BULK)
        counter = Counter()
        far.start(counter)
        near.start(Recorder())
        Source(near, 64 * MiB).begin()
        for _ in range(60):
            pair.carriers.frozen = True
            pair.pass_time(4.9, step=0.7)
            pair.carriers.frozen = False
            pair.pass_time(0.1)
        self.assertTrue(pair.client.is_open and pair.server.is_open)
        self.assertEqual(counter.count, 64 * MiB)
        pair.close()

    def test_pings_are_answered_by_a_stalled_session(self) -> None:
        """Pings go both ways for five minutes while a stream's reader stands still (BR-008)."""
        pair = SessionPair()
        near, far = pair.open()
        far.start(Recorder())
        far.pauseProducing()
        Source(near, 500 * MiB).begin()
        pair.pass_time(300, step=0.5)
        self.assertTrue(pair.client.is_open and pair.server.is_open)
        pair.close()


class LinkEndOfNothing:
    """Where bytes vanish."""

    def __init__(self, pair: LinkedPair) -> None:
        self.pair = pair

    def arrived(self, message: bytes) -> None:
        """Nothing comes of it."""
