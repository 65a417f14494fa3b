"""The JSON error envelope every HTTP answer of ours uses."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

from localai_dist.net.head import header

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def request_id(request: Any) -> str:
    """
    The id of ``request``: its own ``X-Request-ID`` or ``X-Correlation-ID``, else a fresh one; the same every time.

    Setting it also sets the answer's ``x-request-id`` (and echoes ``X-Correlation-ID``).
    """
    known: str | None = getattr(request, "_localai_request_id", None)
    if known is not None:
        return known
    given = [header(request, name) for name in ("x-request-id", "x-correlation-id")]
    chosen = next((value for value in given if value and _REQUEST_ID.fullmatch(value)), None) or uuid.uuid4().hex
    request._localai_request_id = chosen
    request.setHeader("x-request-id", chosen)
    if given[1] and _REQUEST_ID.fullmatch(given[1]):
        request.setHeader("x-correlation-id", given[1])
    return chosen


def json_error(
    request: Any,
    status: int,
    code: str,
    message: str,
    type_: str,
    *,
    param: str | None = None,
    retry_after: int | None = None,
    headers: Iterable[tuple[str, str]] = (),
) -> bytes:
    """
    Set status and headers of an error answer and return its body, to be returned from ``render`` or written.

    Args:
        code: the envelope's ``code``, such as ``model_not_found``.
        type_: the envelope's ``type``, such as ``invalid_request_error``.
        param: the field of the request that is wrong.
        retry_after: seconds for ``Retry-After``.
        headers: more headers.

    Source: design §8.
    """
    request_id(request)
    body = msgspec.json.encode({"error": {"message": message, "type": type_, "code": code, "param": param}})
    request.setResponseCode(status)
    request.setHeader("content-type", "application/json")
    request.setHeader("content-length", str(len(body)))
    if retry_after is not None:
        request.setHeader("retry-after", str(retry_after))
    for name, value in headers:
        request.setHeader(name, value)
    return body
