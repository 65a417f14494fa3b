"""
Sessions over WebSockets: dial one, or accept one inside twisted.web.

autobahn does the handshake, the limits and the close codes; ``websocket_carrier`` is what it drives. No WebSocket
pings: keepalive is yamux's.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from autobahn.twisted.websocket import (
    WebSocketClientFactory,
    WebSocketServerFactory,
)
from autobahn.websocket import USES_NVX
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import wrapClientTLS
from twisted.internet.interfaces import IReactorTime
from twisted.internet.ssl import optionsForClientTLS
from twisted.python.failure import Failure
from twisted.web.server import NOT_DONE_YET

from localai_dist.errors import UserMistake
from localai_dist.net.answers import json_error
from localai_dist.net.errors import DialFailed, DialRefused
from localai_dist.net.proxy import way_to
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.stream import MuxStream
from localai_dist.net.websocket_carrier import WEBSOCKET_OPTIONS, ClientWire, ServerWire, WebSocketCarrier
from localai_dist.settings.proxies import Proxies
from localai_dist.urls import FRONTEND_SCHEMES, InvalidUrl, bracketed, parse_url


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
    proxies: Proxies = Proxies(),
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
        proxies: what leads there; none is the direct way.

    Raises:
        DialFailed: no connection or no HTTP answer.
        DialRefused: an HTTP answer other than the upgrade.
    """
    require_masker()
    address, factory, endpoint = _target(reactor, url, headers, tls_trust, proxies)
    wire = await _in_time(_upgraded(factory, endpoint), timeout, reactor, address)
    session = MuxSession(wire.carrier, client=client, config=config, clock=reactor)
    session.on_stream = on_stream
    session.begin()
    return session


async def _in_time(upgraded: Coroutine[Any, Any, Any], timeout: float, clock: IReactorTime, address: str) -> Any:
    """What ``upgraded`` gives within ``timeout`` s; what goes wrong is told with the address."""
    upgrading = Deferred.fromCoroutine(upgraded)
    late = clock.callLater(timeout, upgrading.cancel)
    try:
        return await upgrading
    except CancelledError:
        if late.active():
            raise
        raise DialFailed(f"{address}: no answer within {timeout:.1f} s") from None
    except DialRefused as refused:
        raise DialRefused(refused.status, refused.headers, f"{address} {refused}") from None
    except Exception as error:
        raise DialFailed(f"{address}: {str(error) or type(error).__name__}") from error
    finally:
        if late.active():
            late.cancel()


async def _upgraded(factory: Any, endpoint: Any) -> Any:
    """The wire once it speaks WebSocket; no connection stays behind when it does not, or is no longer wanted."""
    wire = await _cancellable(endpoint.connect(factory))
    try:
        await _opened(wire)
    except BaseException:
        _drop(wire)
        raise
    return wire


class _ClientFactory(WebSocketClientFactory):
    """Gives each wire its carrier before anything is received."""

    def buildProtocol(self, addr: Any) -> Any:
        wire: Any = super().buildProtocol(addr)
        wire.carrier = WebSocketCarrier(wire, self.reactor)
        return wire


def _target(
    reactor: Any, url: str, headers: Mapping[str, str], tls_trust: Any, proxies: Proxies
) -> tuple[str, Any, Any]:
    try:
        to = parse_url(url, FRONTEND_SCHEMES)
    except InvalidUrl as error:
        raise DialFailed(f"{url!r} is no WebSocket address: {error}") from error
    scheme = {"http": "ws", "https": "wss"}.get(to.scheme, to.scheme)
    port = to.port or (443 if scheme == "wss" else 80)
    host = bracketed(to.host)
    path = (to.path or "/") + (f"?{to.query}" if to.query else "")
    factory: Any = _ClientFactory(
        f"{scheme}://{host}:{port}{path}", headers=dict(headers), useragent="localai-dist", reactor=reactor
    )
    factory.protocol = ClientWire
    factory.noisy = False
    factory.setProtocolOptions(serverConnectionDropTimeout=0, **WEBSOCKET_OPTIONS)
    endpoint: Any = way_to(reactor, proxies, scheme, to.host, port)
    if scheme == "wss":
        endpoint = wrapClientTLS(optionsForClientTLS(to.host, trustRoot=tls_trust), endpoint)
    return f"{host}:{port}", factory, endpoint


def _cancellable(connecting: Deferred[Any]) -> Deferred[Any]:
    """``connecting``, whose cancelling is told as such: endpoints tell it as a failed lookup or connect."""

    def cancelled(waiting: Deferred[Any]) -> None:
        waiting.errback(CancelledError())
        connecting.cancel()

    def connected(result: Any) -> None:
        if not waiting.called:
            waiting.callback(result)
        elif not isinstance(result, Failure):  # connected all the same
            _drop(result)

    waiting: Deferred[Any] = Deferred(cancelled)
    connecting.addBoth(connected)
    return waiting


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
    factory.protocol = ServerWire
    factory.setProtocolOptions(**WEBSOCKET_OPTIONS)
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
