"""A link to PostgreSQL that can be cut, frozen (nothing gets through, nobody is told) and thawed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from twisted.internet import reactor
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.interfaces import IListeningPort
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

SOCKET = ".s.PGSQL.5432"


class _Half(Protocol):
    """One side of one forwarded connection."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.other: _Half | None = None
        self._early = b""

    def connectionMade(self) -> None:
        self._link.halves.add(self)
        if self._link.frozen:
            self.transport.pauseProducing()  # type: ignore[union-attr]

    def join(self, other: _Half) -> None:
        self.other, other.other = other, self
        other.transport.write(self._early)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
        else:
            self.other.transport.write(data)  # type: ignore[union-attr]

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._link.halves.discard(self)
        if self.other is not None:
            self.other.transport.loseConnection()  # type: ignore[union-attr]


class Link:
    """A proxy between this process and the server of ``url``; ``self.url`` leads through it."""

    def __init__(self, url: str, *, tcp: bool = False) -> None:
        self._target = str(Path(parse_qs(urlsplit(url).query)["host"][0], SOCKET))
        self._folder = tempfile.mkdtemp(prefix="localai-dist-link-")
        self.halves: set[_Half] = set()
        self.frozen = False
        start, _, database = url.split("?", 1)[0].rpartition("/")
        factory = Factory.forProtocol(self._made)
        self._port: IListeningPort
        if tcp:
            self._port = reactor.listenTCP(0, factory, interface="127.0.0.1")  # type: ignore[attr-defined]
            self.url = f"{start}localhost:{self._port.getHost().port}/{database}"
        else:
            self._port = reactor.listenUNIX(str(Path(self._folder, SOCKET)), factory)  # type: ignore[attr-defined]
            self.url = f"{start}/{database}?host={quote(self._folder, safe='')}"

    def _made(self) -> _Half:
        half = _Half(self)
        dialled = UNIXClientEndpoint(reactor, self._target).connect(Factory.forProtocol(lambda: _Half(self)))
        dialled.addCallbacks(half.join, lambda failure: half.transport and half.transport.loseConnection())
        return half

    def freeze(self) -> None:
        """Let nothing through any more, in silence."""
        self.frozen = True
        for half in self.halves:
            half.transport.pauseProducing()  # type: ignore[union-attr]

    def thaw(self) -> None:
        """Let everything through again."""
        self.frozen = False
        for half in self.halves:
            half.transport.resumeProducing()  # type: ignore[union-attr]

    def cut(self) -> None:
        """End every connection at once."""
        for half in list(self.halves):
            half.transport.abortConnection()  # type: ignore[union-attr]

    async def close(self) -> None:
        """Stop listening, end everything."""
        self.cut()
        await _maybe(self._port.stopListening())
        shutil.rmtree(self._folder, ignore_errors=True)


async def _maybe(result: Any) -> None:
    if result is not None:
        await result
