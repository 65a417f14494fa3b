"""Session death: whoever waits for anything hears of it at once, and never as a clean end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux.errors import SessionClosing, SessionDead, StreamIdsExhausted, StreamReset
from localai_dist.mux.frame import MAX_LENGTH, Flag, FrameType, GoAway, encode
from localai_dist.net.errors import HandshakeLate
from localai_dist.net.handshake import send_frame_and_read_reply
from localai_dist.net.session import MuxSession
from localai_dist.net.stream import MuxStream
from localai_dist.testing.memory import Recorder, SessionPair
from localai_dist.testing.streams import Source
from localai_dist.units import MiB

EACH: Final = 100
ALL_AT: Final = 1.0
"""Everything that is blocked fails within this long (s) of the session's death. Source: MUX-6."""


def frozen(pair: SessionPair) -> None:
    """Nothing moves any more; 15 s later the keepalive ends both sessions."""
    pair.carriers.frozen = True
    pair.pass_time(14.9)
    assert pair.client.is_open and pair.server.is_open
    pair.clock.advance(0.2)


def told(code: GoAway) -> Callable[[SessionPair], None]:
    """The server says why it ends the session."""
    return lambda pair: pair.client.bytes_received(encode(FrameType.GO_AWAY, Flag.NONE, 0, code))


def cut(error: Exception) -> Callable[[SessionPair], None]:
    """The connection ends for ``error``, at both ends."""

    def both(pair: SessionPair) -> None:
        pair.carriers.a.lose(error)
        pair.carriers.b.lose(error)

    return both


ENDINGS: Final[dict[str, Callable[[SessionPair], None]]] = {
    "keepalive": frozen,
    "connection closed cleanly": cut(ConnectionDone()),
    "connection lost": cut(ConnectionLost()),
    "go-away: protocol error": told(GoAway.PROTOCOL_ERROR),
    "go-away: internal error": told(GoAway.INTERNAL_ERROR),
    "closed": lambda pair: pair.client.close(),
    "aborted": lambda pair: pair.client.abort(ValueError("enough")),
    "garbage": lambda pair: pair.client.bytes_received(b"\x07 what is this?"),
}


class Blocked:
    """100 reads, 100 writes and 100 opens that wait at one end, and when each failed."""

    def __init__(self, pair: SessionPair, session: MuxSession) -> None:
        self.pair = pair
        self.failed: list[tuple[float, Failure]] = []
        self.sources: list[Source] = []
        self.writers: list[Recorder] = []
        other = pair.server if session is pair.client else pair.client
        self.streams = [self._stream(session, other) for _ in range(2 * EACH)]
        for near, _ in self.streams[:EACH]:
            near.read_exactly(10).addErrback(self._note)
        for near, far in self.streams[EACH:]:
            self._block_write(near, far)
        pair.settle()
        other.on_stream = lambda stream: None  # nobody accepts from here on
        self.unaccepted = [session.open() for _ in range(256)]
        self.opens: list[Deferred[MuxStream]] = [session.open() for _ in range(EACH)]
        for opening in self.opens:
            opening.addErrback(self._note)

    def _stream(self, session: MuxSession, other: MuxSession) -> tuple[MuxStream, MuxStream]:
        opened: list[MuxStream] = []
        session.open().addCallback(opened.append)
        self.pair.settle()
        self.pair.arrived[other][-1].accept()
        return opened[0], self.pair.arrived[other][-1]

    def _block_write(self, near: MuxStream, far: MuxStream) -> None:
        far.start(Recorder())
        far.pauseProducing()
        writer = Recorder()
        writer.connectionLost = self._note  # type: ignore[method-assign]
        near.start(writer)
        self.sources.append(Source(near, 1 * MiB))
        self.sources[-1].begin()

    def _note(self, reason: Failure) -> None:
        self.failed.append((self.pair.clock.seconds(), reason))

    def __iter__(self) -> Iterator[tuple[float, Failure]]:
        return iter(self.failed)


class EveryEndingTests(SynchronousTestCase):
    """Each way a session can die, with 300 operations blocked at each end (MUX-5, MUX-6)."""

    def die(self, name: str) -> None:
        """Block, die, and look at what everybody heard."""
        pair = SessionPair()
        blocked = [Blocked(pair, session) for session in (pair.client, pair.server)]
        pair.settle()
        for end in blocked:
            self.assertEqual(list(end), [])
            self.assertTrue(all(source.pauses and source.left for source in end.sources))
        ENDINGS[name](pair)
        died = pair.clock.seconds()
        pair.pass_time(ALL_AT)
        for end in blocked:
            self.assertEqual(len(end.failed), 3 * EACH, name)
            for at, reason in end:
                # A peer that closes says go-away first: an open that waits hears that.
                self.assertTrue(reason.check(SessionDead, *[SessionClosing][: name == "closed"]), f"{name}: {reason!r}")
                self.assertIsNone(reason.check(ConnectionDone))
                self.assertLessEqual(at - died, ALL_AT)
            self.assertTrue(all(source.stopped for source in end.sources))
        self.assertFalse(pair.client.is_open or pair.server.is_open)
        self.assertEqual((pair.client.stream_count, pair.server.stream_count), (0, 0))
        self.assertEqual(pair.clock.getDelayedCalls(), [])
        self.failureResultOf(pair.client.open(), SessionDead)

    def test_keepalive(self) -> None:
        """15 s of silence: 100 blocked reads, writes and opens of each end fail within a second (MUX-6, BR-057)."""
        self.die("keepalive")

    def test_connection(self) -> None:
        """A connection that ends, cleanly or not, is session death for all of them (MUX-5, MUX-6, BR-057)."""
        self.die("connection closed cleanly")
        self.die("connection lost")

    def test_go_away(self) -> None:
        """So is a go-away with a protocol or an internal error, and garbage (MUX-5, BR-057)."""
        self.die("go-away: protocol error")
        self.die("go-away: internal error")
        self.die("garbage")

    def test_on_purpose(self) -> None:
        """So is our own close or abort: it frees whoever waits (MUX-5, MUX-6, BR-057)."""
        self.die("closed")
        self.die("aborted")


class WriteTimeoutTests(SynchronousTestCase):
    def test_a_caller_that_gives_up_resets_its_stream(self) -> None:
        """A request not answered in time resets its own stream: the far side sees that, other streams live (BR-057)."""
        pair = SessionPair()
        near, far = pair.open()
        other, there = pair.open()
        reader, beside = Recorder(), Recorder()
        far.start(reader)
        there.start(beside)
        other.start(Recorder())
        asking = Deferred.fromCoroutine(send_frame_and_read_reply(near, b"hello", clock=pair.clock, timeout=2.0))
        pair.pass_time(1.9)
        self.assertNoResult(asking)
        pair.pass_time(0.2)
        self.failureResultOf(asking, HandshakeLate)
        assert reader.lost is not None
        self.assertTrue(reader.lost.check(StreamReset))
        other.write(b"alive")
        pair.settle()
        self.assertEqual((bytes(beside.data), beside.lost), (b"alive", None))
        pair.close()


class GoingAwayTests(SynchronousTestCase):
    def test_open_streams_finish_both_ways(self) -> None:
        """After a normal go-away a megabyte in flight each way arrives, and the streams end cleanly (MUX-5)."""
        pair = SessionPair()
        near, far = pair.open()
        a, b = Recorder(), Recorder()
        near.start(a)
        far.start(b)
        near.write(b"u" * MiB)
        far.write(b"d" * MiB)
        pair.server.go_away()
        pair.settle()
        near.loseConnection()
        pair.pass_time(1)
        self.assertEqual((len(a.data), len(b.data)), (MiB, MiB))
        for recorder in (a, b):
            assert recorder.lost is not None
            self.assertTrue(recorder.lost.check(ConnectionDone))
        self.assertTrue(pair.client.is_open and pair.server.is_open)
        pair.close()


class IsolationTests(SynchronousTestCase):
    """One stream's faulty application is not the others' (MUX-5, MUX-16)."""

    def test_a_protocol_that_fails_at_the_end(self) -> None:
        """When a session dies every stream is told, though one's connectionLost or producer raises."""

        class Faulty(Recorder):
            def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
                raise ZeroDivisionError

        class FaultyProducer:
            def resumeProducing(self) -> None:
                raise ZeroDivisionError

            pauseProducing = stopProducing = resumeProducing

        pair = SessionPair()
        streams = [pair.open()[0] for _ in range(9)]
        recorders = [Faulty() if number % 3 == 0 else Recorder() for number in range(9)]
        for number, (stream, recorder) in enumerate(zip(streams, recorders, strict=True)):
            stream.start(recorder)
            if number % 3 == 1:
                stream.registerProducer(FaultyProducer(), True)
        pair.client.abort(ValueError("x"))
        pair.settle()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 6)
        for number, recorder in enumerate(recorders):
            self.assertTrue(number % 3 == 0 or recorder.lost is not None)
        pair.close()

    def test_a_producer_that_fails_costs_its_stream(self) -> None:
        """A producer that raises when it is resumed ends its stream; another one's transfer goes on."""

        class Faulty(Source):
            def resumeProducing(self) -> None:
                if self.pauses:
                    raise ZeroDivisionError
                super().resumeProducing()

        pair = SessionPair()
        ends = [pair.open() for _ in range(2)]
        recorders = [Recorder(), Recorder()]
        for (near, far), recorder, kind in zip(ends, recorders, (Faulty, Source), strict=True):
            near.start(Recorder())
            far.start(recorder)
            kind(near, 2 * MiB).begin()
        pair.pass_time(2)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        assert recorders[0].lost is not None
        self.assertTrue(recorders[0].lost.check(StreamReset))
        self.assertEqual(len(recorders[1].data), 2 * MiB)
        pair.close()


class IdsTests(SynchronousTestCase):
    def test_no_id_left(self) -> None:
        """With every id used an open is refused clearly, one that waited too; the session goes on (MUX-2)."""
        pair = SessionPair()
        waiting = [pair.client.open() for _ in range(257)][-1]
        pair.settle()
        pair.client.core._next_id = MAX_LENGTH + 2
        pair.arrived[pair.server][0].accept()
        pair.settle()
        self.failureResultOf(waiting, StreamIdsExhausted)
        pair.arrived[pair.server][1].accept()
        pair.settle()
        self.failureResultOf(pair.client.open(), StreamIdsExhausted)
        self.assertTrue(pair.client.is_open)
        pair.close()
