"""A JSON schema becomes a grammar, and everything the grammar matches is valid."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.serving.grammar import ANY_OBJECT
from localai_dist.serving.schemas import MOST, UnservedSchema, grammar_for
from tests.support.gbnf import Grammar

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["name", "kids"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}

_names = st.text(st.characters(codec="utf-8", exclude_characters="~/"), min_size=1, max_size=4)
_values = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=5), st.just(1.5), st.just(["a"]))
_leaves = st.one_of(
    st.sampled_from(
        ({"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {"title": "any"}, {}, True)
    ),
    st.sampled_from(("date", "time", "date-time", "uuid")).map(lambda form: {"type": "string", "format": form}),
    st.tuples(st.integers(0, 3), st.integers(3, 5)).map(
        lambda bounds: {"type": "string", "minLength": bounds[0], "maxLength": bounds[1]}
    ),
    st.lists(_values, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    _values.map(lambda value: {"const": value}),
    st.just({"type": ["string", "null"], "description": "maybe"}),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    listed = st.dictionaries(_names, st.tuples(inner, st.booleans()), min_size=1, max_size=4)
    return listed.map(
        lambda found: {
            "type": "object",
            "properties": {name: one for name, (one, _) in found.items()},
            "required": [name for name, (_, needed) in found.items() if needed],
            "additionalProperties": False,
        }
    )


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        _objects(inner),
        inner.map(lambda one: {"type": "object", "additionalProperties": one}),
        st.tuples(inner, st.integers(0, 2), st.sampled_from((None, 2, 3))).map(
            lambda it: {"type": "array", "items": it[0], "minItems": it[1], **({"maxItems": it[2]} if it[2] else {})}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda found: {"anyOf": found}),
        inner.map(lambda one: {"allOf": [one]}),
    )


schemas = st.recursive(_leaves, _nested, max_leaves=6)

_KEYWORDS = (
    *("$ref", "const", "enum", "anyOf", "oneOf", "allOf", "type", "properties", "required", "additionalProperties"),
    *("items", "minItems", "maxItems", "minLength", "maxLength", "format", "$defs", "title", "nullable"),
)
_texts = st.one_of(
    st.sampled_from(
        ("object", "array", "string", "integer", "number", "date", "uuid", "#", "#/$defs", "#/$defs/a", "a")
    ),
    st.text(max_size=3),
    st.text(st.characters(categories=("Cs",)), max_size=2),
)
_anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(_KEYWORDS), _texts), inner, max_size=4),
    ),
    max_leaves=12,
)
_no_schemas = st.dictionaries(st.sampled_from(_KEYWORDS), _anything, max_size=4)


class MatchTests(SynchronousTestCase):
    def drawn(self, schema: Any, number: int = 40) -> list[Any]:
        grammar, chance = Grammar(grammar_for(schema)), random.Random(7)
        found = [json.loads(grammar.draw(chance)) for _ in range(number)]
        for one in found:
            jsonschema.validate(one, schema)
        return found

    @settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60)
    @given(schemas, st.integers())
    def test_everything_matched_is_valid(self, schema: Any, seed: int) -> None:
        """
        Whatever an engine that keeps to the grammar says is JSON, and valid against the schema.
        """
        whole = schema if isinstance(schema, dict) else {"allOf": [schema]}
        grammar, chance = Grammar(grammar_for(whole)), random.Random(seed)
        for _ in range(5):
            jsonschema.validate(json.loads(grammar.draw(chance)), whole)

    def test_a_schema_that_holds_itself(self) -> None:
        """
        A schema may point into itself: trees of any depth are matched.
        """
        found = self.drawn(TREE)
        self.assertTrue(any(one["kids"] for one in found))
        self.drawn({"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}})

    def test_properties_that_may_be_absent(self) -> None:
        """
        Every choice of the properties that are not required comes about, in the schema's order.
        """
        kinds = {name: {"const": 1} for name in "abc"}
        found = self.drawn({"type": "object", "properties": kinds, "additionalProperties": False}, 300)
        self.assertEqual({"".join(one) for one in found}, {"", "a", "b", "c", "ab", "ac", "bc", "abc"})
        found = self.drawn({"type": "object", "properties": kinds, "required": ["b"]}, 300)
        self.assertEqual({"".join(one) for one in found}, {"b", "ab", "bc", "abc"})

    def test_lengths(self) -> None:
        """
        Strings and lists keep to their lengths, both ends reached.
        """
        found = self.drawn({"type": "array", "items": {"enum": [1]}, "minItems": 1, "maxItems": 3}, 100)
        self.assertEqual({len(one) for one in found}, {1, 2, 3})
        self.assertEqual(self.drawn({"type": "array", "maxItems": 0}), [[]] * 40)
        found = self.drawn({"type": "string", "minLength": 2, "maxLength": 4}, 100)
        self.assertEqual({len(one) for one in found}, {2, 3, 4})
        self.assertTrue(all(len(one) >= 2 for one in self.drawn({"type": "string", "minLength": 2})))
        self.assertEqual(self.drawn({"type": "object", "additionalProperties": False}), [{}] * 40)

    def test_values_of_the_wrong_type(self) -> None:
        """
        Of an enumeration with a type only the values of that type can be said.
        """
        self.assertEqual(set(self.drawn({"type": "integer", "enum": [1, 2.0, "3", True, 2.5]})), {1, 2})
        self.assertEqual(set(self.drawn({"type": ["number", "string"], "enum": ['"\\\n', None, 1.5]})), {'"\\\n', 1.5})

    def test_anything(self) -> None:
        """
        A schema that restricts nothing is matched by anything.
        """
        found = self.drawn({"title": "whatever"}, 200)
        self.assertEqual({type(one) for one in found}, {dict, list, str, int, float, bool, type(None)})

    def test_any_object(self) -> None:
        """
        Without a schema the answer is an object of whatever.
        """
        grammar, chance = Grammar(ANY_OBJECT), random.Random(1)
        for _ in range(200):
            self.assertIsInstance(json.loads(grammar.draw(chance)), dict)


class RefusalTests(SynchronousTestCase):
    def test_what_can_not_be_kept_to(self) -> None:
        """
        A keyword that no grammar here keeps to is refused with its place, and so is what is no schema.
        """
        for schema, path in (
            ({"type": "integer", "minimum": 3}, ".minimum"),
            ({"type": "string", "pattern": "^a"}, ".pattern"),
            ({"type": "string", "format": "email"}, ".format"),
            ({"type": "string", "format": "date", "minLength": 1}, ".format"),
            ({"type": "string", "minLength": -1}, ".minLength"),
            ({"type": "string", "minLength": 3, "maxLength": 2}, ".minLength"),
            ({"type": "array", "maxItems": MOST + 1}, ".maxItems"),
            ({"type": "array", "minItems": True}, ".minItems"),
            ({"type": "array", "items": 5}, ".items"),
            ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
            ({"type": "object", "patternProperties": {}}, ".patternProperties"),
            ({"type": "object", "properties": 5}, ".properties"),
            ({"type": "object", "required": ["a"]}, ".required"),
            ({"type": "object", "required": "a"}, ".required"),
            ({"type": "object", "properties": {"a": {"type": "what"}}}, ".properties.a.type"),
            ({"type": []}, ".type"),
            ({"type": ["string", 5]}, ".type"),
            ({"type": 5}, ".type"),
            ({"type": {}}, ".type"),
            ({"type": ["string", "string"]}, ".type"),
            ({"type": ["null"] * 8}, ".type"),
            ({"type": "string", "format": []}, ".format"),
            ({"type": "string", "format": {}}, ".format"),
            ({"type": "object", "properties": {"a": {}}, "required": [["a"]]}, ".required"),
            ({"type": "object", "properties": {"a": {}}, "required": ["a", "a"]}, ".required"),
            ({"const": float("inf")}, ".const"),
            ({"enum": [1, {"a": [float("nan")]}]}, ".enum"),
            ({"anyOf": []}, ".anyOf"),
            ({"anyOf": [{"type": "null"}, False]}, ".anyOf[1]"),
            ({"anyOf": [{}], "type": "string"}, ".type"),
            ({"allOf": [{}, {}]}, ".allOf"),
            ({"enum": 5}, ".enum"),
            ({"enum": []}, ".enum"),
            ({"enum": ["a"], "type": "null"}, ".enum"),
            ({"const": "a", "type": "null"}, ".const"),
            ({"not": {}}, ".not"),
            ({"$ref": "https://example.org/schema"}, ".$ref"),
            ({"$ref": 5}, ".$ref"),
            ({"$ref": ["#"]}, ".$ref"),
            ({"type": "object", "properties": {"a": {"$ref": "#foo"}}}, ".properties.a.$ref"),
            ({"type": "array", "items": {"$ref": ""}}, ".items.$ref"),
            ({"$ref": "#/$defs/none"}, ".$ref"),
            ({"$ref": "#/$defs/a", "$defs": {"a": {"items": 5, "type": "array"}}}, ".$defs.a.items"),
            ({"anyOf": [{"type": "string", "maxLength": MOST}] * 21}, ".anyOf[20]"),
            ({"$ref": "#"}, ""),
            ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, ""),
            ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}}, ""),
            ({"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(5000)}}, ""),
        ):
            error = self.assertRaises(UnservedSchema, grammar_for, schema)
            self.assertEqual((error.path, bool(str(error))), (path, True), schema)

    def test_names_in_pointers(self) -> None:
        """
        A pointer's escapes are understood.
        """
        schema = {"$ref": "#/$defs/a~1b~0", "$defs": {"a/b~": {"const": 7}}}
        self.assertEqual(Grammar(grammar_for(schema)).draw(random.Random(1)), "7")

    def test_a_bound_that_is_null(self) -> None:
        """
        A bound that is null is none.
        """
        self.assertEqual(
            grammar_for({"type": "string", "minLength": None, "maxLength": None}), grammar_for({"type": "string"})
        )

    def test_half_a_character(self) -> None:
        """
        Half of a surrogate pair is said by its number: a grammar is text that can be sent.
        """
        grammar = grammar_for({"const": {"\ud800": "\udfff"}})
        grammar.encode()
        self.assertEqual(json.loads(Grammar(grammar).draw(random.Random(1))), {"\ud800": "\udfff"})

    @settings(suppress_health_check=[HealthCheck.too_slow], max_examples=400)
    @given(_no_schemas)
    def test_any_json_for_a_schema(self, schema: dict[str, Any]) -> None:
        """
        Whatever JSON stands where a keyword's value should, it is served as text that can be sent, or refused.
        """
        try:
            grammar_for(schema).encode()
        except UnservedSchema as error:
            self.assertTrue(str(error))
