"""A stream of the tunnel, joined to a backend or to the worker's own server."""

from __future__ import annotations

from typing import Any

from twisted.internet.error import ConnectionRefusedError, TimeoutError
from twisted.internet.testing import MemoryReactorClock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux.classes import TrafficClass
from localai_dist.net.handshake import write_frame
from localai_dist.net.stream import MuxStream
from localai_dist.testing.memory import Recorder, SessionPair, SlowTransport
from localai_dist.wire.preamble import (
    HANDSHAKE_TIMEOUT,
    TunnelErr,
    TunnelOk,
    TunnelReply,
    TunnelRequest,
    encode_tunnel_request,
    parse_tunnel_reply,
)
from localai_dist.worker.router import StreamRouter

BACKEND = 20001


class RouterTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.reactor: Any = MemoryReactorClock()
        self.sessions = SessionPair(clock=self.reactor)
        self.addCleanup(self.close)
        self.served: list[Recorder] = []
        self.router = StreamRouter(
            reactor=self.reactor,
            is_backend=lambda port: port == BACKEND,
            in_range=lambda port: 20000 <= port <= 20099,
            http=self.server,
        )

    def server(self) -> Recorder:
        """The server's end of one more connection to the worker's own HTTP server."""
        self.served.append(Recorder())
        return self.served[-1]

    def close(self) -> None:
        self.sessions.close()
        self.assertEqual([call for call in self.reactor.getDelayedCalls() if call.active()], [])

    def serve(self) -> tuple[MuxStream, MuxStream, Recorder]:
        """A stream opened by the frontend, given to the router: both ends, and what the frontend hears."""
        near, far = self.sessions.open()
        heard = Recorder()
        near.start(heard)
        self.router.serve(far)
        self.sessions.settle()
        return near, far, heard

    def ask(self, tag: str, target: str = "") -> tuple[MuxStream, MuxStream, Recorder]:
        near, far, heard = self.serve()
        write_frame(near, encode_tunnel_request(TunnelRequest(tag, target)))
        self.sessions.settle()
        return near, far, heard

    def reply(self, heard: Recorder) -> TunnelReply:
        size = int.from_bytes(heard.data[:2], "big")
        return parse_tunnel_reply(bytes(heard.data[2 : 2 + size]))

    def dialled(self) -> tuple[str, int]:
        host, port, _factory, _timeout, _bind = self.reactor.tcpClients[-1]
        return host, port

    def accept(self) -> SlowTransport:
        """What was dialled on loopback accepts."""
        factory = self.reactor.tcpClients[-1][2]
        transport = SlowTransport(self.reactor)
        transport.connect(factory.buildProtocol(None))
        self.sessions.settle()
        return transport

    def refuse(self, error: Exception) -> None:
        _host, _port, factory, _timeout, _bind = self.reactor.tcpClients[-1]
        factory.clientConnectionFailed(self.reactor.connectors[-1], Failure(error))
        self.sessions.settle()

    def check_refused(self, heard: Recorder, code: str) -> str:
        """The refusal ``code`` was answered, and the stream was closed."""
        reply = self.reply(heard)
        assert isinstance(reply, TunnelErr), reply
        self.assertEqual(reply.code, code)
        self.assertIsNotNone(heard.lost)
        return reply.text

    def test_backend(self) -> None:
        """A gRPC stream is joined to the backend on loopback, whatever host the frontend named (WALK-8)."""
        near, _far, heard = self.ask("grpc", f"10.1.2.3:{BACKEND}")
        self.assertEqual(self.dialled(), ("127.0.0.1", BACKEND))
        self.assertEqual(heard.data, b"", "nothing is answered before the backend accepted")
        backend = self.accept()
        backend.deliver(b"SETTINGS")
        near.write(b"PRI")
        self.sessions.settle()
        self.assertIsInstance(self.reply(heard), TunnelOk)
        self.assertEqual(heard.data[4:], b"SETTINGS")
        self.assertEqual(backend.drain(), b"PRI")
        near.loseConnection()
        self.sessions.settle()
        backend.drain()
        self.sessions.settle()
        self.assertTrue(backend.disconnected)

    def test_own_server(self) -> None:
        """
        An HTTP stream is given to the worker's own server, without a connection in between; a traffic class is taken
        over.
        """
        near, far, heard = self.ask("http", "b")
        self.assertIs(far.traffic, TrafficClass.BULK)
        self.assertIsInstance(self.reply(heard), TunnelOk)
        near.write(b"GET /")
        far.write(b"HTTP/1.1 200")
        self.sessions.settle()
        self.assertEqual((bytes(self.served[0].data), bytes(heard.data[4:])), (b"GET /", b"HTTP/1.1 200"))
        _near, far, _heard = self.ask("http", "anything else")
        self.assertIsNot(far.traffic, TrafficClass.BULK)
        self.assertEqual((len(self.served), self.reactor.tcpClients), (2, []))

    def test_unknown_tag(self) -> None:
        """A tag of a newer frontend is refused as such, and the stream closed."""
        _near, _far, heard = self.ask("quic", "x")
        self.assertIn("quic", self.check_refused(heard, "unknown-tag"))

    def test_bad_requests(self) -> None:
        """A target outside the backends' range, or that is no port, is the frontend's mistake."""
        for target in ("127.0.0.1:22", "127.0.0.1:20100", "nonsense", "", "x:-1", "x:99999999999", "x:²"):
            _near, _far, heard = self.ask("grpc", target)
            self.check_refused(heard, "bad-request")
        near, _far, heard = self.serve()
        write_frame(near, b"\xff\xff")
        self.sessions.settle()
        self.check_refused(heard, "bad-request")
        self.assertEqual(self.reactor.tcpClients, [])

    def test_no_backend_there(self) -> None:
        """A port in range that no backend of ours has is never dialled: somebody else may listen there (WALK-11)."""
        _near, _far, heard = self.ask("grpc", "127.0.0.1:20002")
        self.check_refused(heard, "unavailable")
        self.assertEqual(self.reactor.tcpClients, [])

    def test_backend_refuses(self) -> None:
        """A backend that doesn't listen is unavailable: the frontend may act on that."""
        _near, _far, heard = self.ask("grpc", f"x:{BACKEND}")
        self.refuse(ConnectionRefusedError())
        self.check_refused(heard, "unavailable")

    def test_trouble_of_our_own(self) -> None:
        """A connect that times out is the worker's trouble, and no word about the backend."""
        _near, _far, heard = self.ask("grpc", f"x:{BACKEND}")
        self.refuse(TimeoutError())
        self.check_refused(heard, "not-served")

    def test_late_frame(self) -> None:
        """A stream whose opening frame never comes is ended after the handshake's time, and nothing is dialled."""
        _near, _far, heard = self.serve()
        self.sessions.pass_time(HANDSHAKE_TIMEOUT - 1, 1.0)
        self.assertIsNone(heard.lost)
        self.sessions.pass_time(2, 0.5)
        self.assertIsNotNone(heard.lost)
        self.assertEqual(self.reactor.tcpClients, [])

    def test_frontend_leaves_before_the_frame(self) -> None:
        """A stream that ends before its frame ends alone."""
        near, _far, _heard = self.serve()
        near.abortConnection()
        self.sessions.settle()
        self.test_own_server()

    def test_broken_stream_touches_no_other(self) -> None:
        """An unexpected error in one stream is logged and ends that stream, not the session."""
        self.patch(self.router, "_http", lambda: 1 // 0)
        _near, _far, heard = self.ask("http")
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertIsNotNone(heard.lost)
        self.assertTrue(self.sessions.server.is_open)
