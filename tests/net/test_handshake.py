"""Opening frames over a stream."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectError
from twisted.internet.protocol import Factory
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux.errors import SessionDead, StreamReset
from localai_dist.net.endpoints import StreamEndpoint
from localai_dist.net.errors import HandshakeLate, StreamEnded
from localai_dist.net.handshake import read_frame, send_frame_and_read_reply, write_frame
from localai_dist.net.stream import MuxStream
from localai_dist.testing.memory import Recorder, SessionPair
from localai_dist.wire.preamble import MalformedPreamble


def run(coroutine: Coroutine[Any, Any, bytes]) -> Deferred[bytes]:
    return Deferred.fromCoroutine(coroutine)


class HandshakeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pair = SessionPair()
        self.near, self.far = self.pair.open()

    def test_exchange_leaves_the_next_byte(self) -> None:
        """Request and reply are exchanged and the byte after each belongs to what follows."""
        asking = run(send_frame_and_read_reply(self.near, b"grpc x:1", clock=self.pair.clock, timeout=15))
        hearing = run(read_frame(self.far, clock=self.pair.clock, timeout=15))
        self.near.write(b"PRI * HTTP/2.0")
        self.pair.settle()
        self.assertEqual(self.successResultOf(hearing), b"grpc x:1")
        write_frame(self.far, b"ok")
        self.far.write(b"server speaks")
        self.pair.settle()
        self.assertEqual(self.successResultOf(asking), b"ok")
        a, b = Recorder(), Recorder()
        self.near.start(a)
        self.far.start(b)
        self.assertEqual((bytes(a.data), bytes(b.data)), (b"server speaks", b"PRI * HTTP/2.0"))

    def test_empty_and_largest_payload(self) -> None:
        """0 and 1024 bytes are frames, 1025 are a mistake of ours, or of the peer's."""
        for payload in (b"", b"x" * 1024):
            write_frame(self.near, payload)
            hearing = run(read_frame(self.far, clock=self.pair.clock, timeout=15))
            self.pair.settle()
            self.assertEqual(self.successResultOf(hearing), payload)
        self.assertRaises(MalformedPreamble, write_frame, self.near, b"x" * 1025)
        self.near.write(b"\x04\x01" + b"x" * 1025)
        hearing = run(read_frame(self.far, clock=self.pair.clock, timeout=15))
        self.pair.settle()
        self.assertIn("1025 bytes", str(self.failureResultOf(hearing, StreamEnded).value))
        self.assertEqual(self.pair.server.stream_count, 0)

    def test_late(self) -> None:
        """A frame that is not whole in time aborts the stream."""
        hearing = run(read_frame(self.far, clock=self.pair.clock, timeout=15))
        self.near.write(b"\x00\x05ab")
        self.pair.pass_time(14.9)
        self.assertNoResult(hearing)
        self.pair.pass_time(0.2)
        self.failureResultOf(hearing, HandshakeLate)
        recorder = Recorder()
        self.near.start(recorder)
        self.assertTrue(recorder.lost.check(StreamReset))

    def test_cancel(self) -> None:
        """Cancelling aborts the stream and leaves no timer."""
        hearing = run(read_frame(self.far, clock=self.pair.clock, timeout=15))
        hearing.cancel()
        self.failureResultOf(hearing, CancelledError)
        self.pair.settle()
        self.assertEqual(self.pair.server.stream_count, 0)

    def test_ends(self) -> None:
        """A clean end before the frame, a reset and session death are three different answers."""
        hearing = run(read_frame(self.far, clock=self.pair.clock, timeout=15))
        self.near.loseConnection()
        self.pair.settle()
        self.failureResultOf(hearing, StreamEnded)
        near, far = self.pair.open()
        hearing = run(read_frame(far, clock=self.pair.clock, timeout=15))
        near.abortConnection()
        self.pair.settle()
        self.failureResultOf(hearing, StreamReset)
        near, far = self.pair.open()
        hearing = run(read_frame(far, clock=self.pair.clock, timeout=15))
        self.pair.server.abort(ValueError("gone"))
        self.failureResultOf(hearing, SessionDead)


class EndpointTests(SynchronousTestCase):
    def test_connect(self) -> None:
        """An endpoint's protocol talks over a stream; what the opener raises comes unchanged."""
        pair = SessionPair()

        async def opener() -> MuxStream:
            return await pair.client.open()

        protocol: Any = self.successResultOf(StreamEndpoint(opener).connect(Factory.forProtocol(Recorder)))
        pair.settle()
        (far,) = pair.arrived[pair.server]
        far.write(b"hi")
        pair.settle()
        self.assertEqual(bytes(protocol.data), b"hi")

        async def refusing() -> MuxStream:
            raise StreamEnded("no")

        self.failureResultOf(StreamEndpoint(refusing).connect(Factory.forProtocol(Recorder)), StreamEnded)

    def test_factory_that_builds_nothing(self) -> None:
        """A factory that declines gives an error, and the stream is reset."""
        pair = SessionPair()

        async def opener() -> MuxStream:
            return await pair.client.open()

        class Declining(Factory):
            def buildProtocol(self, addr: object) -> None:
                return None

        self.failureResultOf(StreamEndpoint(opener).connect(Declining()), ConnectError)
        pair.settle()
        self.assertEqual(pair.client.stream_count, 0)
