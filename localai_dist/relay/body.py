"""Bounded bodies of HTTP exchanges with a worker: bytes out, the whole body in, or line by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IConsumer
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone
from twisted.web.iweb import IBodyProducer, IResponse
from zope.interface import implementer

from localai_dist.errors import LocalAIDistError


class BodyTooLarge(LocalAIDistError):
    """The worker's answer is larger than anything it should say."""


class BodyBroken(LocalAIDistError):
    """The connection ended before the body did."""


@implementer(IBodyProducer)
class BytesBody:
    """A request body that is in memory already."""

    def __init__(self, body: bytes) -> None:
        self._body: Final = body
        self.length = len(body)

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        """Write it all: it is small."""
        consumer.write(self._body)
        return succeed(None)

    def pauseProducing(self) -> None:
        """There is nothing left to pause."""

    def resumeProducing(self) -> None:
        """There is nothing left to resume."""

    def stopProducing(self) -> None:
        """There is nothing left to stop."""


class _Lines(Protocol):
    """Cuts a body into lines of at most ``limit`` bytes; ``take`` says whether it has heard enough."""

    transport: Any

    def __init__(self, limit: int, take: Callable[[bytes], bool]) -> None:
        self._limit = limit
        self._take = take
        self._rest = bytearray()
        self.done: Deferred[None] = Deferred(lambda _: self._leave())
        self._over = False

    def dataReceived(self, data: bytes) -> None:
        """Take every whole line."""
        if self._over:
            return
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        for line in lines:
            if len(line) > self._limit:
                self._end(BodyTooLarge(f"a line of more than {self._limit} bytes"))
                return
            if line.strip() and self._took(bytes(line)):
                return
        if len(self._rest) > self._limit:
            self._end(BodyTooLarge(f"a line of more than {self._limit} bytes"))

    def connectionLost(self, reason: Failure | None = None) -> None:
        """The body ended: a last line may lack its newline."""
        if self._over:
            return
        if reason is None or reason.check(ResponseDone) is None:
            self._end(BodyBroken(f"the answer broke off: {reason.getErrorMessage() if reason else 'no reason'}"))
        elif not (self._rest.strip() and self._took(bytes(self._rest))):
            self._end(None)

    def _took(self, line: bytes) -> bool:
        try:
            enough = self._take(line)
        except LocalAIDistError as error:
            self._end(error)
            return True
        if enough:
            self._end(None)
        return enough

    def _end(self, error: LocalAIDistError | None) -> None:
        self._leave()
        if error is None:
            self.done.callback(None)
        else:
            self.done.errback(error)

    def _leave(self) -> None:
        self._over = True
        self._rest.clear()
        if self.transport is not None:
            self.transport.loseConnection()


class _Whole(Protocol):
    """Collects a body of at most ``limit`` bytes; ``cut`` takes the beginning of a longer one instead of failing."""

    transport: Any

    def __init__(self, limit: int, cut: bool) -> None:
        self._limit = limit
        self._cut = cut
        self._body = bytearray()
        self._over = False
        self.done: Deferred[bytes] = Deferred(lambda _: self._leave())

    def dataReceived(self, data: bytes) -> None:
        """Keep it, up to the limit."""
        if self._over:
            return
        self._body += data
        if len(self._body) <= self._limit:
            return
        self._leave()
        if self._cut:
            self.done.callback(bytes(self._body[: self._limit]))
        else:
            self.done.errback(BodyTooLarge(f"an answer of more than {self._limit} bytes"))

    def connectionLost(self, reason: Failure | None = None) -> None:
        """Hand it over."""
        if self._over:
            return
        self._over = True
        if self._cut or (reason is not None and reason.check(ResponseDone) is not None):
            self.done.callback(bytes(self._body))
        else:
            self.done.errback(BodyBroken(f"the answer broke off: {reason.getErrorMessage() if reason else ''}"))

    def _leave(self) -> None:
        self._over = True
        if self.transport is not None:
            self.transport.loseConnection()


def read_body(response: IResponse, limit: int) -> Deferred[bytes]:
    """
    The whole body, at most ``limit`` bytes of it; cancelling drops the connection.

    The Deferred fails with ``BodyTooLarge`` or ``BodyBroken``.
    """
    whole = _Whole(limit, cut=False)
    response.deliverBody(whole)
    return whole.done


def read_beginning(response: IResponse, limit: int) -> Deferred[bytes]:
    """The first ``limit`` bytes of the body, or all of it, however it ends; never fails."""
    whole = _Whole(limit, cut=True)
    response.deliverBody(whole)
    return whole.done


def read_lines(response: IResponse, limit: int, take: Callable[[bytes], bool]) -> Deferred[None]:
    """
    Give each line to ``take`` until it answers True or the body ends; cancelling drops the connection.

    The Deferred fails with ``BodyTooLarge``, ``BodyBroken``, or what ``take`` raises of ours.
    """
    lines = _Lines(limit, take)
    response.deliverBody(lines)
    return lines.done
