"""Windows as the peer sees them: what it was told, a thousand unread streams, plain and large ones mixed."""

from __future__ import annotations

import random
from typing import Final

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux import errors, events
from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.frame import Flag, FrameType, encode
from localai_dist.mux.limits import Limits
from localai_dist.mux.session import Session
from localai_dist.mux.stream import Stream
from localai_dist.mux.window import SPEC_WINDOW
from localai_dist.units import KiB, MiB
from tests.mux.wires import frames_of, wire_of


class Bookkeeper:
    """The peer's view of one of our sessions: what we allowed it, by our frames alone."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.credit: dict[int, int] = {}

    def open(self, number: int) -> Stream:
        """Open a stream of the peer's."""
        (event,) = self.session.receive(encode(FrameType.WINDOW_UPDATE, Flag.SYN, number, 0), 0.0)
        assert isinstance(event, events.StreamOpened)
        self.credit[number] = SPEC_WINDOW
        return event.stream

    def listen(self) -> None:
        """Read what our session says."""
        for header in frames_of(wire_of(self.session)):
            if header.type == FrameType.WINDOW_UPDATE and not header.flags & Flag.RST:
                self.credit[header.stream_id] += header.length

    def fill(self, number: int, now: float = 0.0) -> int:
        """Send all that is allowed on a stream; how much that was."""
        sent = 0
        while self.credit[number]:
            size = min(self.credit[number], 64 * KiB)
            self.credit[number] -= size
            self.session.receive(encode(FrameType.DATA, Flag.NONE, number, size) + bytes(size), now)
            sent += size
        return sent


class WindowTests(SynchronousTestCase):
    """Windows as the peer sees them (MUX-7)."""

    def test_a_thousand_unread_streams(self) -> None:
        """1000 bulk streams nobody reads hold at most 256 KiB each and 64 MiB together (MUX-7)."""
        server = Session(client=False)
        peer = Bookkeeper(server)
        for number in range(1, 2001, 2):
            stream = peer.open(number)
            server.accept(stream)
            server.set_traffic(stream, TrafficClass.BULK)
        peer.listen()
        unread = sum(peer.fill(number) for number in peer.credit)
        self.assertEqual(unread, sum(stream.receive_window.unread for stream in server.streams.values()))
        self.assertEqual(unread, 1000 * 256 * KiB + 64 * MiB)
        peer.listen()
        self.assertEqual(sum(peer.credit.values()), 0)
        # One byte more on any of them costs that stream alone.
        (cut,) = server.receive(encode(FrameType.DATA, Flag.NONE, 999, 1) + b"x", 0.0)
        self.assertIsInstance(cut, events.StreamCut)
        self.assertEqual((len(server.streams), server.failed), (1000, False))
        server.check()

    def test_grows_with_need_and_tells_first(self) -> None:
        """A window its reader keeps up with doubles to 16 MiB; each step is told before it may be used (MUX-7)."""
        server = Session(client=False)
        peer = Bookkeeper(server)
        stream = peer.open(1)
        server.accept(stream)
        server.ping(0.0)
        peer.listen()
        server.receive(encode(FrameType.PING, Flag.ACK, 0, 1), 0.1)
        now, sizes = 0.1, []
        for _ in range(40):
            sizes.append(peer.fill(1, now))
            now += 0.01
            server.consumed(stream, stream.receive_window.unread, now)
            self.assertEqual(peer.credit[1], 0)
            self.assertFalse(stream.over)
            peer.listen()
        self.assertEqual((sizes[0], max(sizes)), (SPEC_WINDOW, 16 * MiB))
        self.assertEqual(sizes, sorted(sizes))

    def test_withheld_credit_is_told_when_it_is_released(self) -> None:
        """Credit below a fast stream's grain is withheld, and told in full once it is released."""
        server = Session(client=False)
        peer = Bookkeeper(server)
        stream = peer.open(1)
        server.accept(stream)
        peer.listen()
        stream.receive_window.grain = 200 * KiB
        left = peer.credit[1] - peer.fill(1)
        server.consumed(stream, 100 * KiB, 0.0)
        peer.listen()
        self.assertTrue(server.credit_withheld)
        self.assertEqual(peer.credit[1], left)
        server.release_credit()
        peer.listen()
        self.assertFalse(server.credit_withheld)
        self.assertEqual(peer.credit[1], left + 100 * KiB)

    def test_an_idle_stream_does_not_grow(self) -> None:
        """A stream that is used now and then keeps its 256 KiB (MUX-7, BR-037)."""
        server = Session(client=False)
        peer = Bookkeeper(server)
        stream = peer.open(1)
        server.accept(stream)
        server.ping(0.0)
        peer.listen()
        server.receive(encode(FrameType.PING, Flag.ACK, 0, 1), 0.1)
        server.consumed(stream, 0, 0.0)
        for turn in range(1, 20):
            peer.fill(1)
            server.consumed(stream, stream.receive_window.unread, 10.0 * turn)
            peer.listen()
        self.assertEqual(stream.receive_window.size, SPEC_WINDOW)
        self.assertEqual(server.pool.free, 64 * MiB)

    def test_using_growth_before_it_was_told(self) -> None:
        """Credit that was decided and not yet sent is none: whoever uses it loses the stream (MUX-7, BR-046)."""
        server = Session(client=False)
        peer = Bookkeeper(server)
        stream = peer.open(1)
        server.accept(stream)
        peer.listen()
        server.set_traffic(stream, TrafficClass.BULK)
        peer.fill(1)
        (cut,) = server.receive(encode(FrameType.DATA, Flag.NONE, 1, 1) + b"x", 0.0)
        assert isinstance(cut, events.StreamCut)
        self.assertIsInstance(cut.violation, errors.StreamViolation)
        self.assertFalse(server.failed)


class MixedWindowsTests(SynchronousTestCase):
    """A peer with plain 256 KiB windows, one with larger ones (MUX-7, BR-046)."""

    PLAIN: Final = Limits(initial_window=SPEC_WINDOW, max_window=SPEC_WINDOW, pool=0)
    LARGE: Final = Limits(initial_window=4 * MiB)
    TOTAL: Final = 16 * MiB

    def test_every_pairing(self) -> None:
        """Random traffic between plain and large windows, the first update early or late, never locks (MUX-7)."""
        for seed, (near, far) in enumerate(
            ((self.PLAIN, self.PLAIN), (self.PLAIN, self.LARGE), (self.LARGE, self.PLAIN), (self.LARGE, self.LARGE))
        ):
            for accept_late in (False, True):
                self.transfer(near, far, random.Random(seed), accept_late=accept_late)

    def transfer(self, near: Limits, far: Limits, chance: random.Random, *, accept_late: bool) -> None:
        """``TOTAL`` bytes each way on one stream, delivered in random pieces, read at random times."""
        ends = [Session(client=True, limits=near), Session(client=False, limits=far)]
        streams = [ends[0].open(TrafficClass.BULK)]
        wires, left, got = [b"", b""], [self.TOTAL] * 2, [0, 0]
        block, now, quiet = b"r" * 64 * KiB, 0.0, 0
        while sum(got) < 2 * self.TOTAL:
            now += 0.001
            moved = False
            for side, end in enumerate(ends):
                if side < len(streams) and left[side] and streams[side].queued < 256 * KiB:
                    end.write(streams[side], block, now)
                    left[side] -= len(block)
                end.ping(now)
                wires[side] += b"".join(end.next_batch(now, 0).parts)
                size = chance.choice((3, 500, 70_000, 1_000_000))
                for event in ends[1 - side].receive(wires[side][:size], now):
                    assert not isinstance(event, events.SessionFailed | events.StreamCut), event
                    if isinstance(event, events.StreamOpened):
                        streams.append(event.stream)
                        if not accept_late:
                            end_of = ends[1 - side]
                            end_of.accept(event.stream)
                    moved = moved or isinstance(event, events.DataReceived)
                wires[side] = wires[side][size:]
            for side, stream in enumerate(streams):
                if chance.random() < 0.5:
                    unread = stream.receive_window.unread
                    got[side] += unread
                    ends[side].consumed(stream, unread, now)
                    moved = moved or bool(unread)
            if accept_late and len(streams) == 2 and now > 0.5:
                ends[1].accept(streams[1])
            quiet = 0 if moved else quiet + 1
            self.assertLess(quiet, 5000, f"locked after {got} bytes")
        for end in ends:
            end.check()
