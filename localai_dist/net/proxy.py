"""
Connections by way of an HTTP proxy: ``CONNECT``, then the bytes are the far end's.

Source: RFC 9110 §9.3.6.
"""

from __future__ import annotations

from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.interfaces import IDelayedCall, IProtocolFactory, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from localai_dist.net.errors import NetError
from localai_dist.settings.proxies import Proxies, Proxy
from localai_dist.units import KiB
from localai_dist.urls import bracketed

ANSWER_WITHIN: Final = 8.0
"""Seconds a proxy may take to answer, so that its silence is told before the dial's own time is over."""
LARGEST_HEAD: Final = 16 * KiB
_END: Final = b"\r\n\r\n"


class ProxyFailed(NetError):
    """The proxy can't be reached, or does not lead to the address; the text names it, and says what to do."""


def way_to(reactor: Any, proxies: Proxies, scheme: str, host: str, port: int, *, within: float = 30.0) -> Any:
    """
    An endpoint that leads to ``host``: directly, its name resolved anew each time, or by way of its proxy.

    Args:
        scheme: ``http``, ``https``, ``ws`` or ``wss``; TLS is the caller's, on top.
        within: what the TCP connection may take (s).
    """
    proxy = proxies.towards(scheme, host, port)
    if proxy is None:
        return HostnameEndpoint(reactor, host, port, timeout=within)
    there = HostnameEndpoint(reactor, proxy.host, proxy.port, timeout=within)
    return ConnectEndpoint(there, proxy, f"{bracketed(host)}:{port}", clock=reactor)


@implementer(IStreamClientEndpoint)
class ConnectEndpoint:
    """
    One address behind one proxy.

    Args:
        there: leads to the proxy.
        proxy: who it is.
        target: ``host:port`` as the proxy is asked for it.
        clock: bounds its answer.
    """

    def __init__(self, there: IStreamClientEndpoint, proxy: Proxy, target: str, *, clock: IReactorTime) -> None:
        self._there = there
        self._proxy = proxy
        self._target = target
        self._clock = clock

    def connect(self, factory: IProtocolFactory) -> Deferred[Any]:
        """
        ``factory``'s protocol, connected to the target; cancelling drops the connection.

        Errs with ``ProxyFailed``.
        """
        return Deferred.fromCoroutine(self._connect(factory))

    async def _connect(self, factory: IProtocolFactory) -> Any:
        asking = _Asking(self._proxy, self._target, factory, self._clock)
        try:
            await self._there.connect(Factory.forProtocol(lambda: asking))
        except CancelledError:
            raise
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise ProxyFailed(_about(self._proxy, f"can't be reached: {reason}")) from error
        return await asking.answered


class _Asking(Protocol):
    """Holds the connection until the proxy has answered, then hands it to the protocol it is for."""

    def __init__(self, proxy: Proxy, target: str, factory: IProtocolFactory, clock: IReactorTime) -> None:
        self._proxy = proxy
        self._target = target
        self._for = factory
        self._clock = clock
        self._head = bytearray()
        self._late: IDelayedCall | None = None
        self.answered: Deferred[Any] = Deferred(lambda _: self._drop())

    def connectionMade(self) -> None:
        """Ask."""
        self._late = self._clock.callLater(ANSWER_WITHIN, self._fail, f"did not answer within {ANSWER_WITHIN:.0f} s")
        lines = [f"CONNECT {self._target} HTTP/1.1", f"Host: {self._target}", "User-Agent: localai-dist"]
        if self._proxy.authorization is not None:
            lines.append(f"Proxy-Authorization: {self._proxy.authorization}")
        self._transport.write("\r\n".join(lines).encode("ascii") + _END)

    def dataReceived(self, data: bytes) -> None:
        """More of the answer's head; what is behind it is the far end's."""
        if self.answered.called:  # refused, and being dropped
            return
        self._head += data
        head, end, rest = bytes(self._head).partition(_END)
        if len(head) > LARGEST_HEAD or (not b"HTTP/1.".startswith(head[:7]) and head[:7] != b"HTTP/1."):
            self._fail("is none: its answer to CONNECT is no HTTP")
        elif end:
            self._answer(head.split(b"\r\n", 1)[0], rest)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """It closed."""
        self._fail(f"closed the connection instead of leading to {self._target}")

    @property
    def _transport(self) -> Any:
        return self.transport

    def _answer(self, line: bytes, rest: bytes) -> None:
        status = line.split(b" ", 2)[1:2]
        if not status or len(status[0]) != 3 or not status[0].isdigit():
            self._fail("is none: its answer to CONNECT is no HTTP")
        elif status[0].startswith(b"2"):
            self._hand_over(rest)
        elif status[0] == b"407":
            self._fail("wants credentials, the right ones (407): name it as http://user:password@host:port")
        else:
            said = "".join(character for character in line[9:89].decode("utf-8", "replace") if character.isprintable())
            self._fail(f"does not lead to {self._target}: it answers {said}")

    def _hand_over(self, rest: bytes) -> None:
        self._end_timer()
        inner = self._for.buildProtocol(self._transport.getPeer())
        if inner is None:
            self._fail("is not used after all: there is nobody to connect")
            return
        # The transport itself gets the new protocol: no call in between for the bytes of a model.
        self._transport.protocol = inner
        inner.makeConnection(self._transport)
        if rest:
            inner.dataReceived(rest)
        if not self.answered.called:
            self.answered.callback(inner)

    def _fail(self, what: str) -> None:
        self._end_timer()
        if not self.answered.called:
            self.answered.errback(ProxyFailed(_about(self._proxy, what)))
        self._transport.abortConnection()

    def _drop(self) -> None:
        self._end_timer()
        self._transport.abortConnection()
        if not self.answered.called:
            self.answered.errback(CancelledError())

    def _end_timer(self) -> None:
        if self._late is not None and self._late.active():
            self._late.cancel()


def _about(proxy: Proxy, what: str) -> str:
    return f"the proxy {proxy} of {proxy.variable} {what}"
