"""
A JSON schema -> a grammar (pure): every text it matches is valid against the schema.

Properties come in the schema's order, with one blank at most between two words, and none that the schema does not
list. A keyword that restricts, and that no rule here keeps to, is refused: an answer that only looks checked is worse
than none.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Final, TypeAlias

from localai_dist.errors import LocalAIDistError
from localai_dist.serving.grammar import FORMATS, literal, text_of, times
from localai_dist.units import KiB

Schema: TypeAlias = object

MOST: Final = 1000
"""Repetitions one rule may ask for; engines refuse a few thousand."""

BOUNDS: Final = {
    "properties": 1000,
    "values": 1000,
    "options": 1000,
    "places": 1000,
    "repetitions": 20_000,
    "bytes of grammar": 64 * KiB,
}
"""
Of one schema in all, whatever is made twice counted twice: the grammar is made while nobody else is served, and an
engine writes out every repetition.
"""

MOST_OPTIONAL: Final = 256
"""Properties of one object that may be absent: an engine looks at each of them for every token."""

MOST_WAYS: Final = 2000
"""Ways to begin one rule, counted through others: an engine follows each of them."""

MOST_AT_ONCE: Final = 10_000
"""Objects and lists one rule may be, times the ways to begin any: inside, an engine follows those of all of them."""

_HALF: Final = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair: no text that can be sent holds it."""

_NOTES: Final = frozenset(
    (
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "nullable",
        "discriminator",
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
    )
)
"""Keywords that restrict nothing, or stand for others to point at."""


class UnservedSchema(LocalAIDistError):
    """
    A schema that can't be kept to.

    Attributes:
        path: where, like ``.properties.age``.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def grammar_for(schema: Mapping[str, object]) -> str:
    """
    The grammar of the texts that are valid against ``schema``.

    Raises:
        UnservedSchema: it is no schema, or holds a keyword that can't be kept to.
    """
    rules = _Rules(schema)
    try:
        root = rules.of(schema, "")
    except RecursionError as error:
        raise UnservedSchema("", "nested too deeply") from error
    _check_ways(rules)
    return text_of(root, rules.made)


def _check_ways(rules: _Rules) -> None:
    """
    Refuse rules that an engine does not come to an end with; each is looked at once.

    Those are rules that come back to themselves without a single character, and those with too many ways to begin.
    """
    bare = {name: body.split(" | ") for name, body in rules.made.items() if '"' not in body and "(" not in body}
    ways, inner = {"value": 6, **rules.ways}, {"value": 1, "object": 1, "array": 1}
    inner |= {name: int(body.startswith(('"{" ', '"[" '))) for name, body in rules.made.items()}
    try:
        for name in TopologicalSorter(bare).static_order():
            if name in bare:
                ways[name] = sum([ways.get(other, 1) for other in bare[name]])
                inner[name] = sum([inner.get(other, 0) for other in bare[name]])
            if ways.get(name, 1) > MOST_WAYS:
                raise UnservedSchema(rules.places[name], f"there are more than {MOST_WAYS} ways to begin it")
    except CycleError as error:
        raise UnservedSchema("", "a $ref leads back to itself") from error
    most = max(inner, key=inner.__getitem__)
    if inner[most] > 1 and inner[most] * max(ways.values()) > MOST_AT_ONCE:
        reason = f"objects and lists it may be, times the most ways to begin a place, are more than {MOST_AT_ONCE}"
        raise UnservedSchema(rules.places[most], reason)


class _Rules:
    """The rules made so far, and the schema that ``$ref`` points into."""

    def __init__(self, whole: Mapping[str, object]) -> None:
        self._whole = whole
        self._pointed: dict[str, str] = {}
        self._taken: Counter[str] = Counter()
        self.made: dict[str, str] = {}
        self.ways: dict[str, int] = {}
        self.places: dict[str, str] = {}

    def of(self, schema: Schema, path: str) -> str:
        """The name of the rule of ``schema``."""
        if schema is True or schema == {}:
            return "value"
        if not isinstance(schema, dict):
            raise UnservedSchema(path, "want a JSON schema: an object")
        for keyword, make in _KEYWORDS.items():
            if keyword in schema:
                return make(self, schema, path)
        _only(schema, (), path)
        return "value"

    def take(self, what: str, number: int, path: str) -> None:
        """So many more of ``what``; refused if they are too many in all."""
        self._taken[what] += number
        if self._taken[what] > BOUNDS[what]:
            raise UnservedSchema(path, f"there are more than {BOUNDS[what]} {what} in all")

    def add(self, body: str, path: str, ways: int = 1) -> str:
        """The name of a new rule, and how many ways there are to begin it."""
        name = f"r{len(self.made)}"
        self.take("bytes of grammar", len(f"{name} ::= {body}\n".encode()), path)
        self.made[name], self.ways[name], self.places[name] = body, ways, path
        return name

    def bounds(self, schema: dict[str, object], low: str, high: str, path: str) -> tuple[int, int | None]:
        """How often something is there at least, and at most; counted among all repetitions."""
        least, most = _bound(schema, low, path) or 0, _bound(schema, high, path)
        if most is not None and least > most:
            raise UnservedSchema(f"{path}.{low}", f"is more than {high}")
        self.take("repetitions", most or least, path)
        return least, most

    def pointed(self, pointer: str, path: str) -> str:
        """The name of the rule of what ``pointer`` points at; it may point at what it is in."""
        if pointer not in self._pointed:
            self.take("places", 1, path)
            target, place = _target(self._whole, pointer, path), pointer.removeprefix("#").replace("/", ".")
            self._pointed[pointer] = name = self.add("", place)
            self.made[name] = self.of(target, place)
        return self._pointed[pointer]


_Make: TypeAlias = Callable[[_Rules, "dict[str, object]", str], str]


def _bound(schema: dict[str, object], name: str, path: str) -> int | None:
    value = schema.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MOST:
        raise UnservedSchema(f"{path}.{name}", f"want a number from 0 to {MOST}")
    return value


def _ref(rules: _Rules, schema: dict[str, object], path: str) -> str:
    _only(schema, ("$ref",), path)
    pointer = schema["$ref"]
    if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
        raise UnservedSchema(f"{path}.$ref", "only a place in this schema is followed: #, or #/ as in #/$defs/name")
    return rules.pointed(pointer, f"{path}.$ref")


def _target(whole: Schema, pointer: str, path: str) -> Schema:
    found = whole
    for word in pointer.removeprefix("#").split("/")[1:]:
        word = word.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or word not in found:
            raise UnservedSchema(path, f"nothing is at {pointer}")
        found = found[word]
    return found


def _const(rules: _Rules, schema: dict[str, object], path: str) -> str:
    return _one_of(rules, schema, "const", [schema["const"]], path)


def _enum(rules: _Rules, schema: dict[str, object], path: str) -> str:
    values = schema["enum"]
    if not isinstance(values, list):
        raise UnservedSchema(f"{path}.enum", "want a list of values")
    return _one_of(rules, schema, "enum", values, path)


def _one_of(rules: _Rules, schema: dict[str, object], keyword: str, values: Sequence[object], path: str) -> str:
    """One of ``values``, as far as they are of the schema's type."""
    _only(schema, (keyword, "type"), path)
    kinds, place = _kinds(schema, path) if "type" in schema else tuple(_TYPES), f"{path}.{keyword}"
    rules.take("values", len(values), place)
    fitting = [value for value in values if any(_is(value, kind) for kind in kinds)]
    if not fitting:
        raise UnservedSchema(place, "there is no value it could be")
    try:
        return rules.add(" | ".join([literal(_compact(value)) for value in fitting]), place, len(fitting))
    except ValueError as error:
        raise UnservedSchema(place, "there is a number that JSON has no word for") from error


def _is(value: object, kind: str) -> bool:
    """Whether a JSON value is of a type; a bool is no number, and 1.0 is an integer."""
    if kind in ("integer", "number"):
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return not isinstance(value, bool) and (whole or (kind == "number" and isinstance(value, float)))
    python = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}[kind]
    return isinstance(value, python)


def _any_of(keyword: str) -> _Make:
    def make(rules: _Rules, schema: dict[str, object], path: str) -> str:
        _only(schema, (keyword,), path)
        options = schema[keyword]
        if not isinstance(options, list) or not options:
            raise UnservedSchema(f"{path}.{keyword}", "want a list of schemas")
        if keyword == "allOf" and len(options) > 1:
            raise UnservedSchema(f"{path}.allOf", "only one schema is served in it")
        rules.take("options", len(options), f"{path}.{keyword}")
        names = [rules.of(option, f"{path}.{keyword}[{index}]") for index, option in enumerate(options)]
        return rules.add(" | ".join(names), path)

    return make


def _typed(rules: _Rules, schema: dict[str, object], path: str) -> str:
    kinds = _kinds(schema, path)
    keywords = [keyword for one in kinds for keyword in _TYPES[one][0]]
    _only(schema, ("type", *keywords), path)
    names = [_TYPES[one][1](rules, schema, path) for one in kinds]
    return names[0] if len(names) == 1 else rules.add(" | ".join(names), path)


def _kinds(schema: dict[str, object], path: str) -> tuple[str, ...]:
    given = schema["type"]
    wanted = given if isinstance(given, list) else [given]
    kinds = {one: None for one in wanted[: len(_TYPES)] if isinstance(one, str) and one in _TYPES}
    if not kinds or len(wanted) > len(kinds):
        raise UnservedSchema(f"{path}.type", f"want {', '.join(_TYPES)}, or a list of them, each once")
    return tuple(kinds)


def _word(name: str) -> _Make:
    return lambda _rules, _schema, _path: name


def _string(rules: _Rules, schema: dict[str, object], path: str) -> str:
    least, most = rules.bounds(schema, "minLength", "maxLength", path)
    form = schema.get("format")
    if form is not None:
        if not isinstance(form, str) or form not in FORMATS:
            raise UnservedSchema(f"{path}.format", f"only {', '.join(FORMATS)} are kept to")
        if (least, most) != (0, None):
            raise UnservedSchema(f"{path}.format", "not together with minLength or maxLength")
        return rules.add(f'"\\"" {FORMATS[form]} "\\""', path)
    if (least, most) == (0, None):
        return "string"
    return rules.add(f'"\\"" char{times(least, most)} "\\""', path)


def _array(rules: _Rules, schema: dict[str, object], path: str) -> str:
    least, most = rules.bounds(schema, "minItems", "maxItems", path)
    item = rules.of(schema.get("items", True), f"{path}.items")
    if most == 0:
        return rules.add('"[" ws "]"', path)
    more = times(max(0, least - 1), None if most is None else most - 1)
    items = f'{item} (ws "," ws {item}){more}'
    return rules.add(f'"[" ws {items} ws "]"' if least else f'"[" ws ({items})? ws "]"', path)


def _object(rules: _Rules, schema: dict[str, object], path: str) -> str:
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, dict):
        raise UnservedSchema(f"{path}.properties", "want an object of schemas")
    rules.take("properties", len(properties), f"{path}.properties")
    needed = _needed(required, properties, path)
    if len(properties) - len(needed) > MOST_OPTIONAL:
        raise UnservedSchema(f"{path}.properties", f"more than {MOST_OPTIONAL} of one object are not required")
    pairs = [
        (f'{literal(_compact(name))} ws ":" ws {rules.of(one, f"{path}.properties.{name}")}', name in needed)
        for name, one in properties.items()
    ]
    if pairs:
        return _listed(rules, pairs, path)
    return _open(rules, schema.get("additionalProperties", True), path)


def _needed(required: object, properties: Mapping[str, object], path: str) -> set[str]:
    """The names of the properties that must be there."""
    names = required if isinstance(required, list) and len(required) <= len(properties) else [None]
    needed = {name for name in names if isinstance(name, str) and name in properties}
    if len(needed) < len(names):
        raise UnservedSchema(f"{path}.required", "want a list of names that are in properties, each once")
    return needed


def _open(rules: _Rules, others: Schema, path: str) -> str:
    """An object whose names are anybody's."""
    if others is False:
        return rules.add('"{" ws "}"', path)
    value = rules.of(others, f"{path}.additionalProperties")
    pair = f'string ws ":" ws {value}'
    return "object" if value == "value" else rules.add(f'"{{" ws ({pair} (ws "," ws {pair})*)? ws "}}"', path)


def _listed(rules: _Rules, pairs: Sequence[tuple[str, bool]], path: str) -> str:
    """
    An object of ``pairs``, each with whether it must be there.

    ``after`` is what may follow once a pair is there; where none is yet, each pair up to the first that must be there
    can be the first.
    """
    after, starts = "", [""]
    for pair, needed in reversed(pairs):
        start = f"{pair} {after}".strip()
        if needed:
            starts.clear()
        starts.append(start)
        tail = f'ws "," ws {pair} {after}'.strip() if needed else f'(ws "," ws {pair})? {after}'.strip()
        after = rules.add(tail, path)
    wanted = [start for start in reversed(starts) if start]
    first = rules.add(" | ".join(wanted), path, len(wanted))
    return rules.add(f'"{{" ws {first}{"?" if "" in starts else ""} ws "}}"', path)


def _only(schema: Mapping[str, object], known: Sequence[str], path: str) -> None:
    for keyword in schema:
        if keyword not in known and keyword not in _NOTES:
            raise UnservedSchema(f"{path}.{keyword}", "an answer can't be held to this here")


def _compact(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


_KEYWORDS: Final[dict[str, _Make]] = {
    "$ref": _ref,
    "const": _const,
    "enum": _enum,
    "anyOf": _any_of("anyOf"),
    "oneOf": _any_of("oneOf"),
    "allOf": _any_of("allOf"),
    "type": _typed,
}
"""What makes a schema what it is, the first that is there."""

_TYPES: Final[dict[str, tuple[tuple[str, ...], _Make]]] = {
    "object": (("properties", "required", "additionalProperties"), _object),
    "array": (("items", "minItems", "maxItems"), _array),
    "string": (("minLength", "maxLength", "format"), _string),
    "integer": ((), _word("integer")),
    "number": ((), _word("number")),
    "boolean": ((), _word("boolean")),
    "null": ((), _word("null")),
}
"""Each type's keywords, and what makes its rule."""
