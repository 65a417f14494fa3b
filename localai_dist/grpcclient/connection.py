"""HTTP/2 over whatever transport the endpoint gives: calls out, replies in, bounded both ways."""

from __future__ import annotations

from typing import Any, Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IPushProducer, IReactorTime, ITCPTransport
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from localai_dist.grpcclient.call import WINDOW, Call
from localai_dist.grpcclient.framing import (
    FRAME_LIMIT,
    FrameTooLong,
    GoAway,
    GoAwayFilter,
    encode_message,
    encode_timeout,
)
from localai_dist.grpcclient.status import (
    Origin,
    RpcError,
    StatusCode,
    error_of_http,
    error_of_reset,
    error_of_trailers,
)
from localai_dist.units import MiB

_CONNECTION_WINDOW: Final = 16 * MiB
_CONTROL_LIMIT: Final = 1 * MiB


def _lost(text: str) -> RpcError:
    return RpcError(StatusCode.UNAVAILABLE, text, Origin.TRANSPORT)


@implementer(IPushProducer)
class GrpcConnection(Protocol):
    """
    One HTTP/2 connection to one backend.

    What is bounded, and by whom: unread replies by each call's window (``call.WINDOW``; the connection's own window is
    credited at once, so one stalled reader never stops the other calls); unsent requests stay with their call until the
    backend's windows are open and the transport is not paused; answers to a flood of pings by ``_CONTROL_LIMIT``.
    """

    transport: Any  # ITransport and IConsumer, with abortConnection; None once let go

    def __init__(self, *, token: str, clock: IReactorTime) -> None:
        self._token = token
        self._clock = clock
        self._http2 = H2Connection(
            H2Configuration(
                client_side=True,
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
            )
        )
        self._go_away = GoAwayFilter()
        self._calls: dict[int, Call] = {}
        self._headers: dict[int, dict[str, str]] = {}
        self._sending: dict[int, memoryview] = {}
        self._paused = False
        self._uncredited = 0
        self._control = 0
        self._closed: RpcError | None = None
        self._when_closed: list[Deferred[RpcError]] = []

    # -- what callers use ------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a new call can be started."""
        return self._closed is None

    @property
    def call_count(self) -> int:
        """Calls that are running."""
        return len(self._calls)

    def start_call(self, method: str, payload: bytes, timeout: float | None) -> Call:
        """
        Start a call: its request goes out now as far as windows allow.

        Args:
            method: the bare name, like ``Predict``.
            payload: the encoded request.
            timeout: seconds the call may take, told to the backend and kept here; None for no limit.

        Raises:
            RpcError: UNAVAILABLE when the connection is closed or closing, RESOURCE_EXHAUSTED for an oversized request
                or when the backend allows no more calls at once.
        """
        if self._closed is not None:
            raise self._closed
        body = encode_message(payload)
        try:
            stream_id = self._http2.get_next_available_stream_id()
            self._http2.send_headers(stream_id, self._request_headers(method, timeout))
        except ProtocolError as error:
            raise RpcError(
                StatusCode.RESOURCE_EXHAUSTED, f"no further call possible: {error}", Origin.CALLER
            ) from error
        call = Call(self, stream_id, self._clock, timeout)
        self._calls[stream_id] = call
        self._sending[stream_id] = memoryview(body)
        self._pump()
        return call

    def close(self) -> None:
        """Say goodbye and close; calls that still run end with CANCELLED, here and on the backend."""
        if self._closed is None or self._closed.origin is not Origin.CALLER:
            self._shut(RpcError(StatusCode.CANCELLED, "the connection was closed here", Origin.CALLER), orderly=True)

    def when_closed(self) -> Deferred[RpcError]:
        """Fires with the reason once no new call can be started, at once if that is so; each has its own Deferred."""
        waiter: Deferred[RpcError] = Deferred()
        if self._closed is not None:
            waiter.callback(self._closed)
        else:
            self._when_closed.append(waiter)
        return waiter

    # -- what calls use (CallOwner) --------------------------------------------------------------------------

    def reset(self, stream_id: int) -> None:
        """Send RST_STREAM CANCEL for a call and forget it."""
        if self._forget(stream_id) is None:
            return
        self._send_reset(stream_id)
        self._flush()
        self._retire()

    def credit(self, stream_id: int, count: int) -> None:
        """Let the backend send ``count`` more bytes of a call."""
        if stream_id not in self._calls:
            return
        try:
            self._http2.increment_flow_control_window(count, stream_id)
        except (ProtocolError, KeyError):
            return  # the end of the call came in the same bytes; h2 knows already, we are about to
        self._flush()

    # -- what the transport uses -----------------------------------------------------------------------------

    def connectionMade(self) -> None:
        """Open the HTTP/2 connection; nothing is waited for, so the first call saves a round trip."""
        if ITCPTransport.providedBy(self.transport):
            self.transport.setTcpNoDelay(True)
        self.transport.registerProducer(self, True)
        self._http2.initiate_connection()
        self._http2.update_settings(
            {
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: WINDOW,
                SettingCodes.MAX_FRAME_SIZE: FRAME_LIMIT,
            }
        )
        self._http2.increment_flow_control_window(_CONNECTION_WINDOW - 65_535)
        self._flush()

    def dataReceived(self, data: bytes) -> None:
        """Take in what came, then wake the readers that have something to read."""
        if self.transport is None:
            return
        try:
            shown, goodbyes = self._go_away.feed(data)
            events = self._http2.receive_data(shown)
        except (ProtocolError, FrameTooLong) as error:
            self._shut(_lost(f"the backend broke HTTP/2: {error}"))
            return
        touched: dict[int, Call] = {}
        for event in events:
            self._take(event, touched)
        for goodbye in goodbyes:
            self._said_goodbye(goodbye, touched)
        self._credit_connection()
        self._pump()
        for call in touched.values():
            call.wake()
        self._retire()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Every running call ends with UNAVAILABLE."""
        self._shut(_lost(f"the connection to the backend was lost: {reason.getErrorMessage()}"), gone=True)

    def pauseProducing(self) -> None:
        """The transport has enough: requests wait."""
        self._paused = True
        self._control = 0

    def resumeProducing(self) -> None:
        """The transport takes more."""
        self._paused = False
        self._pump()

    def stopProducing(self) -> None:
        """The transport is going; ``connectionLost`` follows."""
        self._paused = True

    # -- inside ----------------------------------------------------------------------------------------------

    def _request_headers(self, method: str, timeout: float | None) -> list[tuple[str, str]]:
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", f"/backend.Backend/{method}"),
            (":authority", "backend"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "localai-dist"),
        ]
        if self._token:
            headers.append(("authorization", f"Bearer {self._token}"))
        if timeout is not None:
            headers.append(("grpc-timeout", encode_timeout(timeout)))
        return headers

    def _take(self, event: Event, touched: dict[int, Call]) -> None:
        if isinstance(event, DataReceived):
            self._uncredited += event.flow_controlled_length
            call = self._calls.get(event.stream_id)
            if call is not None:
                touched[event.stream_id] = call
                call.received(event.data, event.flow_controlled_length)
        elif isinstance(event, ResponseReceived | TrailersReceived):
            if event.stream_id in self._calls:
                self._headers.setdefault(event.stream_id, {}).update(event.headers)  # type: ignore[arg-type]
        elif isinstance(event, StreamEnded):
            self._end(event.stream_id, self._verdict(self._headers.get(event.stream_id, {})), touched)
        elif isinstance(event, StreamReset):
            headers = self._headers.get(event.stream_id, {})
            # A server that answered early resets with NO_ERROR after its trailers: the trailers count.
            error = self._verdict(headers) if "grpc-status" in headers else error_of_reset(int(event.error_code))
            self._end(event.stream_id, error, touched)

    def _verdict(self, headers: dict[str, str]) -> RpcError | None:
        if "grpc-status" not in headers and headers.get(":status", "200") != "200":
            return error_of_http(headers[":status"])
        return error_of_trailers(headers)

    def _end(self, stream_id: int, error: RpcError | None, touched: dict[int, Call]) -> None:
        unsent = stream_id in self._sending
        call = self._forget(stream_id)
        if call is None:
            return
        if unsent:
            self._send_reset(stream_id)
        call.finish(error)
        touched[stream_id] = call

    def _said_goodbye(self, goodbye: GoAway, touched: dict[int, Call]) -> None:
        text = f"the backend is closing its connection (HTTP/2 error {goodbye.code})"
        self._announce(_lost(text))
        for stream_id in [number for number in self._calls if number > goodbye.last_stream]:
            self._end(stream_id, _lost(f"{text}; the call was not processed"), touched)

    def _forget(self, stream_id: int) -> Call | None:
        self._sending.pop(stream_id, None)
        self._headers.pop(stream_id, None)
        return self._calls.pop(stream_id, None)

    def _send_reset(self, stream_id: int) -> None:
        try:
            self._http2.reset_stream(stream_id, ErrorCodes.CANCEL)
        except ProtocolError:
            pass  # h2 knows that the stream is over already

    def _credit_connection(self) -> None:
        if self._uncredited >= _CONNECTION_WINDOW // 4:
            self._http2.increment_flow_control_window(self._uncredited)
            self._uncredited = 0

    def _pump(self) -> None:
        """Send of every waiting request what windows and transport allow, one frame of each in turn."""
        progress = True
        while progress and not self._paused:
            progress = False
            for stream_id in list(self._sending):
                progress = self._send_some(stream_id) or progress
            self._flush()
        self._flush()

    def _send_some(self, stream_id: int) -> bool:
        left = self._sending[stream_id]
        room = min(self._http2.local_flow_control_window(stream_id), self._http2.max_outbound_frame_size, FRAME_LIMIT)
        if room <= 0:
            return False
        chunk, rest = left[:room], left[room:]
        self._http2.send_data(stream_id, bytes(chunk), end_stream=not rest)
        if rest:
            self._sending[stream_id] = rest
        else:
            del self._sending[stream_id]
        return True

    def _flush(self) -> None:
        out = self._http2.data_to_send()
        if not out or self.transport is None:
            return
        if self._paused:
            self._control += len(out)
            if self._control > _CONTROL_LIMIT:
                self._shut(_lost("the backend reads nothing and asks for more and more answers"))
                return
        self.transport.write(out)

    def _retire(self) -> None:
        """After a go-away the connection closes with its last call."""
        if self._closed is not None and not self._calls and self.transport is not None:
            self._let_go(orderly=True)

    def _announce(self, error: RpcError) -> None:
        if self._closed is None:
            self._closed = error
            waiters, self._when_closed = self._when_closed, []
            for waiter in waiters:
                waiter.callback(error)

    def _shut(self, error: RpcError, *, orderly: bool = False, gone: bool = False) -> None:
        calls = list(self._calls.values())
        if orderly and self.transport is not None:
            for stream_id in list(self._calls):
                self._send_reset(stream_id)
        self._calls.clear()
        self._sending.clear()
        self._headers.clear()
        for call in calls:
            call.finish(error)
        if gone:
            self.transport = None
        elif self.transport is not None:
            self._let_go(orderly=orderly)
        self._announce(error)
        for call in calls:
            call.wake()

    def _let_go(self, *, orderly: bool) -> None:
        transport, self.transport = self.transport, None
        if not orderly or self._paused:
            transport.abortConnection()
            return
        self._http2.close_connection()
        transport.write(self._http2.data_to_send())
        transport.unregisterProducer()
        transport.loseConnection()
