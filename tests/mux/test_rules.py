"""The rules of a session clause by clause: kinds of frames, states, what crosses on the wire, accepts, go-aways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux import errors, events
from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.frame import MAX_LENGTH, Flag, FrameType, GoAway, decode, encode
from localai_dist.mux.session import Session
from localai_dist.mux.stream import IllegalInput, Input, State, Stream, step
from localai_dist.mux.window import SPEC_WINDOW
from localai_dist.units import KiB, MiB
from tests.mux.wires import frames_of, wire_of


def told(received: list[events.Event]) -> list[tuple[str, int, object]]:
    """Events as values: kind, stream, and what they carry; a stream's neighbouring data joined."""
    out: list[tuple[str, int, object]] = []
    for event in received:
        stream = getattr(event, "stream", None)
        number = 0 if stream is None else stream.id
        what: object = getattr(event, "data", getattr(event, "round_trip", getattr(event, "after_fin", None)))
        if isinstance(event, events.DataReceived) and out and out[-1][:2] == ("DataReceived", number):
            out[-1] = ("DataReceived", number, bytes(out[-1][2]) + event.data)  # type: ignore[call-overload]
        else:
            out.append((type(event).__name__, number, what))
    return out


def conversation() -> tuple[Session, bytes]:
    """A server in the middle of a conversation, and a wire of its client that has a frame of every kind."""
    client, server = Session(client=True), Session(client=False)
    theirs = server.open()
    server.write(theirs, b"x" * 20_000, 0.0)
    server.ping(0.0)
    (opened, *_) = client.receive(wire_of(server), 0.0)
    assert isinstance(opened, events.StreamOpened)
    client.accept(opened.stream)
    server.receive(wire_of(client), 0.0)
    server.write(theirs, b"x" * 80_000, 0.0)
    client.receive(wire_of(server), 0.0)
    client.consumed(opened.stream, 100_000, 0.0)
    server.ping(0.0)
    client.receive(wire_of(server), 0.0)
    first, second, third = (client.open(traffic) for traffic in TrafficClass)
    for stream in (first, second, third):
        client.write(stream, b"%d " % stream.id * 500, 0.0)
    client.finish(first)
    client.ping(0.0)
    wire = wire_of(client)
    client.reset(second)
    client.go_away()
    return server, wire + wire_of(client)


class EveryKindTests(SynchronousTestCase):
    """Frames as they come (MUX-1)."""

    def test_every_kind_means_what_it_says(self) -> None:
        """Each kind of frame an honest end sends comes out as its event, in order, with what it carries (MUX-1)."""
        server, wire = conversation()
        kinds = {(header.type, header.flags) for header in frames_of(wire)}
        window, data = FrameType.WINDOW_UPDATE, FrameType.DATA
        wanted = {(window, flag) for flag in (Flag.NONE, Flag.SYN, Flag.FIN, Flag.RST)} | {
            (data, Flag.NONE), (FrameType.PING, Flag.SYN), (FrameType.PING, Flag.ACK), (FrameType.GO_AWAY, Flag.NONE)
        }  # fmt: skip
        self.assertEqual(kinds, wanted)
        got = told(server.receive(wire, 0.25))
        self.assertEqual([entry for entry in got if entry[0] == "PongReceived"], [("PongReceived", 0, 0.25)])
        self.assertEqual([entry[1] for entry in got if entry[0] == "StreamOpened"], [1, 3, 5])
        for number in (1, 3, 5):
            self.assertIn(("DataReceived", number, b"%d " % number * 500), got)
        self.assertIn(("StreamFinished", 1, None), got)
        self.assertEqual(got[-2:], [("StreamCut", 3, False), ("GoAwayReceived", 0, None)])

    def test_an_accept_is_told_once(self) -> None:
        """The ACK of an own stream comes out as an event, whichever frame carries it (MUX-1)."""
        for frame in (
            encode(FrameType.WINDOW_UPDATE, Flag.ACK, 1, 0),
            encode(FrameType.DATA, Flag.ACK, 1, 2) + b"hi",
            encode(FrameType.WINDOW_UPDATE, Flag.ACK | Flag.FIN, 1, 0),
        ):
            client = Session(client=True)
            client.open()
            self.assertEqual(told(client.receive(frame + frame[:0], 0.0))[0], ("StreamAccepted", 1, None))
            self.assertEqual(client.unacked, 0)

    def test_any_cut_gives_the_same_events(self) -> None:
        """A byte at a time, in odd pieces or at once: the events are the same (MUX-1)."""
        server, wire = conversation()
        wanted = told(server.receive(wire, 0.25))
        for size in (1, 2, 5, 11, 12, 13, 1000):
            server, wire = conversation()
            got: list[events.Event] = []
            for at in range(0, len(wire), size):
                got += server.receive(wire[at : at + size], 0.25)
            self.assertEqual(told(got), wanted, size)
            server.check()

    def test_a_violation_of_one_stream_disturbs_nothing_else(self) -> None:
        """Data past one stream's window costs that stream; a transfer beside it loses no byte (MUX-1, MUX-7)."""
        server = Session(client=False)
        for number in (1, 3):
            (event,) = server.receive(encode(FrameType.WINDOW_UPDATE, Flag.SYN, number, 0), 0.0)
        assert isinstance(event, events.StreamOpened)
        good = event.stream
        over = encode(FrameType.DATA, Flag.NONE, 1, SPEC_WINDOW + 1) + bytes(SPEC_WINDOW + 1)
        piece = encode(FrameType.DATA, Flag.NONE, 3, 1000) + b"g" * 1000
        got = told(server.receive(piece + over + piece + over + piece, 0.0))
        self.assertEqual(b"".join(entry[2] for entry in got if entry[0] == "DataReceived"), b"g" * 3000)  # type: ignore[misc]
        self.assertEqual([entry[1] for entry in got if entry[0] == "StreamCut"], [1])
        self.assertEqual(good.receive_window.unread, 3000)
        self.assertEqual([header.flags for header in frames_of(wire_of(server))], [Flag.RST])
        self.assertFalse(server.failed)


class EveryPairTests(SynchronousTestCase):
    """Each state of a stream against each input, on a real session (MUX-2)."""

    FRAMES: Final = {
        Input.RECV_DATA: encode(FrameType.DATA, Flag.NONE, 1, 2) + b"xx",
        Input.RECV_FIN: encode(FrameType.WINDOW_UPDATE, Flag.FIN, 1, 0),
        Input.RECV_RST: encode(FrameType.WINDOW_UPDATE, Flag.RST, 1, 0),
        Input.RECV_CREDIT: encode(FrameType.WINDOW_UPDATE, Flag.NONE, 1, 77),
    }

    def in_state(self, state: State) -> tuple[Session, Stream]:
        """A stream in ``state``, kept there by three unread bytes."""
        session = Session(client=False)
        opened, _ = session.receive(
            encode(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 0) + encode(FrameType.DATA, Flag.NONE, 1, 3) + b"abc", 0.0
        )
        assert isinstance(opened, events.StreamOpened)
        stream = opened.stream
        session.accept(stream)
        if state in (State.LOCAL_CLOSED, State.CLOSED):
            session.finish(stream)
        if state in (State.REMOTE_CLOSED, State.CLOSED):
            session.receive(self.FRAMES[Input.RECV_FIN], 0.0)
        if state is State.RESET:
            session.reset(stream)
        wire_of(session)
        self.assertIs(stream.state, state)
        return session, stream

    def give(self, session: Session, stream: Stream, input_: Input) -> list[events.Event]:
        """The input, from whichever side it comes; what we send goes out."""
        own: dict[Input, Callable[[], None]] = {
            Input.SEND_DATA: lambda: session.write(stream, b"y", 0.0),
            Input.SEND_FIN: lambda: session.finish(stream),
            Input.SEND_RST: lambda: session.reset(stream),
        }
        if input_ in own:
            own[input_]()
            return []
        return session.receive(self.FRAMES[input_], 0.0)

    def test_every_pair(self) -> None:
        """Each of the 35 pairs leads where the document says, and never costs the session (MUX-2)."""
        for state in State:
            for input_ in Input:
                session, stream = self.in_state(state)
                with self.subTest(state=state, input=input_):
                    self.assertIs(self.outcome(session, stream, input_), self.decided(state, input_))
                    self.assertFalse(session.failed)
                    session.check()
                    # The unread bytes are still there to be read, unless the stream was cut under them.
                    if state is not State.RESET:
                        self.assertGreaterEqual(stream.receive_window.unread, 3)

    def outcome(self, session: Session, stream: Stream, input_: Input) -> State:
        """The state after it; a refusal to our own caller changes nothing."""
        before = stream.state
        try:
            self.give(session, stream, input_)
        except errors.LocalProtocolError:
            self.assertIs(stream.state, before)
        wire_of(session)
        return stream.state

    def decided(self, state: State, input_: Input) -> State:
        """The document's table: a dash changes nothing, *cut* is a reset, *ignored* changes nothing."""
        if (state, input_) == (State.REMOTE_CLOSED, Input.RECV_DATA):
            return State.RESET
        try:
            return step(state, input_)
        except IllegalInput:
            return state

    def subTest(self, **what: object) -> _Named:
        """trial has none."""
        return _Named(repr(what))


class _Named:
    """Says in which case an assertion failed."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(self.text)


class CrossingTests(SynchronousTestCase):
    """What crosses on the wire (MUX-2)."""

    def setUp(self) -> None:
        self.client, self.server = Session(client=True), Session(client=False)

    def cross(self) -> tuple[list[events.Event], list[events.Event]]:
        """Both send before either receives."""
        up, down = wire_of(self.client), wire_of(self.server)
        return self.client.receive(down, 0.0), self.server.receive(up, 0.0)

    def both(self) -> tuple[Stream, Stream]:
        """One stream at both ends."""
        near = self.client.open()
        _, (opened,) = self.cross()
        assert isinstance(opened, events.StreamOpened)
        self.server.accept(opened.stream)
        self.cross()
        return near, opened.stream

    def test_simultaneous_open(self) -> None:
        """Both ends open at once: two streams of different numbers, both usable (MUX-2)."""
        near, far = self.client.open(), self.server.open()
        at_client, at_server = self.cross()
        self.assertEqual((told(at_client), told(at_server)), ([("StreamOpened", 2, None)], [("StreamOpened", 1, None)]))
        self.client.write(near, b"up", 0.0)
        self.server.write(far, b"down", 0.0)
        at_client, at_server = self.cross()
        self.assertEqual(told(at_client), [("DataReceived", 2, b"down")])
        self.assertEqual(told(at_server), [("DataReceived", 1, b"up")])

    def test_simultaneous_close(self) -> None:
        """FINs that cross close the stream at both ends and leave nothing (MUX-2)."""
        near, far = self.both()
        self.client.finish(near)
        self.server.finish(far)
        at_client, at_server = self.cross()
        self.assertEqual((told(at_client), told(at_server)), ([("StreamFinished", 1, None)],) * 2)
        self.assertEqual((near.state, far.state), (State.CLOSED, State.CLOSED))
        self.assert_empty()

    def test_half_close_both_ways(self) -> None:
        """After either end's FIN the other direction goes on (MUX-2)."""
        for finishing, going_on in (("client", "server"), ("server", "client")):
            self.setUp()
            ends = dict(zip(("client", "server"), self.both(), strict=True))
            done, other = getattr(self, finishing), getattr(self, going_on)
            done.finish(ends[finishing])
            self.cross()
            other.write(ends[going_on], b"still", 0.0)
            got = self.cross()[finishing == "server"]
            self.assertEqual(told(got), [("DataReceived", 1, b"still")])

    def test_reset_from_either_side(self) -> None:
        """A reset ends both directions, what was queued is dropped; what crosses it changes nothing (MUX-2)."""
        for cutting in ("client", "server"):
            for crossing in ("data", "fin", "reset"):
                self.setUp()
                near, far = self.both()
                (cutter, mine), (other, theirs) = (self.client, near), (self.server, far)
                if cutting == "server":
                    (cutter, mine), (other, theirs) = (other, theirs), (cutter, mine)
                cutter.write(mine, b"never sent", 0.0)
                cutter.reset(mine)
                if crossing == "data":
                    other.write(theirs, b"late", 0.0)
                elif crossing == "fin":
                    other.finish(theirs)
                else:
                    other.reset(theirs)
                self.cross()
                self.cross()
                self.assert_empty()

    def test_go_away_that_crosses_an_open(self) -> None:
        """A stream opened while the peer's go-away was under way is refused, nothing more (MUX-5)."""
        self.client.open()
        self.server.go_away()
        at_client, at_server = self.cross()
        self.assertEqual((told(at_client), at_server), ([("GoAwayReceived", 0, None)], []))
        at_client, _ = self.cross()
        self.assertEqual(told(at_client), [("StreamCut", 1, False)])
        self.assert_empty()

    def assert_empty(self) -> None:
        for session in (self.client, self.server):
            session.check()
            self.assertEqual((session.streams, session.failed), ({}, False))


class AcceptTests(SynchronousTestCase):
    def test_ack_on_accept(self) -> None:
        """The peer's stream is ACKed when it is accepted, not when it arrives, and once (MUX-4)."""
        server = Session(client=False)
        (event,) = server.receive(encode(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 0), 0.0)
        assert isinstance(event, events.StreamOpened)
        self.assertEqual(wire_of(server), b"")
        server.accept(event.stream)
        server.accept(event.stream)
        self.assertEqual(wire_of(server), encode(FrameType.WINDOW_UPDATE, Flag.ACK, 1, 0))

    def test_the_1001st_does_no_harm(self) -> None:
        """One stream too many is reset; the thousand go on, and a place that is freed is used again (MUX-4)."""
        server = Session(client=False)
        streams = []
        for number in range(1, 2001, 2):
            (event,) = server.receive(encode(FrameType.WINDOW_UPDATE, Flag.SYN, number, 0), 0.0)
            assert isinstance(event, events.StreamOpened)
            streams.append(event.stream)
        self.assertEqual(server.receive(encode(FrameType.WINDOW_UPDATE, Flag.SYN, 2001, 0), 0.0), [])
        self.assertEqual(wire_of(server), encode(FrameType.WINDOW_UPDATE, Flag.RST, 2001, 0))
        for stream in streams:
            data = encode(FrameType.DATA, Flag.NONE, stream.id, 1) + b"x"
            self.assertEqual(server.receive(data, 0.0), [events.DataReceived(stream, b"x")])
        server.reset(streams[0])
        server.consumed(streams[0], 1, 0.0)
        (event,) = server.receive(encode(FrameType.WINDOW_UPDATE, Flag.SYN, 2003, 0), 0.0)
        self.assertIsInstance(event, events.StreamOpened)


class PingTests(SynchronousTestCase):
    def test_answered_inside_any_load(self) -> None:
        """With every class queued and the transport full, the answer to a ping is the next thing sent (MUX-6)."""
        server = Session(client=False)
        for number, traffic in zip((1, 3, 5), TrafficClass, strict=True):
            (event,) = server.receive(encode(FrameType.WINDOW_UPDATE, Flag.SYN, number, 16 * MiB), 0.0)
            assert isinstance(event, events.StreamOpened)
            server.accept(event.stream)
            event.stream.declared = traffic
            server.write(event.stream, b"x" * 4 * MiB, 0.0)
        for held in (0, 64 * KiB, 128 * KiB, 512 * KiB):
            server.next_batch(0.0, held)
            server.receive(encode(FrameType.PING, Flag.SYN, 0, held + 1), 0.0)
            first = decode(b"".join(server.next_batch(0.0, held).parts))
            self.assertEqual((first.type, first.flags, first.length), (FrameType.PING, Flag.ACK, held + 1))


class GoAwayTests(SynchronousTestCase):
    def test_every_violation_of_the_session_has_its_go_away(self) -> None:
        """What breaks the session's rules is answered with go-away 1, what breaks a stream's with a reset (MUX-1)."""
        cases: list[tuple[bytes, type[errors.RemoteProtocolError]]] = [
            (b"\x01" + bytes(11), errors.BadVersion),
            (b"\x00\x04" + bytes(10), errors.BadFrameType),
            (b"\x00\x00\x00\x10" + bytes(8), errors.BadFrameType),
            (encode(FrameType.WINDOW_UPDATE, Flag.SYN, 2, 0), errors.BadStreamId),
            (encode(FrameType.WINDOW_UPDATE, Flag.SYN, 0, 0), errors.BadStreamId),
            (encode(FrameType.DATA, Flag.NONE, 99, 0), errors.BadStreamId),
            (encode(FrameType.GO_AWAY, Flag.NONE, 7, 0), errors.BadStreamId),
            (encode(FrameType.DATA, Flag.NONE, 1, 16 * MiB + 1), errors.FrameTooLong),
            (encode(FrameType.WINDOW_UPDATE, Flag.NONE, 1, MAX_LENGTH), errors.WindowOverflow),
        ]
        for data, error in cases:
            server = Session(client=False)
            server.receive(encode(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 0), 0.0)
            (failed,) = server.receive(data, 0.0)
            assert isinstance(failed, events.SessionFailed)
            self.assertIs(type(failed.error), error)
            self.assertIs(failed.code, GoAway.PROTOCOL_ERROR)
            self.assertTrue(str(failed.error))
            self.assertEqual(server.receive(encode(FrameType.PING, Flag.SYN, 0, 1), 0.0), [])
