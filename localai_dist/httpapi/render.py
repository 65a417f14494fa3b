"""Answers onto the wire: JSON bodies and the error envelope."""

from __future__ import annotations

import msgspec
from twisted.web.server import Request

from localai_dist.httpapi.call import Answer, Call, Empty, Json, Streamed, Text
from localai_dist.httpapi.errors import ApiError
from localai_dist.net.answers import json_error


def send(call: Call, answer: Answer) -> None:
    """Write and finish ``answer``."""
    request = call.request
    match answer:
        case Streamed():
            return
        case Empty(status):
            request.setResponseCode(status)
        case Json(value, status, headers):
            request.setResponseCode(status)
            for name, text in headers.items():
                request.setHeader(name, text)
            _write(request, msgspec.json.encode(value))
        case Text(value, content_type):
            _write(request, value.encode("utf-8"), content_type)
    request.finish()


def send_error(call: Call, error: ApiError) -> None:
    """Tell the client ``error``: as the answer, or inside the stream that has begun."""
    if call.events is not None:
        if call.events.is_open:
            call.events.fail(error.body())
            return
        call.events.stop()
    write_error(call, error)
    call.request.finish()


def write_error(call: Call, error: ApiError) -> None:
    """The answer that is ``error``, not finished yet."""
    request = call.request
    body = json_error(
        request,
        error.status,
        error.code,
        error.message,
        error.type,
        param=error.param,
        retry_after=error.retry_after,
        headers=error.headers.items(),
    )
    _write(request, msgspec.json.encode(error.body()) if error.extra else body)


def _write(request: Request, body: bytes, content_type: str = "application/json") -> None:
    request.setHeader("content-type", content_type)
    request.setHeader("content-length", str(len(body)))
    request.write(body)
