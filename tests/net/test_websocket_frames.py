"""The WebSocket data path: whatever a peer sends and however it is cut, the same bytes come out."""

from __future__ import annotations

from typing import Any

from autobahn.twisted.websocket import WebSocketClientFactory, WebSocketServerFactory
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.net.websocket_carrier import WEBSOCKET_OPTIONS, ClientWire, ServerWire
from localai_dist.net.websocket_frames import MESSAGE_MAX
from localai_dist.net.websocket_mask import masked, unmasked
from localai_dist.units import KiB
from tests.net.frames import frame

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
PIECES = bytes(range(256)) * 300


class Transport(StringTransport):
    """What autobahn asks of a TCP transport besides bytes."""

    def setTcpNoDelay(self, enabled: bool) -> None:
        """Nothing to do."""

    def unregisterProducer(self) -> None:
        """Twisted's own does not mind either when there is none."""

    def setTcpKeepAlive(self, enabled: bool) -> None:
        """Nothing to do."""


class Taken:
    """A carrier that keeps what it is told."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.texts = 0

    def payload_received(self, payload: bytes | memoryview) -> None:
        self.pieces.append(bytes(payload))

    def text_received(self) -> None:
        self.texts += 1

    def read_began(self) -> None: ...
    def read_ended(self) -> None: ...
    def wire_opened(self) -> None: ...
    def wire_closing(self) -> None: ...
    def wire_closed(self, clean: bool, text: str) -> None: ...

    @property
    def payload(self) -> bytes:
        return b"".join(self.pieces)


def server() -> tuple[Any, Taken, Transport]:
    """An accepting end after the upgrade."""
    return connected(WebSocketServerFactory(reactor=Clock()), ServerWire)


def connected(factory: Any, protocol: Any) -> tuple[Any, Taken, Transport]:
    factory.protocol = protocol
    factory.setProtocolOptions(**WEBSOCKET_OPTIONS)
    wire, taken, transport = factory.buildProtocol(None), Taken(), Transport()
    wire.carrier = taken
    wire.makeConnection(transport)
    if protocol is ServerWire:
        wire.dataReceived(UPGRADE)
        transport.clear()
    return wire, taken, transport


sizes = st.sampled_from([0, 1, 2, 11, 125, 126, 127, 1000, 65535, 65536, 70000])
keys = st.sampled_from([bytes(4), b"\x01\x02\x03\x04", b"\xff\x00\xfe\x10"])
kinds = st.sampled_from(["whole", "whole", "whole", "ping", "pong", "fragments"])


class FramesTests(SynchronousTestCase):
    @settings(max_examples=60)
    @given(st.lists(st.tuples(kinds, sizes, keys), max_size=8), st.lists(st.integers(1, 90000), max_size=12), st.data())
    def test_cutting_is_invisible(self, sent: list[Any], cuts: list[int], data: Any) -> None:
        """Binary messages come out whole and in order, cut anywhere, with pings and fragments between (MUX-12)."""
        wire, taken, transport = server()
        wanted, raw, pings = b"", b"", 0
        for kind, size, key in sent:
            payload = PIECES[:size]
            if kind == "whole":
                raw += frame(0x82, payload, key)
            elif kind == "fragments":
                half = data.draw(st.integers(0, size))
                raw += frame(0x02, payload[:half], key) + frame(0x89, b"in between", key) + frame(0x80, payload[half:])
                pings += 1
            else:
                raw += frame(0x89 if kind == "ping" else 0x8A, payload[:100], key)
                pings += kind == "ping"
            wanted += payload if kind in ("whole", "fragments") else b""
        while raw:
            count = cuts.pop() if cuts else len(raw)
            wire.dataReceived(raw[:count])
            raw = raw[count:]
        self.assertTrue(taken.payload == wanted)
        self.assertEqual(transport.value().count(b"\x8a"), pings)  # no payload has this byte

    def test_a_frame_is_delivered_as_it_arrives(self) -> None:
        """The beginning of a long message is not held until its end is there."""
        wire, taken, _ = server()
        raw = frame(0x82, PIECES[: 50 * KiB], b"\x09\x08\x07\x06")
        wire.dataReceived(raw[:1008])
        self.assertEqual(taken.payload, PIECES[:1000])
        wire.dataReceived(raw[1008:])
        self.assertEqual(taken.payload, PIECES[: 50 * KiB])

    def test_what_autobahn_refuses(self) -> None:
        """Frames that break the rules, and those too long, end the connection with the code for it (MUX-12)."""
        for raw, code in (
            (frame(0x82, b"x" * 10, None), 1002),  # not masked
            (frame(0xC2, b"x"), 1002),  # a reserved bit
            (frame(0x83, b"x"), 1002),  # an unknown kind
            (frame(0x80, b"x"), 1002),  # continues nothing
            (b"\x82\xfe\x00\x05" + bytes(9), 1002),  # a length in too many bytes
            (b"\x82\xff" + (MESSAGE_MAX + 1).to_bytes(8, "big") + bytes(4), 1009),
        ):
            wire, taken, transport = server()
            wire.dataReceived(frame(0x82, b"before") + raw + frame(0x82, b"after"))
            self.assertEqual(taken.payload, b"before", raw[:8])
            self.assertEqual(transport.value()[:1], b"\x88")
            self.assertEqual(transport.value()[2:4], code.to_bytes(2, "big"))

    def test_text(self) -> None:
        """A text message is told as one."""
        wire, taken, _ = server()
        wire.dataReceived(frame(0x81, b"hello"))
        self.assertEqual((taken.texts, taken.payload), (1, b""))

    def test_close_between_messages(self) -> None:
        """A close after a message is answered with the same code; nothing after it is read."""
        wire, taken, transport = server()
        wire.dataReceived(frame(0x82, b"last") + frame(0x88, (1000).to_bytes(2, "big")) + frame(0x82, b"late"))
        self.assertEqual(taken.payload, b"last")
        self.assertEqual(transport.value(), b"\x88\x02\x03\xe8")

    def test_sent_frames(self) -> None:
        """What one end sends the other reads, masked with a fresh key on the dialling side only (MUX-12)."""
        there, taken, back = server()
        here, _, out = connected(WebSocketClientFactory("ws://x/", reactor=Clock()), ClientWire)
        heads = set()
        for size in (1, 125, 126, 65535, 65536, 70000):
            out.clear()
            back.clear()
            here.transport.write(here.binary_frame([PIECES[:1], memoryview(PIECES)[1:size]]))
            there.transport.write(there.binary_frame([PIECES[:size]]))
            there.dataReceived(out.value())
            self.assertTrue(taken.payload == PIECES[:size])
            self.assertTrue(back.value() == frame(0x82, PIECES[:size], None))
            heads.add(out.value()[-size - 4 : len(out.value()) - size])
            taken.pieces.clear()
        self.assertEqual(len(heads), 6)


class MaskTests(SynchronousTestCase):
    @given(st.binary(max_size=100), st.binary(min_size=4, max_size=4), st.integers(0, 7))
    def test_offset(self, payload: bytes, key: bytes, offset: int) -> None:
        """Unmasking a frame piece by piece is unmasking it at once."""
        wanted = bytes(byte ^ key[(offset + at) & 3] for at, byte in enumerate(payload))
        self.assertEqual(bytes(unmasked(key, offset, memoryview(payload))), wanted)

    def test_round_trip(self) -> None:
        """What was masked is unmasked; neither changes a string that somebody else has."""
        for size in (1, 2, 5, 300_000):
            payload = (PIECES * 4)[:size]
            kept = bytes(bytearray(payload))
            made = masked(b"head", [payload], size)
            key, hidden = made[4:8], made[8:]
            self.assertTrue(made[:4] == b"head" and payload == kept)
            copy = bytes(bytearray(hidden))
            self.assertTrue(unmasked(key, 0, memoryview(hidden)) == payload)
            self.assertTrue(hidden == copy)


class AutobahnTests(SynchronousTestCase):
    def test_private_names(self) -> None:
        """The names of autobahn the data path leans on are there, with the meaning it relies on."""
        wire, taken, _ = server()
        self.assertEqual(
            (wire.state, wire.data, wire.current_frame, wire.inside_message), (wire.STATE_OPEN, b"", None, False)
        )
        wire.dataReceived(frame(0x02, b"begun"))
        self.assertTrue(wire.inside_message)
        wire.dataReceived(frame(0x80, b"12345")[:-2])
        self.assertEqual(wire.current_frame.length - wire.current_frame_masker.pointer(), 2)
        wire.dataReceived(b"45" + frame(0x82, b".")[:1])
        self.assertEqual(
            (taken.payload, wire.data, wire.current_frame, wire.inside_message), (b"begun12345", b"\x82", None, False)
        )
