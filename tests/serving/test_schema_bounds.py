"""What a JSON schema may cost: bounds on its grammar, on the work it makes, and on the engine's."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.serving.schemas import (
    BOUNDS,
    MOST,
    MOST_AT_ONCE,
    MOST_OPTIONAL,
    MOST_WAYS,
    UnservedSchema,
    grammar_for,
)


def chain(number: int) -> dict[str, Any]:
    """Places that each are the next one, all pointed at from the last to the first: nothing is deep."""
    places: dict[str, Any] = {f"a{index}": {"$ref": f"#/$defs/a{index + 1}"} for index in range(number)}
    places[f"a{number}"] = {"type": "integer"}
    return {"$defs": places, "anyOf": [{"$ref": f"#/$defs/a{index}"} for index in range(number, -1, -1)]}


def doubled(number: int) -> dict[str, Any]:
    """Places that each are one of twice the next one: the ways to begin are 2 ** number."""
    places: dict[str, Any] = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(number)}
    places[f"a{number}"] = {"type": "integer"}
    return {"$defs": places, "$ref": "#/$defs/a0"}


def listed(number: int, needed: bool) -> dict[str, Any]:
    """An object of so many properties."""
    names = [f"p{index}" for index in range(number)]
    return {
        "type": "object",
        "properties": {name: {"type": "null"} for name in names},
        "required": names if needed else [],
    }


def calls(schema: dict[str, Any]) -> int:
    """How many calls, and steps of generators, making the grammar takes."""
    count = 0

    def called(_frame: FrameType, event: str, _it: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        grammar_for(schema)
    finally:
        sys.setprofile(before)
    return count


class BoundTests(SynchronousTestCase):
    def refused(self, schema: dict[str, Any], path: str, words: str) -> None:
        error = self.assertRaises(UnservedSchema, grammar_for, schema)
        self.assertEqual(error.path, path)
        self.assertIn(words, str(error))

    def test_work_grows_with_the_schema(self) -> None:
        """
        Twice as long a chain of references, or twice as many properties, is twice the work.
        """
        for make in (chain, lambda number: listed(number, True)):
            few, many = calls(make(200)), calls(make(400))
            self.assertLess(many, 2.1 * few)
            self.assertLess(many, 400 * 100)

    def test_numbers_in_all(self) -> None:
        """
        Properties, values and options are counted through the whole schema.
        """
        for what, place, make in (
            ("properties", ".properties", lambda number: listed(number, True)),
            ("values", ".enum", lambda number: {"enum": list(range(number))}),
            ("options", ".anyOf", lambda number: {"anyOf": [{"type": "null"}] * (number - 1)}),
        ):
            half = make(BOUNDS[what] // 2)
            grammar_for({"anyOf": [half, half]})
            more = make(BOUNDS[what] // 2 + 2)
            self.refused({"anyOf": [half, more]}, f".anyOf[1]{place}", f"more than {BOUNDS[what]} {what}")

    def test_places_pointed_at(self) -> None:
        """
        Only so many places are pointed at; what nobody points at is not looked at.
        """
        number = BOUNDS["places"]
        grammar_for(chain(number - 1))
        names = [f"p{index}" for index in range(number + 1)]
        options = [{"$ref": f"#/$defs/{name}"} for name in names[600:]]
        schema = listed(600, True)
        schema["properties"] = {name: {"$ref": f"#/$defs/{name}"} for name in schema["properties"]}
        places = {name: {"type": "null"} for name in names}
        self.refused(
            {"$defs": places, "anyOf": [schema, *options]}, f".anyOf[{len(options)}].$ref", f"more than {number} places"
        )
        grammar_for({"$defs": {f"a{index}": 5 for index in range(5000)}, "type": "null"})

    def test_copies(self) -> None:
        """
        A schema that is pointed at under many names is counted each time.
        """
        lists: Any = {"type": "null"}
        for _ in range(40):
            lists = {"type": "array", "items": lists}
        places = dict.fromkeys([f"a{index}" for index in range(200)], lists)
        schema = {"$defs": places, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in places]}
        error = self.assertRaises(UnservedSchema, grammar_for, schema)
        self.assertIn(f"more than {BOUNDS['bytes of grammar']} bytes", str(error))
        self.assertTrue(error.path.startswith(".$defs.a"))

    def test_repetitions_in_all(self) -> None:
        """
        No sum of repetitions is more than an engine writes out.
        """
        one = {"type": "string", "maxLength": MOST}
        fit = BOUNDS["repetitions"] // MOST
        grammar_for({"anyOf": [one] * fit})
        self.refused({"anyOf": [one] * 1000}, f".anyOf[{fit}]", f"more than {BOUNDS['repetitions']} repetitions")
        grammar = grammar_for({"anyOf": [{"type": "string", "format": "uuid"}] * 500})
        self.assertEqual(grammar.count("hex{12}"), 1)

    def test_length(self) -> None:
        """
        The text of a grammar is bounded, copies of a name included.
        """
        size = BOUNDS["bytes of grammar"]
        grammar = grammar_for({"const": "a" * (size - 100)})
        self.assertLess(len(grammar), size + 2000)
        self.refused({"const": "a" * size}, ".const", f"more than {size} bytes of grammar")
        self.refused({"const": "é" * (size // 2)}, ".const", "bytes of grammar")
        self.refused({"type": "object", "properties": {"b": {}, "a" * (size // 2): {}}}, "", "bytes of grammar")

    def test_properties_that_may_be_absent(self) -> None:
        """
        One object has only so many properties that may be absent: each of them is looked at for every token.
        """
        grammar_for(listed(MOST_OPTIONAL, False))
        self.refused(listed(MOST_OPTIONAL + 1, False), ".properties", f"{MOST_OPTIONAL}")
        grammar_for(listed(MOST_OPTIONAL + 1, True))

    def test_ways_to_begin(self) -> None:
        """
        The options behind references are counted as often as they are come by.
        """
        grammar_for(doubled(10))
        self.refused(doubled(100), ".$defs.a89", f"more than {MOST_WAYS} ways")
        values = {"$defs": {"a": {"enum": list(range(500))}}, "anyOf": [{"$ref": "#/$defs/a"}] * 20}
        self.refused(values, "", "ways")

    def test_ways_at_once(self) -> None:
        """
        Lists and objects that begin alike are bounded together with the ways to go on in them.
        """
        for inside in ({"enum": list(range(100))}, listed(99, False)):
            schema = {"$defs": {"a": inside}, "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 100}
            grammar_for(schema)
            more = {**schema, "anyOf": [*schema["anyOf"], {"type": "array"}]}
            self.refused(more, "", f"more than {MOST_AT_ONCE}")
        grammar_for({"type": "array", "items": {"enum": list(range(1000))}})
