"""What the head of an HTTP request says, as text: its header lines, and the arguments of its query."""

from __future__ import annotations

from typing import Any


def header(request: Any, name: str) -> str | None:
    """
    The request header ``name``; None if there is none.

    Lines of one name are one list, in their order, as whatever is between sender and us may make one line of them. So
    what has one meaning has none any more when it is sent twice (two credentials are a wrong one), and nobody shows one
    line to who checks first and another to us. Bytes that are no UTF-8 are kept as surrogates: two secrets stay two.

    Source: RFC 9110 §5.2, §5.3.
    """
    lines = request.requestHeaders.getRawHeaders(name.encode("ascii"))  # as bytes: asked for as text it may raise
    return b", ".join(lines).decode("utf-8", "surrogateescape") if lines else None


def query(request: Any, name: str) -> str | None:
    """The first argument ``name`` of the query; None if there is none."""
    values = (request.args or {}).get(name.encode("ascii"))
    return values[0].decode("utf-8", "replace") if values else None
