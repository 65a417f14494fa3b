"""A JSON body -> the typed request it should be, or the field that is at fault (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from localai_dist.httpapi.errors import ApiError, bad_request

T = TypeVar("T")

NO_NUL = r"^[^\x00]*$"
"""Pattern of text that PostgreSQL can hold."""

_PLACED = re.compile(r"(?P<what>.*) - at `(?:key in )?\$\.?(?P<path>[^`]*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")


def decode(body: bytes, kind: type[T]) -> T:
    """
    ``body`` as ``kind``; unknown fields are ignored, an empty body is an empty object.

    Raises:
        ApiError: 400; malformed JSON, or a known field of a wrong type or range, named in ``param``.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise _at_fault(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise bad_request("the body is nested too deeply") from error


def from_form(fields: Mapping[str, str | list[str]], kind: type[T]) -> T:
    """
    The fields of a form as ``kind``: numbers and switches are read from their text; unknown fields are ignored.

    Raises:
        ApiError: 400; a known field of a wrong type or range, named in ``param``.
    """
    try:
        return msgspec.convert(fields, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise _at_fault(error) from error


def _at_fault(error: msgspec.ValidationError) -> ApiError:
    what, param = explain(str(error))
    return bad_request(f"{param}: {what}" if param else what, param)


def explain(text: str) -> tuple[str, str | None]:
    """What msgspec found wrong, and the path of the field: ``messages[0].role``."""
    placed = _PLACED.fullmatch(text)
    what, path = (placed["what"], placed["path"]) if placed else (text, "")
    missing = _MISSING.fullmatch(what)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
        what = "this field is required"
    return what.replace("`", ""), path or None
