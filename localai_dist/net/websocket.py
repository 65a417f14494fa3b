"""
WebSocket as a carrier: autobahn does the handshake, the limits and the close codes.

Binary messages only; how the peer cuts frames into messages is invisible. Messages of ours are at most 65 536 bytes,
the peer's at most 1 MiB + 4 KiB (close 1009 above). No WebSocket pings: keepalive is yamux's.

All timers are ours, on the reactor passed in; autobahn's own are switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from autobahn.twisted.websocket import (
    WebSocketClientFactory,
    WebSocketClientProtocol,
    WebSocketServerFactory,
    WebSocketServerProtocol,
)
from autobahn.websocket import USES_NVX
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime, ISSLTransport
from twisted.internet.ssl import optionsForClientTLS
from twisted.python.failure import Failure
from twisted.web.server import NOT_DONE_YET

from localai_dist.errors import UserMistake
from localai_dist.net.answers import json_error
from localai_dist.net.carrier import CarrierUser
from localai_dist.net.errors import DialFailed, DialRefused
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.sockets import hold_little_unsent
from localai_dist.net.stream import MuxStream
from localai_dist.units import KiB, MiB

MESSAGE_MAX: Final = 1 * MiB + 4 * KiB
CLOSE_WAIT: Final = 5.0
"""The peer has this long (s) to answer a close; then the connection is dropped."""

CLOSE_UNSUPPORTED: Final = 1003

_OPTIONS: Final = {
    "maxFramePayloadSize": MESSAGE_MAX,
    "maxMessagePayloadSize": MESSAGE_MAX,
    "openHandshakeTimeout": 0,
    "closeHandshakeTimeout": 0,
    "autoPingInterval": 0,
    "failByDrop": False,
    "echoCloseCodeReason": True,
    "tcpNoDelay": True,
}


def require_masker() -> None:
    """
    Refuse to run without autobahn's native masker: in Python it does 6 MB/s instead of 600.

    Raises:
        UserMistake: it is missing or switched off; the text says how to get it.
    """
    if not USES_NVX:
        raise UserMistake(
            "autobahn's native WebSocket masker (NVX) is missing: install a binary wheel with "
            "'pip install --only-binary autobahn autobahn', and don't set AUTOBAHN_USE_NVX=0"
        )


class WebSocketCarrier:
    """
    Carries a session over one open WebSocket.

    Attributes:
        pull: see ``Carrier``; False over TLS.
        opened: fires once the upgrade is complete.
    """

    def __init__(self, wire: Any, clock: IReactorTime) -> None:
        self.pull = True
        self.opened: Deferred[None] = Deferred()
        self._wire = wire
        self._clock = clock
        self._user: CarrierUser | None = None
        self._early: list[bytes] = []
        self._gone: Failure | None = None
        self._closing = False
        self._close_call: IDelayedCall | None = None

    # -- the WebSocket calls -----------------------------------------------------------------------------------------

    def wire_opened(self) -> None:
        """The upgrade is complete on this end."""
        hold_little_unsent(self._wire.transport)
        self.pull = not ISSLTransport.providedBy(self._wire.transport)
        self.opened.callback(None)

    def message_received(self, payload: bytes, is_binary: bool) -> None:
        """A whole message."""
        if self._closing:
            return
        if not is_binary:
            self._lost(ConnectionLost("the peer sent a text message, want binary"))
            self._send_close(CLOSE_UNSUPPORTED, "want binary messages")
        elif self._user is None:
            self._early.append(payload)
        elif payload:
            self._user.bytes_received(payload)

    def wire_closing(self) -> None:
        """A close frame was sent, for whatever reason: send nothing more, and don't wait for the peer for ever."""
        self._closing = True
        if self._close_call is None:
            self._close_call = self._clock.callLater(CLOSE_WAIT, self._wire.transport.abortConnection)

    def wire_closed(self, clean: bool, text: str) -> None:
        """The connection is gone; ``text`` has the peer's close code."""
        self._closing = True
        if self._close_call is not None and self._close_call.active():
            self._close_call.cancel()
        self._lost(ConnectionDone(text) if clean else ConnectionLost(text))

    def _lost(self, error: Exception) -> None:
        if self._gone is None:
            self._gone = Failure(error)
            if self._user is not None:
                self._user.carrier_lost(self._gone)

    # -- the session calls -------------------------------------------------------------------------------------------

    def start(self, user: CarrierUser) -> None:
        """Deliver to ``user`` from now on."""
        self._user = user
        early, self._early = self._early, []
        for payload in early:
            user.bytes_received(payload)
        if self._gone is not None:
            user.carrier_lost(self._gone)
        else:
            # HTTPChannel is still registered when the connection came through a Resource.
            self._wire.transport.unregisterProducer()
            self._wire.transport.registerProducer(self, not self.pull)

    def send(self, parts: Sequence[bytes]) -> None:
        """Send ``parts`` as one binary message."""
        if not self._closing:
            self._wire.sendMessage(b"".join(parts), isBinary=True)

    def close(self, code: int, text: str) -> None:
        """Send what was given, then the close frame; drop the connection if the peer does not follow."""
        self._user = None
        if not self._closing:
            self._wire.transport.unregisterProducer()
            self._send_close(code, text)

    def abort(self) -> None:
        """Drop the connection now."""
        self._user = None
        self._closing = True
        self._wire.transport.abortConnection()

    def peer_address(self) -> IAddress:
        """The far address."""
        address: IAddress = self._wire.transport.getPeer()
        return address

    def host_address(self) -> IAddress:
        """Our address."""
        address: IAddress = self._wire.transport.getHost()
        return address

    def _send_close(self, code: int, text: str) -> None:
        self._wire.sendCloseFrame(code=code, reasonUtf8=text.encode()[:120].decode(errors="ignore").encode())

    # -- the transport calls -----------------------------------------------------------------------------------------

    def resumeProducing(self) -> None:
        """The transport's queue is empty."""
        if self._user is not None:
            self._user.carrier_drained()

    def pauseProducing(self) -> None:
        """The transport's queue is full (push only)."""
        if self._user is not None:
            self._user.carrier_paused()

    def stopProducing(self) -> None:
        """The transport is going; ``wire_closed`` tells."""


class _Wire:
    """What autobahn calls on both ends, passed on."""

    carrier: WebSocketCarrier
    _dataReceived: Callable[[bytes], None]

    def dataReceived(self, data: bytes) -> None:
        # autobahn's own formats a debug line per read, which costs more than the read.
        self._dataReceived(data)

    def onOpen(self) -> None:
        self.carrier.wire_opened()

    def onMessage(self, payload: bytes, isBinary: bool) -> None:
        self.carrier.message_received(payload, isBinary)

    def sendCloseFrame(self, *args: Any, **kwargs: Any) -> None:
        super().sendCloseFrame(*args, **kwargs)  # type: ignore[misc]
        self.carrier.wire_closing()

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:
        self.carrier.wire_closed(wasClean, f"WebSocket closed, code {code}" + (f": {reason}" if reason else ""))


class _ClientWire(_Wire, WebSocketClientProtocol):  # type: ignore[misc]  # autobahn's own bases disagree
    """The dialling end."""

    refusal: DialRefused | None = None

    def failHandshake(self, reason: str) -> None:
        """autobahn's hook for an answer that is no upgrade; ``dial`` reads the details."""
        self.refusal = _refusal(self)
        super().failHandshake(reason)


class _ServerWire(_Wire, WebSocketServerProtocol):  # type: ignore[misc]
    """The accepting end."""


def _refusal(wire: Any) -> DialRefused | None:
    try:
        status = int(wire.http_status_line.split()[1])
    except (AttributeError, IndexError, ValueError):
        return None
    if status == 101:
        return None
    return DialRefused(status, dict(wire.http_headers), f"answered {wire.http_status_line.strip()!r}, not the upgrade")


# -- dialling ----------------------------------------------------------------------------------------------------------


async def dial(
    reactor: Any,
    url: str,
    *,
    headers: Mapping[str, str],
    client: bool,
    config: SessionConfig,
    on_stream: Callable[[MuxStream], None] | None = None,
    timeout: float = 10.0,
    tls_trust: Any = None,
) -> MuxSession:
    """
    Open a session to ``url``.

    Cancelling drops the connection.

    Args:
        url: ``ws``, ``wss``, ``http`` or ``https``; a query is kept. The name is resolved anew each time.
        headers: added to the upgrade request.
        client: this end is the yamux client (odd stream ids).
        timeout: for everything up to the upgrade (s).
        tls_trust: trust roots for ``optionsForClientTLS``; None is the platform's.

    Raises:
        DialFailed: no connection or no HTTP answer.
        DialRefused: an HTTP answer other than the upgrade.
    """
    require_masker()
    address, factory, endpoint = _target(reactor, url, headers, tls_trust)
    waiting: list[Deferred[Any]] = []
    call = reactor.callLater(timeout, lambda: waiting[0].cancel())
    wire: Any = None
    try:
        waiting[:] = [endpoint.connect(factory)]
        wire = await waiting[0]
        waiting[:] = [_opened(wire)]
        await waiting[0]
    except CancelledError:
        _drop(wire)
        if call.active():
            raise
        raise DialFailed(f"{address}: no answer within {timeout:.1f} s") from None
    except DialRefused as refused:
        raise DialRefused(refused.status, refused.headers, f"{address} {refused}") from None
    except Exception as error:
        _drop(wire)
        raise DialFailed(f"{address}: {str(error) or type(error).__name__}") from error
    finally:
        if call.active():
            call.cancel()
    session = MuxSession(wire.carrier, client=client, config=config, clock=reactor)
    session.on_stream = on_stream
    session.begin()
    return session


class _ClientFactory(WebSocketClientFactory):
    """Gives each wire its carrier before anything is received."""

    def buildProtocol(self, addr: Any) -> Any:
        wire: Any = super().buildProtocol(addr)
        wire.carrier = WebSocketCarrier(wire, self.reactor)
        return wire


def _target(reactor: Any, url: str, headers: Mapping[str, str], tls_trust: Any) -> tuple[str, Any, Any]:
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    if scheme not in ("ws", "wss") or not parts.hostname:
        raise DialFailed(f"{url!r} is no WebSocket address: want ws://host or wss://host")
    port = parts.port or (443 if scheme == "wss" else 80)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    factory: Any = _ClientFactory(
        f"{scheme}://{host}:{port}{path}", headers=dict(headers), useragent="localai-dist", reactor=reactor
    )
    factory.protocol = _ClientWire
    factory.noisy = False
    factory.setProtocolOptions(serverConnectionDropTimeout=0, **_OPTIONS)
    endpoint: Any = HostnameEndpoint(reactor, parts.hostname, port)
    if scheme == "wss":
        endpoint = wrapClientTLS(optionsForClientTLS(parts.hostname, trustRoot=tls_trust), endpoint)
    return f"{host}:{port}", factory, endpoint


def _opened(wire: Any) -> Deferred[None]:
    """Fires once the upgrade is complete, errs with why it is not."""
    waiting: Deferred[None] = Deferred()

    def ended(_: Any) -> None:
        if not waiting.called:
            waiting.errback(wire.refusal or DialFailed(wire.wasNotCleanReason or "the connection was closed"))

    wire.carrier.opened.addCallback(lambda _: None if waiting.called else waiting.callback(None))
    wire.is_closed.addCallback(ended)
    return waiting


def _drop(wire: Any) -> None:
    if wire is not None and wire.transport is not None:
        wire.transport.abortConnection()


# -- accepting ---------------------------------------------------------------------------------------------------------


def accept(
    request: Any,
    *,
    client: bool,
    config: SessionConfig,
    clock: IReactorTime,
    on_session: Callable[[MuxSession], None],
    on_stream: Callable[[MuxStream], None] | None = None,
) -> Any:
    """
    Complete the WebSocket upgrade of an authenticated request; return what ``render`` shall return.

    ``on_session`` is called once the upgrade is complete; nothing is called when the peer leaves before.
    A request that is no upgrade is answered 400.
    """
    upgrade = request.requestHeaders.getRawHeaders(b"upgrade", [b""])[0]
    key = request.requestHeaders.getRawHeaders(b"sec-websocket-key")
    if upgrade.strip().lower() != b"websocket" or key is None or request.channel.transport is None:
        return json_error(request, 400, "invalid_request", "want a WebSocket upgrade", "invalid_request_error")
    factory: Any = WebSocketServerFactory(reactor=clock)
    factory.protocol = _ServerWire
    factory.setProtocolOptions(**_OPTIONS)
    wire = factory.buildProtocol(request.client)
    carrier = wire.carrier = WebSocketCarrier(wire, clock)

    def opened(_: None) -> None:
        session = MuxSession(carrier, client=client, config=config, clock=clock)
        session.on_stream = on_stream
        on_session(session)
        session.begin()

    carrier.opened.addCallback(opened)
    _take_over(request, wire)
    return NOT_DONE_YET


def _take_over(request: Any, wire: Any) -> None:
    """Give ``request``'s connection to ``wire`` and replay the request, which autobahn parses again."""
    channel = request.channel
    transport, channel.transport = channel.transport, None
    if hasattr(transport, "wrappedProtocol"):  # TLS
        transport.wrappedProtocol = wire
    else:
        transport.protocol = wire
    transport.unregisterProducer()
    wire.makeConnection(transport)
    transport.resumeProducing()
    lines = [request.method + b" " + request.uri + b" HTTP/1.1"]
    for name, values in request.requestHeaders.getAllRawHeaders():
        lines.append(name + b": " + b",".join(values))
    wire.dataReceived(b"\r\n".join(lines) + b"\r\n\r\n")
