"""A session by its frames: what the peer may do, and what breaking a rule costs it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux import errors, events
from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.frame import MAX_LENGTH, Flag, FrameType, GoAway, Header, decode, encode
from localai_dist.mux.limits import Limits
from localai_dist.mux.session import Session
from localai_dist.mux.stream import Stream
from localai_dist.units import KiB, MiB


def sent_by(session: Session, now: float = 0.0) -> list[tuple[Header, int]]:
    """The frames a session sends now, each with the size of its payload."""
    data = b""
    while (batch := session.next_batch(now, 0)).parts:
        data += b"".join(batch.parts)
    frames, at = [], 0
    while at < len(data):
        header = decode(data, at)
        size = header.length if header.type == FrameType.DATA else 0
        frames.append((header, size))
        at += 12 + size
    return frames


class SessionCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.server = Session(client=False)

    def open_one(self, stream_id: int = 1) -> Stream:
        (event,) = self.server.receive(encode(FrameType.WINDOW_UPDATE, Flag.SYN, stream_id, 0), 0.0)
        assert isinstance(event, events.StreamOpened)
        return event.stream

    def assert_sent(self, *wanted: tuple[FrameType, Flag, int, int]) -> None:
        self.assertEqual([tuple(header)[1:] for header, _ in sent_by(self.server)], list(wanted))

    def assert_fatal(self, data: bytes, error: type[errors.RemoteProtocolError]) -> None:
        (*_, last) = self.server.receive(data, 0.0)
        assert isinstance(last, events.SessionFailed)
        self.assertIsInstance(last.error, error)
        self.assertIs(last.code, GoAway.PROTOCOL_ERROR)
        self.assertEqual(self.server.receive(b"anything", 0.0), [])


class PeerMistakesTests(SessionCase):
    """What costs the peer its session (MUX-1)."""

    def test_version(self) -> None:
        """Another version ends the session."""
        self.assert_fatal(b"\x01" + bytes(11), errors.BadVersion)

    def test_type(self) -> None:
        """An unknown frame type ends the session."""
        self.assert_fatal(b"\x00\x09" + bytes(10), errors.BadFrameType)

    def test_flags(self) -> None:
        """Unknown flags end the session."""
        self.assert_fatal(b"\x00\x00\x00\x10" + bytes(8), errors.BadFrameType)

    def test_parity(self) -> None:
        """A stream opened with an id of ours ends the session."""
        self.assert_fatal(encode(FrameType.WINDOW_UPDATE, Flag.SYN, 2, 0), errors.BadStreamId)

    def test_twice(self) -> None:
        """A stream opened twice ends the session."""
        self.open_one()
        self.assert_fatal(encode(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 0), errors.BadStreamId)

    def test_never_opened(self) -> None:
        """A frame on a stream that never was ends the session, of either parity."""
        self.assert_fatal(encode(FrameType.WINDOW_UPDATE, Flag.NONE, 7, 0), errors.BadStreamId)
        self.server = Session(client=False)
        self.assert_fatal(encode(FrameType.WINDOW_UPDATE, Flag.ACK, 2, 0), errors.BadStreamId)

    def test_stream_zero_and_session_frames_on_streams(self) -> None:
        """Stream frames need a stream, session frames none."""
        self.assert_fatal(encode(FrameType.DATA, Flag.NONE, 0, 0), errors.BadStreamId)
        self.server = Session(client=False)
        self.assert_fatal(encode(FrameType.PING, Flag.SYN, 1, 0), errors.BadStreamId)

    def test_payload_over_the_limit(self) -> None:
        """A data frame longer than any window ends the session."""
        self.open_one()
        self.assert_fatal(encode(FrameType.DATA, Flag.NONE, 1, 16 * MiB + 1), errors.FrameTooLong)

    def test_credit_overflow(self) -> None:
        """Credit beyond 2**32 - 1 ends the session."""
        self.open_one()
        self.assert_fatal(encode(FrameType.WINDOW_UPDATE, Flag.NONE, 1, MAX_LENGTH), errors.WindowOverflow)


class StreamMistakesTests(SessionCase):
    """What costs the peer one stream only (MUX-1, MUX-7)."""

    def test_overrun(self) -> None:
        """Data past the window resets that stream; its payload is skipped, others go on."""
        stream = self.open_one(1)
        other = self.open_one(3)
        data = encode(FrameType.DATA, Flag.NONE, 1, 256 * KiB + 1) + bytes(256 * KiB + 1)
        data += encode(FrameType.DATA, Flag.NONE, 3, 2) + b"ok"
        cut, after = self.server.receive(data, 0.0)
        assert isinstance(cut, events.StreamCut)
        self.assertIs(cut.stream, stream)
        self.assertIsInstance(cut.violation, errors.StreamViolation)
        self.assertEqual(after, events.DataReceived(other, b"ok"))
        self.assert_sent((FrameType.WINDOW_UPDATE, Flag.RST, 1, 0))
        self.server.check()

    def test_data_after_fin(self) -> None:
        """Data after FIN resets that stream."""
        self.open_one()
        data = encode(FrameType.WINDOW_UPDATE, Flag.FIN, 1, 0) + encode(FrameType.DATA, Flag.NONE, 1, 1) + b"x"
        finished, cut = self.server.receive(data, 0.0)
        self.assertIsInstance(finished, events.StreamFinished)
        assert isinstance(cut, events.StreamCut)
        self.assertTrue(cut.after_fin)

    def test_frames_of_streams_gone_are_ignored(self) -> None:
        """Late frames change nothing, and their payload is skipped by length."""
        stream = self.open_one()
        self.server.reset(stream)
        late = encode(FrameType.DATA, Flag.NONE, 1, 4) + b"late" + encode(FrameType.WINDOW_UPDATE, Flag.FIN, 1, 9)
        self.assertEqual(self.server.receive(late + encode(FrameType.WINDOW_UPDATE, Flag.RST, 1, 0), 0.0), [])
        self.assertEqual(self.server.streams, {})

    def test_local_reset_inside_a_payload(self) -> None:
        """A stream cut while half a payload is there skips the other half."""
        stream = self.open_one()
        (first,) = self.server.receive(encode(FrameType.DATA, Flag.NONE, 1, 4) + b"ab", 0.0)
        self.assertEqual(first, events.DataReceived(stream, b"ab"))
        self.server.reset(stream)
        self.server.consumed(stream, 2, 0.0)
        (pong_wanted) = self.server.receive(b"cd" + encode(FrameType.PING, Flag.SYN, 0, 77), 0.0)
        self.assertEqual(pong_wanted, [])
        self.server.check()
        self.assertEqual(self.server.streams, {})


class StreamLifeTests(SessionCase):
    def test_ping_is_answered(self) -> None:
        """A ping is answered with its value, ahead of all data (MUX-6)."""
        stream = self.open_one()
        self.server.accept(stream)
        self.server.write(stream, b"x" * 1000, 0.0)
        self.server.receive(encode(FrameType.PING, Flag.SYN, 0, 0xABCD), 0.0)
        self.assert_sent(
            (FrameType.WINDOW_UPDATE, Flag.ACK, 1, 0),
            (FrameType.PING, Flag.ACK, 0, 0xABCD),
            (FrameType.DATA, Flag.NONE, 1, 1000),
        )

    def test_fin_with_data(self) -> None:
        """A FIN on a data frame comes after its payload, however that is cut."""
        stream = self.open_one()
        self.assertEqual(
            self.server.receive(encode(FrameType.DATA, Flag.FIN, 1, 3) + b"a", 0.0), [events.DataReceived(stream, b"a")]
        )
        self.assertEqual(
            self.server.receive(b"bc", 0.0), [events.DataReceived(stream, b"bc"), events.StreamFinished(stream)]
        )

    def test_limit_of_incoming_streams(self) -> None:
        """The 1001st stream is reset, nothing else happens (MUX-4)."""
        for number in range(1000):
            self.open_one(2 * number + 1)
        self.assertEqual(self.server.receive(encode(FrameType.WINDOW_UPDATE, Flag.SYN, 2001, 0), 0.0), [])
        self.assert_sent((FrameType.WINDOW_UPDATE, Flag.RST, 2001, 0))

    def test_backlog_and_limits_of_own_streams(self) -> None:
        """Opening is refused clearly: backlog, number, ids, go-away (MUX-2, MUX-4)."""
        session = Session(client=True, limits=Limits(max_streams=3, backlog=2))
        first = session.open()
        session.open()
        self.assertTrue(session.backlog_full)
        self.assertRaises(errors.LocalProtocolError, session.open)
        session.receive(encode(FrameType.WINDOW_UPDATE, Flag.ACK, first.id, 0), 0.0)
        session.open()
        session.receive(encode(FrameType.WINDOW_UPDATE, Flag.ACK, 3, 0), 0.0)
        self.assertRaises(errors.TooManyStreams, session.open)
        session.reset(first)
        session._next_id = MAX_LENGTH + 2
        self.assertRaises(errors.StreamIdsExhausted, session.open)
        session.go_away()
        self.assertRaises(errors.SessionClosing, session.open)
        session.check()

    def test_go_away_refuses_new_streams(self) -> None:
        """After our go-away a new stream is reset, an open one goes on (MUX-5)."""
        stream = self.open_one()
        self.server.go_away()
        self.server.go_away()
        self.server.receive(encode(FrameType.WINDOW_UPDATE, Flag.SYN, 3, 0), 0.0)
        self.assert_sent((FrameType.GO_AWAY, Flag.NONE, 0, 0), (FrameType.WINDOW_UPDATE, Flag.RST, 3, 0))
        self.assertEqual(
            self.server.receive(encode(FrameType.DATA, Flag.NONE, 1, 1) + b"x", 0.0),
            [events.DataReceived(stream, b"x")],
        )

    def test_received_go_away(self) -> None:
        """Normal says so once; an error code is session death (MUX-5)."""
        normal = encode(FrameType.GO_AWAY, Flag.NONE, 0, 0)
        self.assertEqual(self.server.receive(normal + normal, 0.0), [events.GoAwayReceived()])
        for code in (1, 2, 99):
            session = Session(client=False)
            (event,) = session.receive(encode(FrameType.GO_AWAY, Flag.NONE, 0, code), 0.0)
            assert isinstance(event, events.SessionFailed)
            self.assertIsInstance(event.error, errors.SessionDead)
            self.assertIsNone(event.code)

    def test_simultaneous_reset(self) -> None:
        """Resets that cross each other leave nothing behind."""
        stream = self.open_one()
        self.server.reset(stream)
        self.assertEqual(self.server.receive(encode(FrameType.WINDOW_UPDATE, Flag.RST, 1, 0), 0.0), [])
        self.assertEqual((self.server.streams, self.server.opened_there), ({}, 0))


class ClassOrderTests(SessionCase):
    """Whose frames go next (MUX-15)."""

    def streams(self, *classes: TrafficClass) -> list[Stream]:
        opened = []
        for number, traffic in enumerate(classes):
            stream = self.open_one(2 * number + 1)
            self.server.accept(stream)
            stream.declared = traffic
            stream.send_window.granted(100 * MiB)
            opened.append(stream)
        sent_by(self.server)
        return opened

    def test_urgent_goes_first(self) -> None:
        """Written last, control goes before inference and that before bulk."""
        bulk, inference, control = self.streams(TrafficClass.BULK, TrafficClass.INFERENCE, TrafficClass.CONTROL)
        for stream in (bulk, inference, control):
            self.server.write(stream, b"x" * 1000, 0.0)
        self.assertEqual([header.stream_id for header, _ in sent_by(self.server)], [control.id, inference.id, bulk.id])

    def test_floor(self) -> None:
        """Beside endless inference bulk still gets about a fifth, and no more."""
        bulk, inference = self.streams(TrafficClass.BULK, TrafficClass.INFERENCE)
        inference.declared = TrafficClass.CONTROL  # so that it does not turn bulk
        got = {bulk.id: 0, inference.id: 0}
        for _ in range(400):
            for stream in (bulk, inference):
                while stream.queued < 256 * KiB:
                    self.server.write(stream, b"x" * 64 * KiB, 0.0)
            batch = self.server.next_batch(0.0, 0)
            self.server.sender.delay.under_way = 0
            at, data = 0, b"".join(batch.parts)
            while at < len(data):
                header = decode(data, at)
                got[header.stream_id] += header.length
                at += 12 + header.length
        share = got[bulk.id] / sum(got.values())
        self.assertGreater(share, 0.15)
        self.assertLess(share, 0.25)

    def test_bulk_waits_for_the_transport(self) -> None:
        """With a full transport bulk waits, inference may go a little over, control frames go."""
        bulk, inference = self.streams(TrafficClass.BULK, TrafficClass.INFERENCE)
        limit = self.server.sender.limit.limit
        self.server.write(bulk, b"x", 0.0)
        self.server.receive(encode(FrameType.PING, Flag.SYN, 0, 1), 0.0)
        self.assertEqual(self.server.next_batch(0.0, limit).size, 12)
        self.server.write(inference, b"y", 0.0)
        self.assertEqual(self.server.next_batch(0.0, limit).served, [inference])
        self.server.write(inference, b"y", 0.0)
        self.assertEqual(self.server.next_batch(0.0, limit + 64 * KiB).parts, [])

    def test_delay_cap(self) -> None:
        """Bulk under way stops at the cap; an answered ping frees it though no credit came (MUX-13, MUX-15)."""
        (bulk,) = self.streams(TrafficClass.BULK)
        self.server.write(bulk, b"x" * 4 * MiB, 0.0)
        first = sum(size for _, size in sent_by(self.server))
        self.assertLess(first, 512 * KiB)
        self.assertEqual(sent_by(self.server), [])
        self.server.ping(0.0)
        sent_by(self.server)
        self.server.receive(encode(FrameType.PING, Flag.ACK, 0, 1), 0.001)
        self.assertGreater(sum(size for _, size in sent_by(self.server)), 0)


class ChunkingTests(SynchronousTestCase):
    @settings(max_examples=60)
    @given(st.data())
    def test_chunking_is_invisible(self, data: st.DataObject) -> None:
        """However the peer's bytes are cut, the same events come out (MUX-1)."""
        client = Session(client=True)
        first, second = client.open(), client.open(TrafficClass.BULK)
        client.write(first, b"hello" * 100, 0.0)
        client.finish(first)
        client.write(second, b"z" * 3000, 0.0)
        client.ping(0.0)
        client.go_away()
        wire = b""
        while (batch := client.next_batch(0.0, 0)).parts:
            wire += b"".join(batch.parts)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=30)))
        whole, cut = Session(client=False), Session(client=False)
        wanted = flatten(whole.receive(wire, 0.0))
        got: list[events.Event] = []
        for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
            got += cut.receive(wire[start:end], 0.0)
        self.assertEqual(flatten(got), wanted)

    @settings(max_examples=300)
    @given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=4))
    def test_garbage(self, garbage: bytes, cuts: list[int]) -> None:
        """Any bytes at all give events or one named error, never an exception (MUX-18)."""
        session = Session(client=False)
        session.receive(encode(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 0), 0.0)
        for event in session.receive(garbage, 0.0):
            if isinstance(event, events.SessionFailed):
                self.assertIsInstance(event.error, errors.MuxError)
        session.check()

    @settings(max_examples=300)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(FrameType),
                st.integers(0, 15),
                st.sampled_from([0, 1, 2, 3, 5]),
                st.sampled_from([0, 1, 100, 262144, 262145, MAX_LENGTH]),
            ),
            max_size=30,
        )
    )
    def test_odd_frames(self, frames: list[tuple[FrameType, int, int, int]]) -> None:
        """Any sequence of well-formed frames leaves the books balanced (MUX-18)."""
        session = Session(client=False)
        session.open()
        for type_, flags, stream_id, length in frames:
            payload = bytes(length) if type_ is FrameType.DATA and length < MAX_LENGTH else b""
            session.receive(encode(type_, Flag(flags), stream_id, length) + payload, 0.0)
            session.next_batch(0.0, 0)
            session.check()


def flatten(received: list[events.Event]) -> list[tuple[object, ...]]:
    """Events as comparable values, a stream's consecutive data joined."""
    out: list[tuple[object, ...]] = []
    data: dict[int, bytes] = {}
    for event in received:
        if isinstance(event, events.DataReceived):
            data[event.stream.id] = data.get(event.stream.id, b"") + event.data
        else:
            stream = getattr(event, "stream", None)
            out.append((type(event).__name__, stream and stream.id))
    return [*out, *sorted(data.items())]
