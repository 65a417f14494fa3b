"""
twisted.web with streamed request bodies.

twisted.web spools a body to disk and renders at its end. Here a resource that says ``streams_body = True`` (or has a
method ``streams_body_for(request)`` that says so) is rendered once the headers are in, and reads ``request.body``.
Everybody else gets the whole body in ``request.content``, at most ``site.max_body`` bytes: more is answered 413 before
it is read.

This leans on private names of ``HTTPChannel`` (``_command _path _version _networkProducer _savedTimeOut``) and
``_UnsafeNoResource``;
``tests/net/test_request.py`` pins them.
"""

from __future__ import annotations

import io
import re
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.python.failure import Failure
from twisted.web import http, server
from twisted.web.error import UnsupportedMethod
from twisted.web.resource import IResource, Resource, _UnsafeNoResource, getChildForRequest
from twisted.web.server import NOT_DONE_YET

from localai_dist.net.answers import json_error, request_id
from localai_dist.net.body import RequestBody, empty_body
from localai_dist.units import MiB

STALL: Final = 60.0
"""A client that is read from and sends nothing of a body for this long (s) is dropped."""

DISCARD_MAX: Final = 4 * MiB
"""How much of a refused body is read and dropped so that the client sees the answer and not a reset."""

DISCARD_TIME: Final = 5.0

_ABSOLUTE: Final = re.compile(rb"https?://(?:[^/?#]*@)?([^/?#@]+)", re.IGNORECASE)


class StreamingRequest(server.Request):
    """
    A request whose resource may read the body as it arrives.

    Attributes:
        body: the reader, for resources that stream; ended and empty when there is no body.
    """

    body: RequestBody
    site: StreamingSite

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.channel: Any  # an HTTPChannel until the request is done, its private names included
        self.body = empty_body()
        self._streaming = False
        self._refused = False
        self._taken = 0
        self._gone = False
        self._watchers: list[Deferred[None]] = []
        self._timer: IDelayedCall | None = None
        self._idle_timeout: float | None = None

    @property
    def gone(self) -> bool:
        """Whether the client left before the answer was finished."""
        return self._gone

    def when_gone(self) -> Deferred[None]:
        """A Deferred of its own for each call, fired when the client left before the answer was finished."""
        watcher: Deferred[None] = Deferred(self._forget_watcher)
        if self._gone:
            watcher.callback(None)
        elif not self.finished:
            self._watchers.append(watcher)
        return watcher

    def _forget_watcher(self, watcher: Deferred[None]) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    # -- called by twisted.web ----------------------------------------

    def gotLength(self, length: int | None) -> None:
        """The headers are complete; ``length`` is None for a chunked body."""
        self._read_head()
        if length != 0 and self._wants_stream():
            self._start_stream()
        elif length is not None and length > self.site.max_body:
            self._refuse()
        else:
            super().gotLength(length)

    def handleContentChunk(self, data: bytes) -> None:
        """Bytes of the body arrived."""
        self._taken += len(data)
        if self._streaming:
            if not self.finished and not self._gone:
                self.body.arrived(data)
        elif self._refused:
            if self._taken > DISCARD_MAX:
                self._drop()
        elif self._taken > self.site.max_body:
            self._refuse()
        else:
            super().handleContentChunk(data)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """The body is complete."""
        if self._refused:
            self._stop_timer()
            self.finish()
        elif self._streaming:
            self._stop_timer()
            self.channel.__dict__.pop("resumeProducing", None)
            self.channel._savedTimeOut = self._idle_timeout
            self.body.end()
        else:
            super().requestReceived(command, self.uri, version)

    def finish(self) -> None:
        """End the answer; with the body unread the connection can't be used again."""
        self._watchers.clear()
        if self._streaming and not self.body.ended:
            self._stop_timer()
            channel = self.channel
            channel.persistent = False
            channel.__dict__.pop("resumeProducing", None)
            # The rest of the body must not be taken for the end of a request that is done.
            channel.allContentReceived = lambda: None
            self.body.lose(Failure(ConnectionError("the answer was finished before the body was read")))
        super().finish()

    def connectionLost(self, reason: Failure) -> None:
        """The client left."""
        self._gone = True
        self._stop_timer()
        self.body.lose(reason)
        super().connectionLost(reason)
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.callback(None)

    def render(self, resrc: Any) -> None:
        """As twisted.web's, but every error is JSON, and a HEAD is answered without a body and without a log line."""
        try:
            body = self._not_found() if _is_nothing(resrc) else resrc.render(self)
        except UnsupportedMethod as error:
            body = self._not_allowed(b", ".join(error.allowedMethods).decode("ascii"))
        if body is NOT_DONE_YET:
            return
        self.setHeader(b"content-length", b"%d" % len(body))
        self.write(b"" if self.method == b"HEAD" else body)
        self.finish()

    def processingFailed(self, reason: Failure) -> Failure:
        """A resource broke: told in the log, and to the client, if it has not been told anything else yet."""
        self._log.failure("answering a request failed by a fault of this program", reason)
        if not self._gone and not self.finished:
            if self.startedWriting:
                self.loseConnection()
            else:
                self.write(json_error(self, 500, "internal_error", "internal error", "server_error"))
                self.finish()
        return reason

    def _not_found(self) -> bytes:
        return json_error(self, 404, "not_found", "there is nothing here", "invalid_request_error")

    def _not_allowed(self, allowed: str) -> bytes:
        text = f"only {allowed} here"
        headers = [("allow", allowed)]
        return json_error(self, 405, "method_not_allowed", text, "invalid_request_error", headers=headers)

    # -- streaming ------------------------------------------------------------

    def _read_head(self) -> None:
        channel = self.channel
        self.site = channel.site
        self.method, self.uri, self.clientproto = channel._command, self._origin_form(channel._path), channel._version
        self.path, _, query = self.uri.partition(b"?")
        self.args = http.parse_qs(query, True) if query else {}
        request_id(self)

    def _origin_form(self, target: bytes) -> bytes:
        """Path and query of an absolute target, as one sends to a proxy; its host is the ``Host`` (RFC 9112, 3.2.2)."""
        absolute = _ABSOLUTE.match(target)
        if absolute is None:
            return target
        self.requestHeaders.setRawHeaders(b"host", [absolute[1]])
        rest = target[absolute.end() :]
        return rest if rest.startswith(b"/") else b"/" + rest

    def _wants_stream(self) -> bool:
        resource = self._find_resource()
        decide = getattr(resource, "streams_body_for", None)
        if decide is not None:
            return bool(decide(self))
        return bool(getattr(resource, "streams_body", False))

    def _find_resource(self) -> IResource | None:
        self.prepath = []
        self.postpath = [unquote_to_bytes(part) for part in self.path[1:].split(b"/")]
        self.sitepath: list[bytes] = []
        found: IResource = getChildForRequest(self.site.resource, self)
        return found

    def _start_stream(self) -> None:
        channel = self.channel
        self._streaming = True
        self.content = io.BytesIO()
        self._idle_timeout = channel.setTimeout(None)
        self.body = RequestBody(channel._networkProducer.pauseProducing, self._resume_reading)
        self._watch_stall()
        self._keep_pause(channel)
        self.process()

    def _keep_pause(self, channel: Any) -> None:
        """The channel resumes reading whenever the answer drains; while the body is paused it must not."""
        resume = channel.resumeProducing

        def resume_unless_paused() -> None:
            resume()
            if self.body.paused:
                channel._networkProducer.pauseProducing()

        channel.resumeProducing = resume_unless_paused

    def _resume_reading(self) -> None:
        if not self._gone and self.channel is not None:
            self.channel._networkProducer.resumeProducing()

    def _watch_stall(self) -> None:
        seen = -1

        def look() -> None:
            nonlocal seen
            if self.body.received == seen and not self.body.paused:
                self.channel.transport.abortConnection()
                return
            seen = self.body.received
            self._timer = self.site.reactor.callLater(STALL, look)

        look()

    # -- refusing ------------------------------------------------------------

    def _refuse(self) -> None:
        """Answer 413 now; read and drop a little of the body so that the client gets to see it."""
        self._refused = True
        if self.content is not None:
            self.content.close()  # a chunked body turned out too long: its half-filled spool file
        self.content = io.BytesIO()
        self.channel.persistent = False
        self.requestHeaders.removeHeader("expect")  # the client must not be told to go on
        self.setHeader("connection", "close")
        limit = self.site.max_body
        self.write(
            json_error(self, 413, "request_too_large", f"the body is over {limit} bytes", "invalid_request_error")
        )
        self._timer = self.site.reactor.callLater(DISCARD_TIME, self._drop)

    def _drop(self) -> None:
        self._stop_timer()
        if self.channel is not None:
            self.channel.transport.abortConnection()

    def _stop_timer(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None


def _is_nothing(resource: Any) -> bool:
    """Whether a path led nowhere: to twisted.web's own page that says so, or to a node of the tree without a page."""
    return type(resource) in (Resource, _UnsafeNoResource)


class StreamingSite(server.Site):
    """
    A site whose resources may stream request bodies.

    Attributes:
        max_body: the longest body of a resource that does not stream (bytes).
    """

    requestFactory = StreamingRequest

    def __init__(self, root: IResource, *, max_body: int, reactor: Any, timeout: float | None = 60.0) -> None:
        super().__init__(root, reactor=reactor, timeout=timeout, parsePOSTFormSubmission=False)
        self.max_body = max_body
        self.noisy = False

    def log(self, request: Any) -> None:
        """No access log: what matters is logged where it happens, without secrets."""


__all__ = ["RequestBody", "StreamingRequest", "StreamingSite", "json_error", "request_id"]
