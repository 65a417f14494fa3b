"""``response_format`` (pure): JSON, or JSON by a schema, as the grammar that a backend keeps to."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from localai_dist.httpapi.errors import bad_request
from localai_dist.httpapi.openai.tools import Identifier, check_depth, encoded
from localai_dist.serving.grammar import ANY_OBJECT
from localai_dist.serving.schemas import UnservedSchema, grammar_for
from localai_dist.units import KiB

MAX_SCHEMA = 128 * KiB
"""Of a schema, as JSON; its grammar is made while nobody else is served. OpenAI's bound is 120,000 characters."""

_TYPES = ("text", "json_object", "json_schema")


class JsonSchema(msgspec.Struct):
    """The schema of an answer; ``strict`` or not, it is kept to."""

    name: Identifier
    schema: Annotated[dict[str, object], Meta(min_length=1)]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """What the text of an answer must be."""

    type: str
    json_schema: JsonSchema | None = None


def grammar_of(wish: ResponseFormat) -> str:
    """
    The grammar of the answers ``wish`` allows; empty for any text.

    Raises:
        ApiError: 400; an unknown type, or a schema that no grammar can hold an answer to.
    """
    where = "response_format"
    if wish.type not in _TYPES:
        raise bad_request(f"{where}.type: want one of {', '.join(_TYPES)}", f"{where}.type")
    if wish.type == "text":
        return ""
    if wish.type == "json_object":
        return ANY_OBJECT
    where = f"{where}.json_schema"
    if wish.json_schema is None:
        raise bad_request(f"{where}: this field is required", where)
    check_depth(wish.json_schema.schema, f"{where}.schema")
    if len(encoded(wish.json_schema.schema, f"{where}.schema")) > MAX_SCHEMA:
        raise bad_request(f"{where}.schema: over {MAX_SCHEMA} bytes", f"{where}.schema")
    try:
        return grammar_for(wish.json_schema.schema)
    except UnservedSchema as error:
        where = f"{where}.schema{error.path}"
        raise bad_request(f"{where}: {error}", where) from error
