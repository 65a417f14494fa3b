"""The session's shell: opening, keepalive, going away, dying."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionLost
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import KeepaliveTimeout, SessionClosing, SessionDead, StreamReset, TooManyStreams
from localai_dist.mux.frame import Flag, FrameType, encode
from localai_dist.mux.window import CREDIT_TIME, SPEC_WINDOW
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.stream import MuxStream
from localai_dist.testing.memory import MemoryCarrier, Recorder, SessionPair
from localai_dist.testing.streams import Source
from localai_dist.units import KiB, MiB
from tests.mux.wires import frames_of


class SessionCase(SynchronousTestCase):
    config = SessionConfig()

    def setUp(self) -> None:
        self.pair = SessionPair(config=self.config)
        self.client, self.server = self.pair.client, self.pair.server
        self.addCleanup(self.end)

    def end(self) -> None:
        self.pair.close()
        self.assertEqual(self.pair.clock.getDelayedCalls(), [])
        self.assertEqual((self.client.stream_count, self.server.stream_count), (0, 0))


class OpeningTests(SessionCase):
    def test_backlog(self) -> None:
        """Of 300 opens at once 256 go out, the others wait for accepts and then succeed (MUX-4)."""
        self.server.on_stream = lambda stream: arrived.append(stream)
        arrived: list[MuxStream] = []
        opens = [self.client.open() for _ in range(300)]
        self.pair.settle()
        self.assertEqual(len(arrived), 256)
        self.assertEqual(sum(opened.called for opened in opens), 256)
        for stream in list(arrived):
            stream.accept()
            stream.accept()
        self.pair.settle()
        self.assertEqual((len(arrived), sum(opened.called for opened in opens)), (300, 300))

    def test_a_refused_stream_frees_its_place(self) -> None:
        """A reset before the accept lets a waiting open through (MUX-4)."""
        opens = [self.client.open() for _ in range(257)]
        self.pair.settle()
        self.assertNoResult(opens[256])
        self.pair.arrived[self.server][0].abortConnection()
        self.pair.settle()
        self.successResultOf(opens[256])

    def test_too_many(self) -> None:
        """The 1001st stream at once is refused, the others live on (MUX-4)."""
        self.server.on_stream = lambda stream: stream.accept()
        for _ in range(1000):
            self.client.open()
            self.pair.settle()
        self.failureResultOf(self.client.open(), TooManyStreams)
        self.assertEqual((self.client.stream_count, self.server.stream_count), (1000, 1000))
        self.assertTrue(self.client.is_open)

    def test_cancel_of_a_waiting_open(self) -> None:
        """A cancelled open leaves the queue."""
        opens = [self.client.open() for _ in range(258)]
        opens[256].cancel()
        self.failureResultOf(opens[256], CancelledError)
        self.pair.settle()
        self.pair.arrived[self.server][0].accept()
        self.pair.settle()
        self.successResultOf(opens[257])

    def test_nobody_listens(self) -> None:
        """Without on_stream an incoming stream is reset."""
        self.server.on_stream = None
        stream = self.successResultOf(self.client.open())
        recorder = Recorder()
        stream.start(recorder)
        self.pair.settle()
        self.assertTrue(recorder.lost.check(StreamReset))

    def test_failing_listener_costs_one_stream(self) -> None:
        """An exception in on_stream is logged and refuses that stream; the session lives."""
        self.server.on_stream = lambda stream: 1 / 0
        stream = self.successResultOf(self.client.open())
        recorder = Recorder()
        stream.start(recorder)
        self.pair.settle()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertTrue(recorder.lost.check(StreamReset) and self.server.is_open)


class GoingAwayTests(SessionCase):
    def test_go_away(self) -> None:
        """Open streams finish, new ones are refused on both ends, both are told once (MUX-5)."""
        told: list[str] = []
        self.client.on_go_away = lambda: told.append("client")
        near, far = self.pair.open()
        a, b = Recorder(), Recorder()
        near.start(a)
        far.start(b)
        self.server.go_away()
        self.server.go_away()
        self.pair.settle()
        self.assertEqual(told, ["client"])
        self.failureResultOf(self.client.open(), SessionClosing)
        self.failureResultOf(self.server.open(), SessionClosing)
        near.write(b"still here")
        near.loseConnection()
        self.pair.settle()
        self.assertEqual(bytes(b.data), b"still here")
        self.assertTrue(self.client.is_open and self.client.is_going_away)

    def test_idle_is_told(self) -> None:
        """A session says when its last stream is gone."""
        idle: list[int] = []
        self.client.on_idle = lambda: idle.append(1)
        near, far = self.pair.open()
        near.start(Recorder())
        far.start(Recorder())
        near.loseConnection()
        self.pair.settle()
        self.assertEqual(idle, [1])

    def test_waiting_opens_fail(self) -> None:
        """Opens that wait when the peer goes away fail (MUX-5)."""
        opens = [self.client.open() for _ in range(260)]
        self.server.go_away()
        self.pair.settle()
        for opened in opens[256:]:
            self.failureResultOf(opened, SessionClosing)

    def test_close_is_code_1000(self) -> None:
        """close() says go-away and closes with code 1000; both ends are told of a session's end."""
        self.client.close()
        self.assertEqual(self.pair.carriers.a.closed_with, 1000)
        self.pair.settle()
        self.assertFalse(self.server.is_open)

    def test_protocol_error(self) -> None:
        """A peer that breaks the protocol is told so with 1002; every stream gets session death (MUX-5)."""
        _, far = self.pair.open()
        recorder = Recorder()
        far.start(recorder)
        self.server.bytes_received(b"\x07garbage.....")
        self.assertEqual(self.pair.carriers.b.closed_with, 1002)
        self.assertIn(encode(FrameType.GO_AWAY, Flag.NONE, 0, 1), b"".join(self.pair.carriers.b.outbox))
        self.assertTrue(recorder.lost.check(SessionDead))

    def test_internal_error_of_the_peer(self) -> None:
        """A go-away with an error code is session death (MUX-5)."""
        self.client.bytes_received(encode(FrameType.GO_AWAY, Flag.NONE, 0, 2))
        self.assertIn("internal error", self.successResultOf(self.client.when_closed()).getErrorMessage())


class DyingTests(SessionCase):
    def test_silence(self) -> None:
        """15 s of silence end the session on both ends; reads, writes and opens all fail with its death (MUX-6)."""
        streams = [self.pair.open() for _ in range(100)]
        recorders = [Recorder() for _ in range(200)]
        for (near, far), a, b in zip(streams, recorders[::2], recorders[1::2], strict=True):
            near.start(a)
            far.start(b)
            near.write(b"x" * MiB)
        self.pair.settle()
        opens = [self.client.open() for _ in range(300)]
        self.pair.carriers.frozen = True
        watchers = [session.when_closed() for session in (self.client, self.server, self.client)]
        self.pair.pass_time(14.9)
        self.assertTrue(self.client.is_open and self.server.is_open)
        self.pair.pass_time(0.2)
        for recorder in recorders:
            self.assertTrue(recorder.lost.check(SessionDead))
        for opened in opens[256:]:
            self.failureResultOf(opened, SessionDead)
        self.failureResultOf(self.client.open(), SessionDead)
        for watcher in watchers:
            self.assertTrue(self.successResultOf(watcher).check(KeepaliveTimeout))
        self.assertTrue(self.pair.carriers.a.aborted and self.pair.carriers.b.aborted)

    def test_idle_session_lives(self) -> None:
        """Pings keep a session alive for as long as both ends answer (MUX-6)."""
        self.pair.pass_time(120, step=0.5)
        self.assertTrue(self.client.is_open and self.server.is_open)
        self.assertIsNotNone(self.client.rtt)

    def test_eight_seconds_are_survived(self) -> None:
        """A peer frozen for 8 s comes back and the transfer completes (MUX-14)."""
        near, far = self.pair.open(traffic=TrafficClass.BULK)
        near.start(Recorder())
        recorder = Recorder()
        far.start(recorder)
        Source(near, 20 * MiB).begin()
        self.pair.settle()
        self.pair.carriers.frozen = True
        self.pair.pass_time(8)
        self.pair.carriers.frozen = False
        self.pair.pass_time(10)
        self.assertEqual(len(recorder.data), 20 * MiB)

    def test_connection_lost(self) -> None:
        """A lost connection is session death, told once to each who asks; later askers hear at once."""
        before = self.client.when_closed()
        self.pair.carriers.a.lose(ConnectionLost("cable"))
        self.assertIn("cable", self.successResultOf(before).getErrorMessage())
        self.assertTrue(self.successResultOf(self.client.when_closed()).check(SessionDead))
        self.assertFalse(self.client.is_open)
        self.client.close()
        self.client.go_away()
        self.client.abort(ValueError())

    def test_forgotten_watcher(self) -> None:
        """A cancelled watcher is not called any more."""
        watcher: Deferred[object] = self.client.when_closed()
        watcher.cancel()
        self.failureResultOf(watcher, CancelledError)
        self.client.abort(ValueError("enough"))
        self.assertIn("enough", self.successResultOf(self.client.when_closed()).getErrorMessage())

    def test_peer_that_floods_and_does_not_read(self) -> None:
        """A peer that pings without end and reads nothing loses its session; what we owe it stays bounded."""
        self.pair.carriers.frozen = True
        ping = encode(FrameType.PING, Flag.SYN, 0, 7) * 5000
        for _ in range(100):
            self.server.bytes_received(ping)
            self.pair.clock.advance(0)
        self.assertFalse(self.server.is_open)
        self.assertLess(self.pair.carriers.b.largest, 65_537)


class TransferTests(SessionCase):
    def test_messages_stay_small(self) -> None:
        """No message of ours is above 256 KiB, header included, however fast the transport drains (MUX-12)."""
        near, far = self.pair.open(traffic=TrafficClass.BULK)
        near.start(Recorder())
        far.start(Recorder())
        Source(near, 8 * MiB).begin()
        self.pair.pass_time(2)
        self.assertLessEqual(self.pair.carriers.a.largest, 64 * KiB)
        for _ in range(50):
            near.session.core.sender.limit.drained(1 * MiB, 0.0001)
        Source(near, 8 * MiB).begin()
        self.pair.pass_time(2)
        self.assertGreater(self.pair.carriers.a.largest, 200 * KiB)
        self.assertLessEqual(self.pair.carriers.a.largest + 14, 256 * KiB)

    def test_withheld_credit_is_granted_soon(self) -> None:
        """Credit held back to become a larger piece is granted a millisecond later, lest the sender stands still."""
        near, far = self.pair.open(traffic=TrafficClass.BULK)
        near.start(Recorder())
        far.traffic = TrafficClass.BULK
        far.start(Recorder())
        self.pair.settle()
        window = self.pair.server.core.streams[near.id].receive_window
        window.grain = 256 * KiB
        near.write(bytes(100 * KiB))
        self.pair.settle()
        self.assertEqual(window.owed, 100 * KiB)
        self.pair.clock.advance(CREDIT_TIME)
        self.pair.settle()
        self.assertEqual(window.owed, 0)

    def test_transport_is_never_overfilled(self) -> None:
        """While the transport drains nothing, the session gives it a bounded amount, however many streams want."""
        ends = [self.pair.open(traffic=traffic) for traffic in (TrafficClass.BULK, *[TrafficClass.INFERENCE] * 10)]
        for near, far in ends:
            near.start(Recorder())
            far.start(Recorder())
        self.pair.settle()
        self.pair.carriers.frozen = True
        for near, _ in ends:
            Source(near, 8 * MiB).begin()
        self.pair.pass_time(1)
        self.assertLess(sum(map(len, self.pair.carriers.a.outbox)), 256 * KiB)

    def test_any_cut_of_messages(self) -> None:
        """A carrier that hands over seven bytes at a time changes nothing (MUX-1, MUX-12)."""
        self.pair.carriers.chunk = 7
        near, far = self.pair.open()
        recorder = Recorder()
        far.start(recorder)
        near.start(Recorder())
        near.write(bytes(range(256)) * 500)
        near.loseConnection()
        self.pair.settle()
        self.assertEqual(bytes(recorder.data), bytes(range(256)) * 500)

    def test_one_stalled_bulk_reader_does_not_stop_another(self) -> None:
        """A bulk stream nobody reads does not hold another one's bytes back (MUX-13)."""
        near, far = self.pair.open(traffic=TrafficClass.BULK)
        far.start(Recorder())
        far.traffic = TrafficClass.BULK
        far.pauseProducing()
        near.start(Recorder())
        Source(near, 500 * MiB).begin()
        self.pair.pass_time(5)
        other, there = self.pair.open(traffic=TrafficClass.BULK)
        recorder = Recorder()
        there.start(recorder)
        other.start(Recorder())
        Source(other, 20 * MiB).begin()
        self.pair.pass_time(5)
        self.assertEqual(len(recorder.data), 20 * MiB)
        near.abortConnection()
        other.abortConnection()
        self.pair.settle()


class ManyUnreadTests(SynchronousTestCase):
    """A thousand streams nobody reads (MUX-7)."""

    def test_unread_bound(self) -> None:
        """With 1000 streams nobody reads, what is held stays under 256 KiB each and the pool (MUX-7)."""
        clock, carrier = Clock(), MemoryCarrier()
        server = MuxSession(carrier, client=False, config=SessionConfig(), clock=clock)
        held: list[MuxStream] = []

        def arrived(stream: MuxStream) -> None:
            held.append(stream)
            stream.accept()
            stream.traffic = TrafficClass.BULK

        server.on_stream = arrived
        server.begin()
        credit = dict.fromkeys(range(1, 2001, 2), SPEC_WINDOW)
        for number in credit:
            server.bytes_received(encode(FrameType.WINDOW_UPDATE, Flag.SYN, number, 0))
        clock.advance(0)
        for header in frames_of(b"".join(carrier.outbox)):
            if header.type == FrameType.WINDOW_UPDATE:
                credit[header.stream_id] += header.length
        block = bytes(64 * KiB)  # one object for all of them, or this test would hold 320 MB
        for number, allowed in credit.items():
            for at in range(0, allowed, len(block)):
                size = min(len(block), allowed - at)
                server.bytes_received(encode(FrameType.DATA, Flag.NONE, number, size))
                server.bytes_received(block if size == len(block) else block[:size])
        self.assertEqual((len(held), server.stream_count), (1000, 1000))
        self.assertEqual(sum(stream._unread_size for stream in held), 1000 * 256 * KiB + 64 * MiB)
        server.core.check()
        server.bytes_received(encode(FrameType.DATA, Flag.NONE, 7, 1) + b"x")
        self.assertEqual((server.is_open, server.stream_count), (True, 999))
        server.abort(ValueError("enough"))
        self.assertEqual(sum(stream._unread_size for stream in held), 0)
        self.assertEqual(clock.getDelayedCalls(), [])
