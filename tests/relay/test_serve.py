"""The owner's side of a relayed stream."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone

from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import SessionDead, StreamReset
from localai_dist.net.handshake import read_frame, write_frame
from localai_dist.net.stream import MuxStream
from localai_dist.testing.memory import Recorder, SessionPair
from localai_dist.wire import preamble
from localai_dist.wire.preamble import RelayCode, RelayErr, RelayOk, RelayReply
from tests.relay.mesh import MeshCase


class ServeTests(MeshCase):
    """A peer's streams, served from the tunnels held there."""

    def setUp(self) -> None:
        super().setUp()
        self.link: SessionPair = self.pair()
        self.link.server.on_stream = self.relay.serve

    def ask(self, payload: bytes) -> tuple[MuxStream, Deferred[bytes]]:
        """Open a stream on the link and ask; the reply frame to come."""
        opening = self.link.client.open()
        self.settle()
        stream = self.successResultOf(opening)
        write_frame(stream, payload)
        return stream, self.begin(read_frame(stream, clock=self.clock, timeout=60))

    def reply(self, payload: bytes) -> RelayReply:
        """The reply that comes at once."""
        return preamble.parse_relay_reply(self.successResultOf(self.ask(payload)[1]))

    def refused(self, payload: bytes, code: RelayCode) -> str:
        """The refusal's text; after it the stream ends, promptly."""
        stream, replying = self.ask(payload)
        reply = preamble.parse_relay_reply(self.successResultOf(replying))
        assert isinstance(reply, RelayErr), reply
        self.assertEqual(reply.code, code)
        recorder = Recorder()
        stream.start(recorder)
        self.settle()
        assert recorder.lost is not None
        recorder.lost.trap(ConnectionDone)
        self.assertEqual(self.link.server.stream_count, 0)
        return reply.text

    def test_joined(self) -> None:
        """A stream for a node whose tunnel ends here is joined to it; what follows is the worker's."""
        self.tunnel(self.there)
        stream, replying = self.ask(b"n-1 5000 i")
        self.assertEqual(preamble.parse_relay_reply(self.successResultOf(replying)), RelayOk())
        write_frame(stream, b"grpc 127.0.0.1:1")
        self.settle()
        self.assertEqual(self.worker.requests, [b"grpc 127.0.0.1:1"])

    def test_bytes_after_the_request_belong_to_the_worker(self) -> None:
        """Only its own frame is consumed: a tunnel request sent together with it arrives whole."""
        self.tunnel(self.there)
        opening = self.link.client.open()
        self.settle()
        stream = self.successResultOf(opening)
        stream.write(preamble.encode_frame(b"n-1") + preamble.encode_frame(b"http b"))
        self.settle()
        self.assertEqual(self.worker.requests, [b"http b"])

    def test_one_hop_only(self) -> None:
        """A node whose tunnel does not end here is refused at once; nobody else is asked (CLUS-9)."""
        self.assertIn("does not end here", self.refused(b"n-1 - i", RelayCode.NOT_OWNER))
        self.assertEqual((self.registry.asked, self.dials), (0, []))

    def test_bad_requests(self) -> None:
        """A request that is none is refused as ours to fix, not as a missing tunnel."""
        self.tunnel(self.there)
        for payload in (b"", b"n-1 0", b"n-1 soon", b"\xff\xff"):
            self.refused(payload, RelayCode.BAD_REQUEST)

    def test_a_late_request(self) -> None:
        """A stream that says nothing for 15 s is ended."""
        opening = self.link.client.open()
        self.settle()
        recorder = Recorder()
        self.successResultOf(opening).start(recorder)
        self.pass_time(14)
        self.assertIsNone(recorder.lost)
        self.pass_time(2)
        self.assertIsNotNone(recorder.lost)

    def test_a_tunnel_that_opens_no_stream(self) -> None:
        """A tunnel on its way out is "unavailable", which is not "not the owner"."""
        tunnel = self.tunnel(self.there)
        tunnel.client.go_away()
        self.settle()
        self.refused(b"n-1 - i", RelayCode.UNAVAILABLE)

    def test_the_callers_budget_bounds_the_wait(self) -> None:
        """While the worker accepts no stream the caller's remaining time counts, not the 15 s."""
        tunnel = self.tunnel(self.there)
        tunnel.client.on_stream = lambda stream: None  # never accepted: the backlog fills
        for _ in range(256):
            tunnel.server.open()
        self.settle()
        _, replying = self.ask(b"n-1 2000 i")
        self.pass_time(1)
        self.assertNoResult(replying)
        self.pass_time(1)
        reply = preamble.parse_relay_reply(self.successResultOf(replying))
        assert isinstance(reply, RelayErr)
        self.assertIs(reply.code, RelayCode.UNAVAILABLE)

    def test_the_class_is_taken_over(self) -> None:
        """Both legs get the class the frame names, and inference if it names none (MUX-15)."""
        tunnel = self.tunnel(self.there)
        for payload, traffic in [
            (b"n-1 - b", TrafficClass.BULK),
            (b"n-1 - c", TrafficClass.CONTROL),
            (b"n-1", TrafficClass.INFERENCE),
        ]:
            stream, replying = self.ask(payload)
            self.successResultOf(replying)
            legs = [*tunnel.server._streams.values(), *self.link.server._streams.values()]
            self.assertEqual([leg.traffic for leg in legs], [traffic, traffic])
            stream.abortConnection()
            self.settle()

    def test_a_peer_that_goes_frees_the_tunnels_stream(self) -> None:
        """When the link dies the worker's end is cut, not finished cleanly."""
        tunnel = self.tunnel(self.there)
        _, replying = self.ask(b"n-1 - i")
        self.successResultOf(replying)
        stream = self.worker.streams[-1]
        self.link.client.abort(SessionDead("pulled"))
        self.settle()
        self.assertEqual(tunnel.server.stream_count, 0)
        self.assertFalse(stream.is_live)

    def test_a_defect_costs_one_stream(self) -> None:
        """An unforeseen error is logged, and ends that stream alone."""
        self.there.get = None  # type: ignore[method-assign, assignment]
        _, replying = self.ask(b"n-1 - i")
        self.failureResultOf(replying, StreamReset)
        self.assertEqual(len(self.flushLoggedErrors(TypeError)), 1)
        self.assertTrue(self.link.server.is_open)

    def test_a_peer_that_goes_before_asking(self) -> None:
        """A link that dies while its stream has asked nothing leaves nothing behind and logs no error."""
        self.link.client.open()
        self.settle()
        self.link.client.abort(SessionDead("pulled"))
        self.settle()
        self.assertEqual(self.link.server.stream_count, 0)
