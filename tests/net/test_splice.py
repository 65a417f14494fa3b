"""Two transports joined: what each ending does to the other side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost, ConnectionRefusedError
from twisted.internet.interfaces import IProtocol, IStreamClientEndpoint
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from localai_dist.mux.errors import SessionDead, StreamReset
from localai_dist.mux.frame import Flag, FrameType, GoAway, encode
from localai_dist.net.errors import SessionClosedHere, SessionLost, SessionSilent, StreamCutShort
from localai_dist.net.splice import SpliceEnd, is_clean, splice, splice_stream_to_endpoint
from localai_dist.net.stream import MuxStream
from localai_dist.testing.memory import Recorder, SessionPair, SlowTransport
from localai_dist.units import KiB, MiB


@implementer(IStreamClientEndpoint)
class FixedEndpoint:
    """Connects to a given transport, or fails."""

    def __init__(self, transport: SlowTransport | None) -> None:
        self.transport = transport

    def connect(self, factory: Any) -> Deferred[IProtocol]:
        if self.transport is None:
            return fail(ConnectionRefusedError())
        protocol = factory.buildProtocol(None)
        self.transport.connect(protocol)
        done: Deferred[IProtocol] = Deferred()
        done.callback(protocol)
        return done


class EndingsTests(SynchronousTestCase):
    def test_session_death_is_judged_first(self) -> None:
        """A session death that is an end of data as well is a failure all the same (MUX-16)."""

        class DeadAtEof(SessionDead, ConnectionDone):
            pass

        class CutAtEof(StreamReset, ConnectionDone):
            pass

        self.assertFalse(is_clean(Failure(DeadAtEof("dead"))))
        self.assertFalse(is_clean(Failure(CutAtEof("cut", remote=True))))

    def test_which_endings_are_clean(self) -> None:
        """The mux's own endings are judged before the generic ones they wrap (MUX-16)."""
        around_eof = SessionLost("lost")
        around_eof.__cause__ = ConnectionDone()
        for error, clean in (
            (ConnectionDone(), True),
            (ConnectionAborted(), True),
            (StreamCutShort("cut", remote=False), True),
            (StreamCutShort("cut", remote=True), False),
            (around_eof, False),
            (SessionSilent("silent"), False),
            (SessionClosedHere("closed here"), True),
            (ConnectionLost(), False),
            (ValueError(), False),
        ):
            self.assertIs(is_clean(Failure(error)), clean, repr(error))


class SpliceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pair = SessionPair()
        self.near, self.middle = self.pair.open()
        self.tcp = SlowTransport(self.pair.clock)
        self.client = Recorder()
        self.near.start(self.client)

    def join(self) -> Deferred[Any]:
        self.tcp.protocol = Recorder()
        return splice(self.middle, self.tcp)

    def test_far_side_speaks_first(self) -> None:
        """Bytes the far side sent before anybody asked arrive (MUX-16)."""
        self.join()
        self.tcp.deliver(b"SETTINGS")
        self.pair.settle()
        self.assertEqual(bytes(self.client.data), b"SETTINGS")

    def test_bytes_before_the_splice(self) -> None:
        """What was received before joining is passed on first."""
        self.near.write(b"first ")
        self.pair.settle()
        self.join()
        self.near.write(b"second")
        self.pair.settle()
        self.assertEqual(self.tcp.drain(), b"first second")

    def test_clean_end_flushes_to_a_slow_reader(self) -> None:
        """A 10 MiB answer and then a close reach a slow reader whole (MUX-16)."""
        done = self.join()
        self.near.pauseProducing()
        answer = bytes(range(256)) * (10 * MiB // 256)
        for at in range(0, len(answer), 64 * KiB):
            self.tcp.deliver(answer[at : at + 64 * KiB])
        self.tcp.end_of_data()
        for _ in range(4):
            self.pair.pass_time(10, step=0.5)
            self.assertNoResult(done)
        self.near.resumeProducing()
        self.pair.pass_time(2)
        self.assertEqual(bytes(self.client.data), answer)
        self.assertTrue(self.client.lost.check(ConnectionDone))
        end = self.successResultOf(done)
        self.assertTrue(end.clean)
        self.assertEqual((end.a_to_b, end.b_to_a), (0, 10 * MiB))

    def test_over_only_after_the_second_end(self) -> None:
        """The first ending closes both, and it is over only when both are (MUX-16)."""
        done = self.join()
        self.near.write(b"request")
        self.near.loseConnection()
        self.pair.settle()
        self.assertNoResult(done)
        self.assertTrue(self.tcp.disconnecting)
        self.assertEqual(self.tcp.drain(), b"request")
        self.pair.settle()
        self.assertTrue(self.successResultOf(done).clean)

    def test_failure_aborts(self) -> None:
        """A reset, or the death of a session, aborts the other side with a megabyte parked (MUX-16)."""
        for what in ("reset", "session death"):
            self.setUp()
            done = self.join()
            self.near.write(b"x" * MiB)
            self.pair.settle()
            if what == "reset":
                self.near.abortConnection()
            else:
                self.pair.client.abort(ValueError("x"))
            self.pair.settle()
            self.assertTrue(self.tcp.aborted)
            end = self.successResultOf(done)
            self.assertFalse(end.clean)
            self.assertTrue(end.first.check(StreamReset, SessionDead))

    def test_connection_lost_resets_the_stream(self) -> None:
        """A TCP failure resets the stream: its far end does not take it for an end of data."""
        done = self.join()
        self.tcp.lose(ConnectionLost())
        self.pair.settle()
        self.assertTrue(self.client.lost.check(StreamReset))
        self.assertFalse(self.successResultOf(done).clean)

    def test_backpressure(self) -> None:
        """A reader that stops stops the far writer through the splice, both ways (MUX-13)."""
        self.join()
        for _ in range(200):
            self.near.write(b"x" * 64 * KiB)
        self.pair.pass_time(1)
        self.assertLess(len(self.tcp.buffer), 256 * KiB)
        self.near.pauseProducing()
        for _ in range(200):
            self.tcp.deliver(b"y" * 64 * KiB)
        self.pair.pass_time(1)
        self.assertFalse(self.tcp.reading)
        self.assertLess(self.middle.queued, 256 * KiB)

    def test_cancel_aborts_both(self) -> None:
        """A cancelled splice aborts both sides."""
        done = self.join()
        done.addErrback(lambda _: None)
        done.cancel()
        self.pair.settle()
        self.assertTrue(self.tcp.aborted)
        self.assertTrue(self.client.lost.check(StreamReset))


class CountingTransport(SlowTransport):
    """Notes how it was ended."""

    def __init__(self, clock: Any) -> None:
        super().__init__(clock)
        self.ends: list[str] = []

    def loseConnection(self) -> None:
        self.ends.append("closed")
        super().loseConnection()

    def abortConnection(self) -> None:
        self.ends.append("aborted")
        super().abortConnection()


def counted(stream: MuxStream) -> list[str]:
    """How a stream is ended from now on, in order; what that does is left alone."""
    ends: list[str] = []
    closing, aborting = stream.loseConnection, stream.abortConnection

    def close() -> None:
        ends.append("closed")
        closing()

    def abort() -> None:
        ends.append("aborted")
        aborting()

    stream.loseConnection, stream.abortConnection = close, abort  # type: ignore[method-assign]
    return ends


class EveryEndingTests(SynchronousTestCase):
    """Each ending as it really happens, seen from the other side of the splice (MUX-16)."""

    def end(self, how: Callable[[SessionPair, MuxStream, MuxStream], None]) -> tuple[SpliceEnd, CountingTransport]:
        """Splice a stream to a TCP side, pass 48 KiB on, end the stream's side, let the TCP side follow."""
        pair = SessionPair()
        near, middle = pair.open()
        near.start(Recorder())
        tcp = CountingTransport(pair.clock)
        tcp.protocol = Recorder()
        told: list[SpliceEnd] = []
        stream_ends = counted(middle)
        splice(middle, tcp).addCallback(told.append)
        near.write(b"x" * 48 * KiB)
        pair.settle()
        how(pair, near, middle)
        pair.settle()
        self.assertEqual(len(tcp.ends), 1, "ended once")
        if tcp.ends == ["closed"]:
            self.assertEqual(told, [], "it is over only when the second side is")
            self.assertEqual(len(self.drained(pair, tcp)), 48 * KiB)
        pair.settle()
        (end,) = told
        self.assertTrue(tcp.disconnected)
        self.assertEqual(len(tcp.ends), 1)
        self.assertEqual(stream_ends, [], "the side that ended by itself is left alone")
        pair.close()
        return end, tcp

    def drained(self, pair: SessionPair, tcp: SlowTransport) -> bytes:
        """What the slow side gets in the end."""
        got = b""
        while tcp.buffer:
            got += tcp.drain(32 * KiB)
            pair.settle()
        tcp.drain()
        return got

    def assert_clean(self, how: Callable[[SessionPair, MuxStream, MuxStream], None]) -> None:
        """The other side is flushed and closed."""
        end, tcp = self.end(how)
        self.assertEqual((end.clean, tcp.ends, end.a_to_b), (True, ["closed"], 48 * KiB))

    def assert_failure(self, how: Callable[[SessionPair, MuxStream, MuxStream], None]) -> None:
        """The other side is aborted."""
        end, tcp = self.end(how)
        self.assertEqual((end.clean, tcp.ends), (False, ["aborted"]))

    def test_clean_endings(self) -> None:
        """End of data, our own reset of the stream, and our own shutdown of the session flush first (MUX-16)."""
        self.assert_clean(lambda pair, near, middle: near.loseConnection())
        self.assert_clean(lambda pair, near, middle: MuxStream.abortConnection(middle))
        self.assert_clean(lambda pair, near, middle: pair.server.close())

    def test_failures(self) -> None:
        """A reset or a go-away of the peer, a keepalive timeout, a connection that ends even cleanly abort (MUX-16)."""
        self.assert_failure(lambda pair, near, middle: near.abortConnection())
        self.assert_failure(lambda pair, near, middle: pair.client.close())
        for code in (GoAway.PROTOCOL_ERROR, GoAway.INTERNAL_ERROR):
            told = encode(FrameType.GO_AWAY, Flag.NONE, 0, code)
            self.assert_failure(lambda pair, near, middle, told=told: pair.server.bytes_received(told))  # type: ignore[misc]
        self.assert_failure(lambda pair, near, middle: pair.carriers.b.lose(ConnectionDone()))
        self.assert_failure(lambda pair, near, middle: pair.carriers.b.lose(ConnectionLost()))
        self.assert_failure(lambda pair, near, middle: pair.server.abort(ValueError("enough")))

        def silence(pair: SessionPair, near: MuxStream, middle: MuxStream) -> None:
            pair.carriers.frozen = True
            pair.pass_time(15.2)

        self.assert_failure(silence)

    def test_the_other_way_round(self) -> None:
        """The TCP side ends first, cleanly or not: the stream is closed or aborted, once, and that is all (MUX-16)."""
        endings: dict[str, Callable[[CountingTransport], None]] = {
            "closed": lambda tcp: tcp.end_of_data(),
            "aborted": lambda tcp: tcp.lose(ConnectionLost()),
        }
        for expected, how in endings.items():
            pair = SessionPair()
            near, middle = pair.open()
            client = Recorder()
            near.start(client)
            tcp = CountingTransport(pair.clock)
            tcp.protocol = Recorder()
            stream_ends = counted(middle)
            done = splice(middle, tcp)
            tcp.deliver(b"y" * 48 * KiB)
            how(tcp)
            self.assertEqual(stream_ends, [expected])
            pair.settle()
            self.assertEqual(self.successResultOf(done).clean, expected == "closed")
            self.assertEqual((stream_ends, tcp.ends), ([expected], []))
            if expected == "closed":
                self.assertEqual(len(client.data), 48 * KiB)
            pair.close()

    def test_shutdown_over_unread_bytes(self) -> None:
        """Our own shutdown with received bytes nobody took is no clean end: they would be missing (MUX-16)."""
        pair = SessionPair()
        near, middle = pair.open()
        near.start(Recorder())
        tcp = CountingTransport(pair.clock)
        tcp.protocol = Recorder()
        splice(middle, tcp)
        near.write(b"x" * MiB)
        pair.pass_time(1)
        pair.server.close()
        pair.settle()
        self.assertEqual(tcp.ends, ["aborted"])
        pair.close()

    def test_peer_vanishes_while_a_write_is_parked(self) -> None:
        """A megabyte waits for the stream's window when its peer is lost: the TCP side is aborted, once (MUX-16)."""
        pair = SessionPair()
        near, middle = pair.open()
        near.start(Recorder())
        near.pauseProducing()
        tcp = CountingTransport(pair.clock)
        tcp.protocol = Recorder()
        stream_ends = counted(middle)
        done = splice(middle, tcp)
        for _ in range(16):
            tcp.deliver(b"y" * 64 * KiB)
        pair.pass_time(1)
        self.assertFalse(tcp.reading)
        pair.carriers.a.lose(ConnectionLost())
        pair.carriers.b.lose(ConnectionLost())
        pair.settle()
        self.assertEqual((tcp.ends, stream_ends), (["aborted"], []))
        self.assertFalse(self.successResultOf(done).clean)


class ToEndpointTests(SynchronousTestCase):
    def test_connects_first(self) -> None:
        """Nothing of the stream is taken before the endpoint is connected; the reply goes before any byte."""
        pair = SessionPair()
        near, middle = pair.open()
        client = Recorder()
        near.start(client)
        near.write(b"request")
        pair.settle()
        tcp = SlowTransport(pair.clock)
        tcp.deliver(b"eager")
        done = Deferred.fromCoroutine(
            splice_stream_to_endpoint(middle, FixedEndpoint(tcp), connected=lambda: middle.write(b"ok "))
        )
        pair.settle()
        self.assertEqual(bytes(client.data), b"ok eager")
        self.assertEqual(tcp.drain(), b"request")
        tcp.end_of_data()
        pair.settle()
        self.assertTrue(self.successResultOf(done).clean)

    def test_refused(self) -> None:
        """A connect that fails raises its error, and the stream still lives with all its bytes."""
        pair = SessionPair()
        near, middle = pair.open()
        near.write(b"request")
        pair.settle()
        done = Deferred.fromCoroutine(splice_stream_to_endpoint(middle, FixedEndpoint(None)))
        self.failureResultOf(done, ConnectionRefusedError)
        recorder = Recorder()
        middle.start(recorder)
        self.assertEqual(bytes(recorder.data), b"request")
