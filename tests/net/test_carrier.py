"""A session on a WebSocket whose peer speaks oddly, too much, or not at all; in memory, in the test's own time."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

from autobahn.twisted.websocket import WebSocketServerFactory
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import SessionDead
from localai_dist.mux.frame import Flag, FrameType, encode
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.stream import MuxStream
from localai_dist.net.websocket_carrier import CLOSE_WAIT, WEBSOCKET_OPTIONS, ServerWire, WebSocketCarrier
from localai_dist.net.websocket_frames import MESSAGE_MAX
from localai_dist.units import KiB, MiB
from tests.net.frames import frame

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
BINARY, TEXT, CONTINUED, CLOSE = 0x82, 0x81, 0x80, 0x88
FIRST_FRAGMENT, NEXT_FRAGMENT = 0x02, 0x00


class Transport(StringTransport):
    """What autobahn asks of a TCP transport besides bytes."""

    aborted = False

    def __init__(self) -> None:
        super().__init__()
        self.kernel = b""
        self.room = 1 * MiB
        self.failure: Exception | None = None

    def writeSomeData(self, data: bytes) -> int | Exception:
        """The kernel takes what it has room for."""
        if self.failure is not None:
            return self.failure
        taken = data[: self.room]
        self.kernel += taken
        self.room -= len(taken)
        return len(taken)

    def setTcpNoDelay(self, enabled: bool) -> None:
        """Nothing to do."""

    def unregisterProducer(self) -> None:
        """Twisted's own does not mind either when there is none."""
        self.producer = None

    def abortConnection(self) -> None:
        """Note it."""
        self.aborted = True


class Collector(Protocol):
    """Keeps what arrives."""

    def __init__(self) -> None:
        self.data = bytearray()

    def dataReceived(self, data: bytes) -> None:
        self.data += data


class CarrierCase(SynchronousTestCase):
    """An accepting end after the upgrade, with a session on it."""

    def setUp(self) -> None:
        self.clock = Clock()
        factory = WebSocketServerFactory(reactor=self.clock)
        factory.protocol = ServerWire
        factory.setProtocolOptions(**WEBSOCKET_OPTIONS)
        self.wire: Any = factory.buildProtocol(None)
        self.wire.carrier = WebSocketCarrier(self.wire, self.clock)
        self.transport = Transport()
        self.wire.makeConnection(self.transport)
        self.wire.dataReceived(UPGRADE)
        self.transport.clear()
        self.session = MuxSession(self.wire.carrier, client=False, config=SessionConfig(), clock=self.clock)
        self.collectors: list[Collector] = []
        self.session.on_stream = self.arrived
        self.session.begin()
        self.ended = self.session.when_closed()

    def arrived(self, stream: MuxStream) -> None:
        self.collectors.append(Collector())
        stream.start(self.collectors[-1])

    def receive(self, data: bytes) -> None:
        """Bytes from the peer; then a reactor turn."""
        self.wire.dataReceived(data)
        self.clock.advance(0)

    def lose(self, error: Exception) -> None:
        """The connection is gone."""
        self.wire.connectionLost(Failure(error))
        self.clock.advance(0)

    def assert_ended(self, *words: str) -> None:
        """The session is dead, and its reason says ``words``."""
        end = self.successResultOf(self.ended)
        self.assertTrue(end.check(SessionDead))
        self.assertIsNone(end.check(ConnectionDone))
        for word in words:
            self.assertIn(word, end.getErrorMessage())

    def assert_closed_with(self, code: int) -> None:
        """A close frame with ``code`` was sent."""
        sent = self.transport.value()
        self.assertIn(bytes([CLOSE]), sent)
        at = sent.rindex(bytes([CLOSE]))
        self.assertEqual(int.from_bytes(sent[at + 2 : at + 4], "big"), code)

    def assert_lets_go(self) -> None:
        """The peer never answers: the connection is dropped after the wait, and no timer is left."""
        self.assertFalse(self.transport.aborted)
        self.clock.advance(CLOSE_WAIT)
        self.assertTrue(self.transport.aborted)
        self.lose(ConnectionLost())
        self.assertEqual(self.clock.getDelayedCalls(), [])


class AtOnceTests(CarrierCase):
    """What goes to the kernel without waiting for the reactor, and what may not (MUX-20)."""

    def opened(self) -> bytes:
        """Open a stream; the frame that says so."""
        stream = self.successResultOf(self.session.open())
        self.clock.advance(0)
        return b"\x82\x0c" + encode(FrameType.WINDOW_UPDATE, Flag.SYN, stream.id, 0)

    def drain(self) -> None:
        """The transport's queue is empty."""
        self.transport.clear()
        self.wire.carrier.resumeProducing()

    def setUp(self) -> None:
        super().setUp()
        self.clock.advance(1)  # the first pings
        self.transport.clear()

    def test_short_frames_leave_at_once(self) -> None:
        """With nothing before it a short frame is the kernel's in the turn it is made, and so is the next one."""
        self.drain()
        frames = self.opened() + self.opened()
        self.assertEqual((self.transport.kernel, self.transport.value()), (frames, b""))

    def test_nothing_is_overtaken(self) -> None:
        """While anything waits in the transport's queue, be it the answer to a WebSocket ping, ours waits behind it."""
        first = self.opened()
        self.assertEqual((self.transport.kernel, self.transport.value()), (b"", first))
        self.drain()
        self.receive(frame(0x89, b"ping"))
        pong = self.transport.value()
        self.assertEqual(pong[:1], b"\x8a")
        second = self.opened()
        self.assertEqual((self.transport.kernel, self.transport.value()), (b"", pong + second))
        self.drain()
        third = self.opened()
        self.assertEqual((self.transport.kernel, self.transport.value()), (third, b""))

    def test_a_full_kernel(self) -> None:
        """What the kernel does not take follows through the queue, in order and once."""
        self.drain()
        self.transport.room = 5
        frames = self.opened() + self.opened()
        self.assertEqual(self.transport.kernel + self.transport.value(), frames)
        self.assertEqual(len(self.transport.kernel), 5)

    def test_a_failed_write(self) -> None:
        """A write that fails loses nothing and ends nothing here: the reactor meets the failure again."""
        self.drain()
        self.transport.failure = ConnectionLost()
        frame_ = self.opened()
        self.assertEqual(self.transport.value(), frame_)
        self.assertTrue(self.session.is_open)

    def test_a_transfer_takes_turns(self) -> None:
        """More than a little goes through the queue, so that one transfer can't hold the reactor."""
        stream = self.successResultOf(self.session.open(TrafficClass.BULK))
        self.receive(frame(BINARY, encode(FrameType.WINDOW_UPDATE, Flag.ACK, stream.id, 0)))
        self.drain()
        stream.write(bytes(32 * KiB))
        self.clock.advance(0)
        self.assertEqual(self.transport.kernel, b"")
        self.assertGreater(len(self.transport.value()), 32 * KiB)

    def test_what_waits_after_it(self) -> None:
        """Nothing is left behind what left at once: where the limit held something back, all went through the queue."""
        self.session.core.sender.limit.arriving(1.0)  # as little as it may be
        stream = self.successResultOf(self.session.open(TrafficClass.BULK))
        self.receive(frame(BINARY, encode(FrameType.WINDOW_UPDATE, Flag.ACK, stream.id, 0)))
        self.drain()
        stream.write(bytes(40 * KiB))
        for _ in range(10):
            self.clock.advance(0)
            self.assertLess(len(self.transport.value()), 20 * KiB)
            if self.transport.value():
                self.drain()
        self.assertEqual(stream.queued, 0)


class MessagesTests(CarrierCase):
    """Message boundaries mean nothing (MUX-12)."""

    def conversation(self) -> bytes:
        """Nine streams with 256 KiB each."""
        wire = b""
        for number in range(1, 19, 2):
            wire += encode(FrameType.WINDOW_UPDATE, Flag.SYN, number, 0)
            for part in range(4):
                wire += encode(FrameType.DATA, Flag.NONE, number, 64 * KiB) + bytes([number + part]) * 64 * KiB
        return wire

    def cut(self, wire: bytes, sizes: Iterator[int]) -> Iterator[bytes]:
        at = 0
        while at < len(wire):
            size = next(sizes)
            yield wire[at : at + size]
            at += size

    def assert_whole(self) -> None:
        self.assertEqual(len(self.collectors), 9)
        for number, collector in zip(range(1, 19, 2), self.collectors, strict=True):
            self.assertEqual(bytes(collector.data), b"".join(bytes([number + p]) * 64 * KiB for p in range(4)))
        self.assertTrue(self.session.is_open)

    def test_every_size(self) -> None:
        """Messages of 0 bytes up to the limit, headers split over them, give the same streams (MUX-12)."""
        sizes = [0, 1, 11, 12, 13, 125, 126, 127, 65_535, 65_536, 65_537, MiB, MESSAGE_MAX, 5, 0, 7, MiB]
        for message in self.cut(self.conversation(), iter(sizes)):
            self.receive(frame(BINARY, message))
        self.assert_whole()

    def test_a_byte_at_a_time(self) -> None:
        """TCP segments of one byte, within headers and messages, change nothing (MUX-12, BR-075)."""
        data = encode(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 0)
        data += encode(FrameType.DATA, Flag.NONE, 1, 20_000) + bytes(range(250)) * 80
        for byte in b"".join(frame(BINARY, data[at : at + 700]) for at in range(0, len(data), 700)):
            self.wire.dataReceived(bytes([byte]))
        self.assertEqual(bytes(self.collectors[0].data), bytes(range(250)) * 80)

    def test_fragments(self) -> None:
        """A message in fragments, pings between them, is the same as one in one frame (MUX-12, BR-075)."""
        parts = list(self.cut(self.conversation()[:MiB], iter([100, 3, 50_000, 0, 200_000, 700_000, 300_000])))
        for number, part in enumerate(parts):
            first = FIRST_FRAGMENT if number == 0 else CONTINUED if number == len(parts) - 1 else NEXT_FRAGMENT
            self.receive(frame(first, part) + frame(0x89, b"hi"))
        self.receive(frame(BINARY, self.conversation()[MiB : 2 * MiB]))
        self.receive(frame(BINARY, self.conversation()[2 * MiB :]))
        self.assert_whole()
        self.assertEqual(self.transport.value().count(b"\x8a\x02hi"), len(parts))


class RefusedTests(CarrierCase):
    """What ends a connection, with which code, and for how little memory (MUX-12, BR-075)."""

    BOUND = 2 * MiB  # Source: BR-075

    def measured(self, pieces: Iterator[bytes]) -> None:
        """Receive until the session has ended; at most ``BOUND`` was held meanwhile."""
        gc.collect()
        tracemalloc.start(1)
        try:
            for piece in pieces:
                self.receive(piece)
            self.assertLess(tracemalloc.get_traced_memory()[1], self.BOUND)
        finally:
            tracemalloc.stop()

    def refused(self, code: int, *pieces: bytes) -> None:
        """``pieces`` end the connection with ``code`` though the peer never answers it."""
        self.measured(iter(pieces))
        self.assert_closed_with(code)
        self.assert_lets_go()
        self.assert_ended()

    def test_too_long(self) -> None:
        """One byte above 1 MiB + 4 KiB, and a frame that announces 4 GiB, are 1009 by their header."""
        self.refused(1009, frame(BINARY, b"", announce=MESSAGE_MAX + 1))
        self.setUp()
        self.refused(1009, frame(BINARY, b"", announce=4 * 1024 * MiB), *[bytes(64 * KiB)] * 64)

    def test_text(self) -> None:
        """A text message is 1003, and the error names "binary"."""
        self.receive(frame(TEXT, b"hello"))
        self.assert_ended("binary")
        self.assert_closed_with(1003)
        self.assert_lets_go()

    def test_unmasked(self) -> None:
        """A client's frame without a mask is 1002."""
        self.refused(1002, frame(BINARY, b"hello", None))

    def test_compressed(self) -> None:
        """A compressed frame, which nobody agreed on, is 1002."""
        self.refused(1002, frame(BINARY | 0x40, bytes(1000)))

    def test_fragments_without_end(self) -> None:
        """Fragments that add up to more than a message may be are 1009; they are not kept meanwhile."""
        ping = encode(FrameType.PING, Flag.NONE, 0, 1) * 5
        self.receive(frame(FIRST_FRAGMENT, ping))
        count = 0

        def pieces() -> Iterator[bytes]:
            nonlocal count
            while (1009).to_bytes(2, "big") not in self.transport.value() and count < 100_000:
                count += 100
                yield frame(NEXT_FRAGMENT, ping) * 100

        self.measured(pieces())
        self.assertLessEqual(count, MESSAGE_MAX // 60 + 100)
        self.assert_closed_with(1009)

    def test_empty_fragments(self) -> None:
        """Fragments of nothing, 20 000 of them, hold nothing."""
        self.receive(frame(FIRST_FRAGMENT, b""))
        self.measured(frame(NEXT_FRAGMENT, b"") * 1000 for _ in range(20))
        self.assertEqual(self.wire.message_data, [])
        self.assertTrue(self.session.is_open)


class EndingsTests(CarrierCase):
    """How a connection can end, and what the session says of it (MUX-12)."""

    def test_close_codes_are_kept(self) -> None:
        """The peer's close code and reason are in the session's end, and are answered in kind (MUX-12)."""
        for code, reason in ((1000, b""), (1001, b"going away"), (4001, b"redeployed")):
            self.setUp()
            self.receive(frame(CLOSE, code.to_bytes(2, "big") + reason))
            self.assert_closed_with(code)
            self.lose(ConnectionDone())
            self.assert_ended(str(code), reason.decode())
            self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_vanished(self) -> None:
        """A connection that ends without a close frame, cleanly or not, is session death (MUX-12)."""
        for error in (ConnectionDone(), ConnectionLost()):
            self.setUp()
            self.receive(frame(BINARY, encode(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 0)))
            self.lose(error)
            self.assert_ended()
            self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_our_codes(self) -> None:
        """Our close is 1000 behind a go-away; a broken protocol is 1002 (MUX-12)."""
        self.session.close()
        self.assertIn(encode(FrameType.GO_AWAY, Flag.NONE, 0, 0), self.transport.value())
        self.assert_closed_with(1000)
        self.setUp()
        self.receive(frame(BINARY, b"\x09" + bytes(11)))
        self.assertIn(encode(FrameType.GO_AWAY, Flag.NONE, 0, 1), self.transport.value())
        self.assert_closed_with(1002)

    def test_close_beside_a_peer_that_does_not_read(self) -> None:
        """With buffers full and a peer that stands still, a close ends within its 5 s, nothing left (BR-101)."""
        self.receive(frame(BINARY, encode(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 16 * MiB)))
        (stream,) = self.session._streams.values()
        stream.write(b"x" * 8 * MiB)
        self.clock.advance(0)
        held = len(self.transport.value())
        self.session.close()
        self.assertFalse(self.session.is_open)
        self.assertLess(len(self.transport.value()) - held, 256 * KiB)
        self.assert_lets_go()
