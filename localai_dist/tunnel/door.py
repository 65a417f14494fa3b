"""What the two WebSocket doors (tunnel and peer link) share: reading the request, and refusing before the upgrade."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IReactorTime
from twisted.web.iweb import IRequest
from twisted.web.server import NOT_DONE_YET

from localai_dist import __version__
from localai_dist.net import websocket
from localai_dist.net.answers import json_error
from localai_dist.net.head import header
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.stream import MuxStream
from localai_dist.urls import HTTP_SCHEMES, InvalidUrl, parse_url
from localai_dist.wire.credentials import AUTHORIZATION, VERSION, bearer
from localai_dist.wire.releases import compatible, mismatch

TYPES = {400: "invalid_request_error", 401: "invalid_request_error", 403: "permission_error"}
"""Status -> the envelope's type; any other is a server's. Source: design §8."""


def bearer_of(request: IRequest) -> str | None:
    """The bearer token the request presents, or None."""
    return bearer(header(request, AUTHORIZATION))


def same_origin(request: IRequest) -> bool:
    """Whether a browser's page of this very host asks, or no browser at all: a client without Origin passes."""
    origin = header(request, "Origin")
    if not origin:
        return True
    try:
        asking = parse_url(origin, HTTP_SCHEMES)
    except InvalidUrl:  # such as null, which a page without an address sends
        return False
    return asking.authority.lower() == (header(request, "Host") or "").lower()


def other_release(request: IRequest) -> str | None:
    """Why the release of who dials does not fit this one, or None; a stock worker names none and passes."""
    theirs = header(request, VERSION)
    return None if compatible(__version__, theirs) else mismatch(__version__, theirs or "")


def refuse(request: Any, status: int, code: str, text: str, *, retry_after: int | None = None) -> int:
    """Answer with the JSON error envelope, and with this build's version; the request is finished."""
    request.setHeader(VERSION.encode("ascii"), __version__.encode("ascii"))
    if status == 401:
        request.setHeader(b"WWW-Authenticate", b'Bearer realm="localai-dist"')
    if status == 426:
        request.setHeader(b"Upgrade", b"websocket")  # RFC 9110: a 426 names what it would speak
    body = json_error(request, status, code, text, TYPES.get(status, "server_error"), retry_after=retry_after)
    request.write(body)
    request.finish()
    return NOT_DONE_YET


def upgrade(
    request: Any,
    *,
    config: SessionConfig,
    clock: IReactorTime,
    on_session: Callable[[MuxSession], None],
    on_stream: Callable[[MuxStream], None] | None = None,
) -> None:
    """Make a session of an admitted request, this end the yamux server; what is no upgrade is answered 400."""
    answer = websocket.accept(
        request, client=False, config=config, clock=clock, on_session=on_session, on_stream=on_stream
    )
    if answer != NOT_DONE_YET:
        request.write(answer)
        request.finish()
