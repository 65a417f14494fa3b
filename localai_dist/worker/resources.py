"""What every resource of the worker's server shares: the bearer check, and an answer that is a coroutine."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionClosed
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from localai_dist.net.answers import json_error
from localai_dist.net.head import header
from localai_dist.net.request import StreamingRequest
from localai_dist.wire.credentials import AUTHORIZATION, bearer, same_secret
from localai_dist.worker.errors import is_disk_full

_log = Logger()


class GuardedResource(Resource):
    """
    A leaf that only whoever has the registration token may use; an empty configured token admits nobody.

    Args:
        token: the registration token.
    """

    isLeaf = True

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def render(self, request: Any) -> Any:
        """Check the token, then as any resource."""
        if not same_secret(bearer(header(request, AUTHORIZATION)), self._token):
            headers = [("www-authenticate", "Bearer")]
            text = "this worker wants the registration token as bearer"
            return json_error(request, 401, "invalid_token", text, "invalid_request_error", headers=headers)
        return self.answer(request)

    def answer(self, request: StreamingRequest) -> Any:
        """The answer to an authenticated request, as ``render`` gives it."""
        raise NotImplementedError

    def not_allowed(self, request: StreamingRequest, allowed: str) -> bytes:
        """405."""
        return refusal(request, 405, f"only {allowed} here", headers=[("allow", allowed)])


def refusal(
    request: StreamingRequest, status: int, text: str, *, headers: list[tuple[str, str]] | None = None
) -> bytes:
    """An error's body, with status and headers set."""
    code = {404: "not_found", 405: "method_not_allowed", 409: "conflict"}.get(status, "invalid_request")
    type_ = "server_error" if status >= 500 else "invalid_request_error"
    return json_error(request, status, code, text, type_, headers=headers or [])


def respond(request: StreamingRequest, work: Coroutine[Any, Any, bytes], *, cancel_when_gone: bool = False) -> int:
    """
    Answer ``request`` with what ``work`` returns; for a resource's ``render``.

    Args:
        request: finished afterwards, unless the client is gone.
        work: sets status and headers, and returns the body (or what is left of it).
        cancel_when_gone: cancel it when the client leaves; else it goes on and its answer is dropped.
    """
    working = Deferred.fromCoroutine(work)
    gone = request.when_gone()

    def client_left(_none: None) -> None:
        if cancel_when_gone:
            working.cancel()

    gone.addCallback(client_left)

    def done(body: bytes) -> None:
        if request.gone:
            return
        if not request.startedWriting:
            request.setHeader("content-length", str(len(body)))
        request.write(body)
        request.finish()

    def failed(failure: Failure) -> None:
        _tell(request, failure)
        if request.startedWriting and not request.gone:
            request.loseConnection()
        if request.gone or request.startedWriting:
            return
        status = 507 if is_disk_full(failure.value) else 500
        done(json_error(request, status, "worker_error", _words(failure), "server_error"))

    working.addCallbacks(done, failed)
    working.addErrback(lambda failure: _log.failure("an answer could not be sent", failure))
    return NOT_DONE_YET


def _tell(request: StreamingRequest, failure: Failure) -> None:
    """Into the log: a client that left and a full disk in a line, what is our fault with its traceback."""
    method, path = request.method.decode("latin-1"), request.path.decode("latin-1")
    if request.gone and failure.check(CancelledError, ConnectionClosed):
        _log.info("the client of {method} {path} left: {why}", method=method, path=path, why=_words(failure))
    elif is_disk_full(failure.value):
        _log.error("{path} was not taken: {why}", path=path, why=_words(failure))
    else:
        _log.failure("answering {method} {path} failed", failure, method=method, path=path)


def rest_of_path(request: StreamingRequest, errors: str = "replace") -> str:
    """What of the path is below the resource, unquoted, as text."""
    return b"/".join(request.postpath or []).decode("utf-8", errors)


def _words(failure: Failure) -> str:
    return str(failure.value) or failure.value.__class__.__name__
