"""The stream as a transport: the conformance suite over each kind of stream, and what only a mux stream does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from twisted.internet import reactor as untyped_reactor
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.interfaces import (
    IConsumer,
    IPushProducer,
    ITCPTransport,
)
from twisted.internet.protocol import ClientFactory, Factory, Protocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import SessionDead, StreamReset
from localai_dist.mux.frame import Flag, decode
from localai_dist.net.errors import StreamEnded
from localai_dist.net.splice import splice
from localai_dist.net.stream import LINGER, MuxStream
from localai_dist.testing.memory import Recorder, SessionPair, TransportPair
from localai_dist.testing.streams import Connected, HalfRecorder, Source, StreamSuite
from localai_dist.units import KiB, MiB

reactor: Any = untyped_reactor


def attach(transport: Any, protocol: Any) -> None:
    if hasattr(transport, "start"):
        transport.start(protocol)
    else:
        transport.connect(protocol)


def make_mux(pull: bool = True) -> Connected:
    pair = SessionPair(pull=pull)
    near, far = pair.open()
    return Connected(near, far, attach, lambda: pair.pass_time(4), pair.close)


def make_memory() -> Connected:
    clock = Clock()
    pair = TransportPair(clock)

    def settle() -> None:
        while pair.pump() or clock.getDelayedCalls():
            clock.advance(0)

    return Connected(pair.a, pair.b, attach, settle, lambda: None)


def make_spliced() -> Connected:
    """near ═ mux ═ splice ═ mux ═ far, all on one clock."""
    first = SessionPair()
    second = SessionPair(clock=first.clock)
    near, left = first.open()
    right, far = second.open()
    splice(left, right)

    def settle() -> None:
        for turn in range(1200):
            first.settle()
            second.settle()
            first.clock.advance(0.1 if turn % 30 == 29 else 0)

    def close() -> None:
        first.close()
        second.close()

    return Connected(near, far, attach, settle, close, half_closes=False)


def make_tcp(case: SynchronousTestCase) -> Connected:
    """Plain TCP over loopback, the reactor turned by hand: the transport everything else is measured by."""
    made: dict[str, Any] = {}

    class Held(Protocol):
        def __init__(self, name: str) -> None:
            self.name = name

        def connectionMade(self) -> None:
            made[self.name] = self.transport

    def settle() -> None:
        while reactor._poller.poll(0.02) or reactor.timeout() == 0:
            reactor.iterate(0)

    server, client = Factory(), ClientFactory()
    server.noisy = client.noisy = False
    server.buildProtocol = lambda addr: Held("far")  # type: ignore[method-assign]
    client.buildProtocol = lambda addr: Held("near")  # type: ignore[method-assign]
    port = reactor.listenTCP(0, server, interface="127.0.0.1")
    reactor.connectTCP("127.0.0.1", port.getHost().port, client)
    while len(made) < 2:
        reactor.iterate(0.01)
    port.stopListening()

    def attach_tcp(transport: Any, protocol: Any) -> None:
        transport.protocol = protocol
        protocol.makeConnection(transport)

    def close() -> None:
        for transport in made.values():
            transport.abortConnection()
        settle()

    case.addCleanup(close)
    return Connected(made["near"], made["far"], attach_tcp, settle, close)


class TcpSuite(StreamSuite, SynchronousTestCase):
    """Plain TCP passes the suite, so the suite asks for nothing else (MUX-10)."""

    def make(self) -> Connected:
        return make_tcp(self)


class MuxStreamSuite(StreamSuite, SynchronousTestCase):
    """A mux stream is an ordinary transport (MUX-10)."""

    def make(self) -> Connected:
        return make_mux()


class PushedMuxStreamSuite(StreamSuite, SynchronousTestCase):
    """So it is over a carrier that only pushes, such as TLS (MUX-10)."""

    def make(self) -> Connected:
        return make_mux(pull=False)


class MemorySuite(StreamSuite, SynchronousTestCase):
    """The memory double passes the suite too (MUX-10)."""

    def make(self) -> Connected:
        return make_memory()


class SplicedSuite(StreamSuite, SynchronousTestCase):
    """Two streams spliced in the middle are one to their ends (MUX-10)."""

    def make(self) -> Connected:
        return make_spliced()


class Answering(HalfRecorder):
    """Closes when the far side has; ``then`` is called once the stream is over."""

    transport: Any

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self._then = then

    def readConnectionLost(self) -> None:
        super().readConnectionLost()
        self.transport.loseConnection()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        super().connectionLost(reason)
        self._then()


class MuxStreamTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pair = SessionPair()
        self.addCleanup(self.end)

    def end(self) -> None:
        self.pair.close()
        self.assertEqual(self.pair.clock.getDelayedCalls(), [])

    def test_interfaces(self) -> None:
        """A stream provides what Twisted asks of a TCP transport."""
        near, _ = self.pair.open()
        for interface in (ITCPTransport, IConsumer, IPushProducer):
            self.assertTrue(verifyObject(interface, near))

    def test_half_close(self) -> None:
        """After a half-close the other direction goes on (MUX-2)."""
        near, far = self.pair.open()
        a, b = HalfRecorder(), HalfRecorder()
        near.start(a)
        far.start(b)
        near.write(b"question")
        near.loseWriteConnection()
        self.pair.settle()
        self.assertTrue(b.read_lost and a.write_lost)
        self.assertIsNone(a.lost)
        far.write(b"answer")
        far.loseConnection()
        self.pair.settle()
        self.assertEqual((bytes(a.data), bytes(b.data)), (b"answer", b"question"))
        self.assertTrue(a.lost.check(ConnectionDone) and b.lost.check(ConnectionDone))
        self.assertEqual((self.pair.client.stream_count, self.pair.server.stream_count), (0, 0))

    def test_a_close_that_answers_the_far_end(self) -> None:
        """A client that closes at the end of the answer is done at once; what it does next is sent along (MUX-20)."""
        near, far = self.pair.open()
        client = Answering(lambda: self.pair.client.open().addCallback(opened.append))
        opened: list[MuxStream] = []
        near.start(client)
        far.start(HalfRecorder())
        far.loseWriteConnection()
        self.pair.clock.advance(0)
        self.pair.carriers.move(self.pair.carriers.b, self.pair.carriers.a)
        self.assertTrue(client.lost and client.lost.check(ConnectionDone))
        self.pair.clock.advance(0)
        (message,) = self.pair.carriers.a.outbox
        sent = [(frame.flags, frame.stream_id) for frame in map(decode, (message[:12], message[12:]))]
        self.assertEqual(sent, [(Flag.SYN, opened[0].id), (Flag.FIN, near.id)])
        self.pair.settle()
        self.assertEqual((self.pair.client.stream_count, self.pair.server.stream_count), (1, 1))

    def test_a_close_that_waits_for_what_was_written(self) -> None:
        """With bytes of ours still to be sent a close is not done at the far side's end."""
        near, far = self.pair.open()
        client = Answering(lambda: None)
        near.start(client)
        far.start(HalfRecorder())
        far.pauseProducing()
        near.write(b"x" * 512 * KiB)  # twice what the far side's window takes
        far.loseWriteConnection()
        self.pair.settle()
        self.assertTrue(client.read_lost)
        self.assertIsNone(client.lost)
        far.resumeProducing()
        self.pair.pass_time(1)
        self.assertTrue(client.lost and client.lost.check(ConnectionDone))

    def test_a_close_that_waits_for_a_producer(self) -> None:
        """With a producer registered a close is not done at the far side's end, even when nothing is queued."""
        near, far = self.pair.open()
        client = Answering(lambda: None)
        near.start(client)
        far.start(HalfRecorder())
        near.registerProducer(Source(near, MiB), True)
        far.loseWriteConnection()
        self.pair.settle()
        self.assertTrue(client.read_lost)
        self.assertIsNone(client.lost)
        near.unregisterProducer()
        self.pair.settle()
        self.assertTrue(client.lost and client.lost.check(ConnectionDone))

    def test_half_closes_that_cross(self) -> None:
        """A half-close of ours that is still to be sent when the far side's comes is told before the end (MUX-2)."""
        near, far = self.pair.open()
        a = HalfRecorder()
        near.start(a)
        far.start(HalfRecorder())
        far.loseWriteConnection()
        self.pair.clock.advance(0)
        near.loseWriteConnection()
        self.pair.carriers.move(self.pair.carriers.b, self.pair.carriers.a)
        self.assertTrue(a.read_lost)
        self.assertEqual((a.write_lost, a.lost), (False, None))
        self.pair.settle()
        self.assertTrue(a.write_lost and a.lost and a.lost.check(ConnectionDone))

    def test_a_protocol_that_comes_too_late(self) -> None:
        """Each protocol attached to a stream that is over is told so, also when another one was told before."""
        near, _ = self.pair.open()
        near.start(Recorder())
        near.abortConnection()
        self.pair.settle()
        for _ in range(2):
            late = Recorder()
            near.start(late)
            self.assertTrue(late.lost and late.lost.check(ConnectionAborted))

    def test_an_ended_stream_lets_go_of_its_protocol(self) -> None:
        """Nothing of a stream that is over waits for the garbage collector (MUX-20)."""
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        near, far = self.pair.open()
        near.start(HalfRecorder())
        far.start(Recorder())
        gone = [weakref.ref(one) for one in (near, far, near.protocol, far.protocol)]
        near.write(b"question")
        near.loseConnection()
        self.pair.settle()
        self.pair.arrived[self.pair.server].clear()
        del near, far
        self.assertEqual([one() for one in gone], [None] * 4)

    def test_take_over(self) -> None:
        """A second protocol gets exactly the bytes the first did not take."""
        near, far = self.pair.open()
        second = Recorder()

        def first_takes(data: bytes) -> None:
            far.give_back(data[5:])
            far.start(second)

        far.start(Recorder(first_takes))
        near.write(b"helloworld")
        near.write(b"!")
        self.pair.settle()
        self.assertEqual(bytes(second.data), b"world!")

    def test_bytes_wait_for_a_protocol(self) -> None:
        """What arrives before anybody is attached is kept, a clean end included."""
        near, far = self.pair.open()
        near.start(Recorder())
        near.write(b"early")
        near.loseConnection()
        self.pair.settle()
        late = Recorder()
        far.start(late)
        self.pair.settle()
        self.assertEqual(bytes(late.data), b"early")
        self.assertTrue(late.lost.check(ConnectionDone))

    def test_read_exactly(self) -> None:
        """Reading a count takes that many bytes and leaves the rest for the protocol."""
        near, far = self.pair.open()
        got: list[bytes] = []
        far.read_exactly(4).addCallback(got.append)
        near.write(b"ab")
        self.pair.settle()
        self.assertEqual(got, [])
        near.write(b"cdef")
        self.pair.settle()
        self.assertEqual(got, [b"abcd"])
        rest = Recorder()
        far.start(rest)
        self.assertEqual(bytes(rest.data), b"ef")

    def test_read_exactly_of_an_ended_stream(self) -> None:
        """A stream that ends before the count is there says so."""
        near, far = self.pair.open()
        reading = far.read_exactly(4)
        near.write(b"abc")
        near.loseConnection()
        self.pair.settle()
        self.failureResultOf(reading, StreamEnded)

    def test_remote_reset(self) -> None:
        """A reset by the far side is told as one, not as a clean end."""
        near, far = self.pair.open()
        a = Recorder()
        near.start(a)
        far.start(Recorder())
        far.abortConnection()
        self.pair.settle()
        self.assertTrue(a.lost.check(StreamReset) and a.lost.value.remote)

    def test_local_abort(self) -> None:
        """Our own abort is told in the next turn, as on TCP."""
        near, _ = self.pair.open()
        a = Recorder()
        near.start(a)
        near.abortConnection()
        self.assertIsNone(a.lost)
        self.pair.settle()
        self.assertTrue(a.lost.check(ConnectionAborted))

    def test_failing_protocol_costs_its_stream_only(self) -> None:
        """An exception in a protocol is logged and ends that stream; the session lives."""

        def explode(data: bytes) -> None:
            raise ZeroDivisionError

        near, far = self.pair.open()
        a = Recorder()
        near.start(a)
        far.start(Recorder(explode))
        near.write(b"x")
        self.pair.settle()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertTrue(a.lost.check(StreamReset))
        self.assertTrue(self.pair.client.is_open)

    def test_paused_stream_is_bounded(self) -> None:
        """A paused stream holds at most its window, and other streams go on (MUX-13)."""
        near, far = self.pair.open()
        far.start(Recorder())
        far.pauseProducing()
        Source(near, 500 * MiB).begin()
        self.pair.pass_time(1)
        self.assertLessEqual(far._unread_size, 256 * KiB)
        self.assertLessEqual(near.queued, 128 * KiB)
        for _ in range(20):
            other, there = self.pair.open()
            b = Recorder()
            there.start(b)
            other.write(b"y" * MiB)
            self.pair.settle()
            self.pair.pass_time(0.5)
            self.assertEqual(len(b.data), MiB)
            other.abortConnection()
        near.abortConnection()
        self.pair.settle()
        self.assertEqual(self.pair.server.core.pool.free, 64 * MiB)

    def test_slow_reader_gets_the_tail(self) -> None:
        """A closed stream waits for a reader that pauses for minutes."""
        near, far = self.pair.open()
        a = Recorder()
        near.start(Recorder())
        far.start(a)
        far.pauseProducing()
        near.write(b"z" * MiB)
        near.loseConnection()
        self.pair.pass_time(LINGER + 100, step=1)
        far.resumeProducing()
        self.pair.pass_time(1)
        self.assertEqual(len(a.data), MiB)
        self.assertTrue(a.lost.check(ConnectionDone))

    def test_peer_that_never_ends_its_direction(self) -> None:
        """A stream closed here is reset when the far side does not follow for five minutes."""
        near, far = self.pair.open()
        far.start(HalfRecorder())
        near.start(Recorder())
        near.loseConnection()
        self.pair.pass_time(LINGER - 1, step=1)
        self.assertEqual(self.pair.client.stream_count, 1)
        self.pair.pass_time(2)
        self.assertEqual((self.pair.client.stream_count, self.pair.server.stream_count), (0, 0))

    def test_session_death_is_no_clean_end(self) -> None:
        """Streams of a session that dies are told so, whatever the connection said (MUX-5)."""
        near, far = self.pair.open()
        a, b = Recorder(), Recorder()
        near.start(a)
        far.start(b)
        self.pair.carriers.a.lose(ConnectionDone())
        self.pair.carriers.a.lost = True
        self.pair.settle()
        for recorder in (a, b):
            self.assertTrue(recorder.lost.check(SessionDead))
            self.assertIsNone(recorder.lost.check(ConnectionDone))

    def test_class_is_settable(self) -> None:
        """Classing a stream as bulk widens what its far side may send, at once (MUX-7)."""
        near, far = self.pair.open(traffic=TrafficClass.BULK)
        far.start(Recorder())
        far.pauseProducing()
        far.traffic = TrafficClass.BULK
        self.pair.settle()
        near.start(Recorder())
        Source(near, 16 * MiB).begin()
        self.pair.pass_time(6)
        self.assertEqual(far._unread_size, 4 * MiB)
