"""
HTTP calls to whichever frontend answers: the last one that worked first, the next one at once when it does not.

Source: design §5 item 15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from twisted.internet.endpoints import wrapClientTLS
from twisted.internet.error import ConnectError, ConnectionClosed, DNSLookupError, SSLError
from twisted.internet.error import TimeoutError as ConnectTimeout
from twisted.logger import Logger
from twisted.web.client import (
    URI,
    Agent,
    BrowserLikePolicyForHTTPS,
    RequestGenerationFailed,
    RequestTransmissionFailed,
    ResponseFailed,
    ResponseNeverReceived,
)
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from localai_dist import __version__
from localai_dist.net.proxy import ProxyFailed, way_to
from localai_dist.relay.body import BodyBroken, BodyTooLarge, BytesBody, read_body
from localai_dist.settings.proxies import Proxies
from localai_dist.units import MiB
from localai_dist.wire.credentials import AUTHORIZATION, NODE_TOKEN, VERSION, authorization
from localai_dist.worker.errors import NotReached
from localai_dist.worker.timing import TooLate, bounded

CONNECT_WITHIN = 10.0
ANSWER_WITHIN = 20.0
"""Seconds one frontend has for the whole exchange, connecting included."""
ANSWER_BYTES = 1 * MiB

_NEXT_STATUSES = frozenset({502, 503, 504})
"""A frontend that is starting, draining, or behind a balancer that has none: ask the next."""
_TROUBLES = (
    ConnectError,
    ConnectTimeout,
    ConnectionClosed,
    DNSLookupError,
    SSLError,
    RequestGenerationFailed,
    RequestTransmissionFailed,
    ResponseFailed,
    ResponseNeverReceived,
    OSError,
    TooLate,
    BodyBroken,
    BodyTooLarge,
    ProxyFailed,
)


@dataclass(frozen=True, slots=True)
class FrontendAnswer:
    """
    What a frontend said.

    Attributes:
        url: which one.
        status: HTTP status.
        body: the body's JSON value; None if it is none.
        text: the error's message, or the beginning of the body.
    """

    url: str
    status: int
    body: Any
    text: str

    @property
    def fields(self) -> Mapping[str, Any]:
        """The body, if it is an object, else nothing."""
        return self.body if isinstance(self.body, dict) else {}


_HINT = " (if it speaks no TLS, its address begins with http://)"


class Frontends:
    """
    The frontends of the cluster, as this node knows them.

    Args:
        reactor: dials, and is the clock.
        urls: their addresses, without a trailing slash.
        registration_token: sent as bearer.
        proxies: what leads to them.
        agent: for tests.
    """

    _log = Logger()

    def __init__(
        self,
        *,
        reactor: Any,
        urls: Sequence[str],
        registration_token: str,
        proxies: Proxies = Proxies(),
        agent: Any = None,
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._reactor = reactor
        self._token = registration_token
        self._agent = agent or Agent.usingEndpointFactory(reactor, _Ways(reactor, proxies))

    async def post(self, path: str, fields: Mapping[str, Any], *, node_token: str | None = None) -> FrontendAnswer:
        """
        The answer of the first frontend that gives one; it is asked first the next time. Cancelling gives it up.

        Args:
            path: below the address, starting with ``/``.
            fields: the body, as JSON.
            node_token: the node's own credential.

        Raises:
            NotReached: none of them answered.
        """
        return await self._ask("POST", path, fields, node_token)

    async def get(self, path: str, *, node_token: str | None = None) -> FrontendAnswer:
        """As ``post``, without a body."""
        return await self._ask("GET", path, None, node_token)

    async def _ask(
        self, method: str, path: str, fields: Mapping[str, Any] | None, node_token: str | None
    ) -> FrontendAnswer:
        trouble = "there is no frontend to ask"
        for url in tuple(self._urls):
            try:
                answer = await self._one(method, url, path, fields, node_token)
            except _TROUBLES as error:
                trouble = f"{url}: {_words(error)}{_HINT if _over_tls(url) else ''}"
            else:
                if answer.status not in _NEXT_STATUSES:
                    self._urls.remove(url)
                    self._urls.insert(0, url)
                    return answer
                trouble = f"{url}: {answer.status} {answer.text}"
            self._log.debug("{trouble}", trouble=trouble)
        raise NotReached(f"no frontend answered; the last one tried was {trouble}")

    async def _one(
        self, method: str, url: str, path: str, fields: Mapping[str, Any] | None, node_token: str | None
    ) -> FrontendAnswer:
        headers = Headers({"Content-Type": ["application/json"], VERSION: [__version__]})
        headers.setRawHeaders(AUTHORIZATION, [authorization(self._token)])
        if node_token:
            headers.setRawHeaders(NODE_TOKEN, [node_token])
        return await bounded(
            self._exchange(method, url, path, headers, fields),
            ANSWER_WITHIN,
            self._reactor,
            f"no answer within {ANSWER_WITHIN:.0f} s",
        )

    async def _exchange(
        self, method: str, url: str, path: str, headers: Headers, fields: Mapping[str, Any] | None
    ) -> FrontendAnswer:
        body = None if fields is None else BytesBody(msgspec.json.encode(fields))
        try:
            response = await self._agent.request(method.encode(), (_over_http(url) + path).encode(), headers, body)
        except ValueError as error:  # a name that Twisted does not look up, for an underscore in it, say
            raise DNSLookupError(str(error)) from error
        raw = await read_body(response, ANSWER_BYTES)
        return FrontendAnswer(url, response.code, *_understood(raw))


def _over_tls(url: str) -> bool:
    return url.lower().startswith(("https:", "wss:"))


def _over_http(url: str) -> str:
    """A frontend may be given as ``ws`` or ``wss``, too."""
    return f"http{url[2:]}" if url[:2].lower() == "ws" else url


@implementer(IAgentEndpointFactory)
class _Ways:
    """The way to each frontend: direct or by a proxy, and TLS where its address says so."""

    def __init__(self, reactor: Any, proxies: Proxies) -> None:
        self._reactor = reactor
        self._proxies = proxies
        self._tls = BrowserLikePolicyForHTTPS()

    def endpointForURI(self, uri: URI) -> Any:
        """See ``IAgentEndpointFactory``."""
        scheme, host = uri.scheme.decode("ascii"), uri.host.decode("ascii")
        way = way_to(self._reactor, self._proxies, scheme, host, uri.port, within=CONNECT_WITHIN)
        return way if scheme != "https" else wrapClientTLS(self._tls.creatorForNetloc(uri.host, uri.port), way)


def _understood(raw: bytes) -> tuple[Any, str]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None, raw[:200].decode("utf-8", "replace")
    if not isinstance(body, dict):
        return body, ""
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return body, str(message or body.get("message") or "")


def _words(error: BaseException) -> str:
    reasons = getattr(error, "reasons", None)
    told = [reason.getErrorMessage() or reason.type.__name__ for reason in reasons or ()]
    return "; ".join(told) or str(error) or type(error).__name__
