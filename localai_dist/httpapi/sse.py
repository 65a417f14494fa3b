"""An event stream to one client: it waits for a slow reader, and says something every ten seconds."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IPushProducer, IReactorTime
from twisted.web.server import Request
from zope.interface import implementer

QUIET = 10.0
"""Silence after which a comment is sent, and after which a stream that has nothing to say yet is opened (s)."""

DONE = b"data: [DONE]\n\n"
_COMMENT = b": waiting\n\n"


@implementer(IPushProducer)
class EventStream:
    """
    Server-sent events on ``request``.

    Nothing is sent before the first event, so that a failure before it still has an HTTP status, but never longer
    than ``QUIET``: then the stream opens with a comment. A client that does not read makes ``send`` wait, with at
    most one event beyond the transport's own buffer (64 KiB).
    """

    def __init__(self, request: Request, *, clock: IReactorTime, headers: Mapping[str, str]) -> None:
        self._request = request
        self._headers = headers
        self._paused = False
        self._resumed: Deferred[None] | None = None
        self._finished = False
        self.is_open = False
        self._clock = clock
        self._timer: IDelayedCall = clock.callLater(QUIET, self._quiet)

    async def send(self, value: object) -> None:
        """Send ``value`` as JSON; returns when the client has room for more. Cancelling it stops the waiting only."""
        self._write(b"data: " + msgspec.json.encode(value) + b"\n\n")
        if self._paused:
            self._resumed = Deferred()
            try:
                await self._resumed
            finally:
                self._resumed = None

    def done(self) -> None:
        """End the stream the way OpenAI ends it."""
        self._write(DONE)
        self._finish()

    def fail(self, value: object) -> None:
        """End a stream that has begun with an error frame, no ``[DONE]``, and close the connection."""
        self._write(b"data: " + msgspec.json.encode(value) + b"\n\n")
        self._request.channel.persistent = False  # closed once the frame is out: nobody takes this for a whole answer
        self._finish()

    def stop(self) -> None:
        """Forget the client: it is gone, or the answer goes another way."""
        if self._timer.active():
            self._timer.cancel()

    def pauseProducing(self) -> None:
        """The client does not keep up."""
        self._paused = True

    def resumeProducing(self) -> None:
        """The client has room again."""
        self._paused = False
        if self._resumed is not None and not self._resumed.called:
            self._resumed.callback(None)

    def stopProducing(self) -> None:
        """The connection is gone; whoever runs the request is told on its own way."""
        self.stop()

    def _open(self) -> None:
        self.is_open = True
        request = self._request
        request.setResponseCode(200)
        for name, value in self._headers.items():
            request.setHeader(name, value)
        request.setHeader("content-type", "text/event-stream; charset=utf-8")
        request.setHeader("cache-control", "no-cache")
        request.setHeader("x-accel-buffering", "no")
        request.registerProducer(self, True)

    def _write(self, frame: bytes) -> None:
        if not self.is_open:
            self._open()
        if self._timer.active():
            self._timer.reset(QUIET)
        self._request.write(frame)

    def _quiet(self) -> None:
        self._timer = self._clock.callLater(QUIET, self._quiet)
        if not self._paused:
            self._write(_COMMENT)

    def _finish(self) -> None:
        self.stop()
        if not self._finished:
            self._finished = True
            self._request.unregisterProducer()
            self._request.finish()
