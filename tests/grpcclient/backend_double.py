"""A backend's end of HTTP/2, in memory: scripted frame by frame, with h2's own server side."""

from __future__ import annotations

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, RequestReceived, StreamReset
from hyperframe.frame import GoAwayFrame
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport

from localai_dist.grpcclient.channel import BackendChannel
from localai_dist.grpcclient.connection import GrpcConnection
from localai_dist.grpcclient.framing import encode_message
from localai_dist.rpc import backend_pb2 as pb


class BackendDouble:
    """
    A client connected to a scripted server.

    ``hear()`` takes what the client wrote; the ``say_*`` methods answer it.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.transport = StringTransport()
        self.client = GrpcConnection(token="secret", clock=self.clock)
        self.channel = BackendChannel(self.client)
        self.http2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.http2.initiate_connection()
        self.requests: dict[int, dict[str, str]] = {}
        self.bodies: dict[int, bytes] = {}
        self.resets: dict[int, int] = {}
        self.events: list[Event] = []
        self.client.makeConnection(self.transport)
        self.hear()

    def hear(self, *, answer: bool = True) -> None:
        """Take in what the client wrote, and (if asked) send what HTTP/2 itself answers."""
        data = self.transport.value()
        self.transport.clear()
        for event in self.http2.receive_data(data):
            self.events.append(event)
            if isinstance(event, RequestReceived):
                self.requests[event.stream_id] = dict(event.headers)
                self.bodies[event.stream_id] = b""
            elif isinstance(event, DataReceived):
                self.bodies[event.stream_id] += event.data
                if answer:
                    self.http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamReset):
                self.resets[event.stream_id] = int(event.error_code)
        if answer:
            self.say()

    def say(self) -> None:
        """Send what h2 has to send."""
        data = self.http2.data_to_send()
        if data:
            self.client.dataReceived(data)

    def say_headers(self, stream_id: int) -> None:
        """Begin the answer."""
        self.http2.send_headers(stream_id, [(":status", "200"), ("content-type", "application/grpc")])
        self.say()

    def say_reply(self, stream_id: int, text: bytes = b"hello") -> None:
        """One reply."""
        self.say_bytes(stream_id, encode_message(pb.Reply(message=text).SerializeToString()))

    def say_bytes(self, stream_id: int, data: bytes) -> None:
        """Bytes of replies, as far as the client's windows allow one frame."""
        for start in range(0, len(data), 16384):
            self.http2.send_data(stream_id, data[start : start + 16384])
            self.say()

    def say_trailers(self, stream_id: int, status: int = 0, message: str = "", *, only: bool = False) -> None:
        """End the answer; ``only``: there was none (trailers-only)."""
        headers = [("grpc-status", str(status)), ("grpc-message", message)]
        if only:
            headers = [(":status", "200"), ("content-type", "application/grpc"), *headers]
        self.http2.send_headers(stream_id, headers, end_stream=True)
        self.say()

    def say_goodbye(self, last_stream: int) -> None:
        """GOAWAY, with calls up to ``last_stream`` going on (written by hand: h2 would close for good)."""
        frame = GoAwayFrame(0, last_stream_id=last_stream, error_code=0)
        self.client.dataReceived(frame.serialize())
