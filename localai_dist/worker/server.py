"""
The worker's own HTTP server, on loopback: probes, control verbs, files, backend logs.

``/healthz`` and ``/readyz`` need no credential; everything else wants the registration token, and with none configured
refuses everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from twisted.internet.address import IPv4Address
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IProtocol
from twisted.web.resource import Resource

from localai_dist.errors import UserMistake
from localai_dist.net.request import StreamingSite
from localai_dist.wire.verbs import MAX_BODY_BYTES
from localai_dist.worker.ports import LOOPBACK

Check = Callable[[], str]
"""Why a worker is not ready, or an empty text."""


class Healthz(Resource):
    """Whether the process runs."""

    isLeaf = True

    def render_GET(self, request: Any) -> bytes:
        """Always 200."""
        request.setHeader("content-type", "text/plain")
        return b"ok"


class Readyz(Resource):
    """Whether a frontend can use this worker: 200, or 503 with what is missing."""

    isLeaf = True

    def __init__(self, checks: Mapping[str, Check]) -> None:
        super().__init__()
        self._checks = checks

    def render_GET(self, request: Any) -> bytes:
        """Ask every check."""
        reasons = {name: check() for name, check in self._checks.items()}
        ready = not any(reasons.values())
        request.setResponseCode(200 if ready else 503)
        request.setHeader("content-type", "application/json")
        told = {name: {"ok": not reason, "reason": reason} for name, reason in reasons.items()}
        return msgspec.json.encode({"status": "ready" if ready else "starting", "checks": told})


def make_root(checks: Mapping[str, Check], v1: Mapping[str, Resource]) -> Resource:
    """The tree: probes at the top, ``v1`` below ``/v1/``."""
    root = Resource()
    root.putChild(b"healthz", Healthz())
    root.putChild(b"readyz", Readyz(checks))
    versioned = Resource()
    for name, resource in v1.items():
        versioned.putChild(name.encode(), resource)
    root.putChild(b"v1", versioned)
    return root


class LoopbackServer:
    """
    The listening socket.

    Args:
        root: see ``make_root``.
        reactor: listens.
        port: 0 = any free one.
    """

    def __init__(self, root: Resource, *, reactor: Any, port: int = 0) -> None:
        self._site = StreamingSite(root, max_body=MAX_BODY_BYTES, reactor=reactor)
        self._reactor = reactor
        self._wanted = port
        self._listening: Any = None

    @property
    def port(self) -> int:
        """Where it listens, once it does."""
        return int(self._listening.getHost().port)

    def connection(self) -> IProtocol:
        """The server's end of a connection that does not come by the socket."""
        made = self._site.buildProtocol(IPv4Address("TCP", LOOPBACK, 0))
        assert made is not None  # a site never refuses
        return made

    def start(self) -> None:
        """
        Listen.

        Raises:
            UserMistake: the port is taken.
        """
        try:
            self._listening = self._reactor.listenTCP(self._wanted, self._site, interface=LOOPBACK)
        except CannotListenError as error:
            raise UserMistake(
                f"port {self._wanted} for this worker's own server is taken ({error.socketError}); "
                "set LOCALAI_HTTP_ADDR to a free one, or to port 0"
            ) from error

    async def stop(self) -> None:
        """Stop listening; requests that are being answered are cut off."""
        if self._listening is not None:
            listening, self._listening = self._listening, None
            await listening.stopListening()
