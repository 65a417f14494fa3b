"""
The control verbs over HTTP: POST, JSON in, JSON or newline-delimited JSON out; an unknown verb is 404.

Source: wire contract §6.
"""

from __future__ import annotations

from typing import Any

import msgspec
from twisted.logger import Logger

from localai_dist.errors import LocalAIDistError
from localai_dist.net.request import StreamingRequest
from localai_dist.wire.verbs import (
    CONTROL_PREFIX,
    MAX_BODY_BYTES,
    Empty,
    InstallProgress,
    InvalidBody,
    StreamLine,
    Verb,
    VerbKind,
    progress_line,
    unknown_verb_text,
)
from localai_dist.worker.resources import GuardedResource, refusal, respond, rest_of_path
from localai_dist.worker.verbs import VerbTable


class ControlResource(GuardedResource):
    """
    ``/v1/control/…``

    Args:
        token: the registration token.
        verbs: what is served; an empty table answers every verb 404 (an agent worker, for now).
    """

    _log = Logger()

    def __init__(self, token: str, verbs: VerbTable) -> None:
        super().__init__(token)
        self._verbs = verbs
        self._by_path = {verb.path: verb for verb in verbs}

    def answer(self, request: StreamingRequest) -> Any:
        """One verb."""
        path = CONTROL_PREFIX + rest_of_path(request)
        verb = self._by_path.get(path)
        if verb is None:
            return refusal(request, 404, unknown_verb_text(path))
        if request.method != b"POST":
            return self.not_allowed(request, "POST")
        body = b"" if request.content is None else request.content.read(MAX_BODY_BYTES + 1)
        if len(body) > MAX_BODY_BYTES:
            return refusal(request, 400, f"the body is over {MAX_BODY_BYTES} bytes")
        try:
            asked = verb.decode_request(body)
        except InvalidBody as error:
            return refusal(request, 400, str(error))
        return respond(request, self._serve(request, verb, asked), cancel_when_gone=not verb.survives_caller)

    async def _serve(self, request: StreamingRequest, verb: Verb[Any, Any], asked: Any) -> bytes:
        left = False

        def client_left(_none: None) -> None:
            nonlocal left
            left = True

        request.when_gone().addCallback(client_left)

        def tell(progress: InstallProgress) -> None:
            if verb.kind is VerbKind.STREAM and not left:
                request.write(verb.encode_line(progress_line(progress)))

        if verb.kind is VerbKind.STREAM:
            request.setHeader("content-type", "application/x-ndjson")
            request.setHeader("x-content-type-options", "nosniff")
        reply = await self._outcome(verb, asked, tell)
        if verb.kind is VerbKind.STREAM:
            return verb.encode_line(StreamLine(reply=reply))
        if verb.kind is VerbKind.SILENT:
            request.setResponseCode(204)
            return b""
        request.setHeader("content-type", "application/json")
        return verb.encode_reply(reply)

    async def _outcome(self, verb: Verb[Any, Any], asked: Any, tell: Any) -> Any:
        """The verb's answer; its own failure is one too."""
        try:
            return await self._verbs[verb](asked, tell)
        except (LocalAIDistError, OSError) as error:
            self._log.warn("{verb} failed: {error}", verb=verb.path, error=error)
            return failure_reply(verb, str(error))


def failure_reply(verb: Verb[Any, Any], text: str) -> Any:
    """The answer of ``verb`` that says it failed, and why."""
    if verb.reply is Empty:
        return Empty()
    reported = {"success": False, "error": text, "reports_stopped_processes": True}
    return msgspec.convert(reported, verb.reply)
