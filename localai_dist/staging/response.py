"""Small answers read whole: the file server's bodies are one line of JSON or an error's text."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone
from twisted.web.http import PotentialDataLoss
from twisted.web.iweb import IResponse

LIMIT: int = 64 * 1024
"""Bytes of an answer that are kept; what comes after is read and dropped."""


class _Collect(Protocol):
    def __init__(self, done: Deferred[bytes]) -> None:
        self._done = done
        self._kept = bytearray()

    def dataReceived(self, data: bytes) -> None:
        self._kept += data[: LIMIT - len(self._kept)]

    def give_up(self) -> None:
        if self.transport is not None:
            self.transport.loseConnection()

    def connectionLost(self, reason: Failure | None = None) -> None:
        if reason is None or reason.check(ResponseDone, PotentialDataLoss):
            self._done.callback(bytes(self._kept))
        else:
            self._done.errback(reason)


async def read_text(response: IResponse) -> str:
    """The body of ``response`` as one line of text, at most ``LIMIT`` bytes of it."""
    if response.length == 0:
        return ""
    done: Deferred[bytes] = Deferred(lambda _: collect.give_up())
    collect = _Collect(done)
    response.deliverBody(collect)
    return " ".join((await done).decode("utf-8", "replace").split())


def header_values(response: IResponse) -> dict[str, str]:
    """The headers by lower-case name; of repeated ones the last."""
    found = response.headers.getAllRawHeaders()
    return {name.decode("latin-1").lower(): values[-1].decode("latin-1") for name, values in found if values}
