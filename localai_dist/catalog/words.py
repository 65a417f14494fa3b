"""What is wrong with a model file, in the words of somebody who writes one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import yaml

_SHAPE = re.compile(
    r"Expected `(?P<want>[^`]+)`(?: (?P<bound>[<>]=?) (?P<limit>\S+))?(?:, got `(?P<got>[^`]+)`)?"
    r" - at `\$\.?(?P<place>[^`]*)`"
)
"""msgspec's sentence about one value."""

_KINDS = {
    "int": "a number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "keys with values",
    "null": "nothing",
}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}

_NAME = re.compile(r"^name:[ \t]*(?P<quote>[\"']?)(?P<name>[^\"'\s#][^\"'\s]*)(?P=quote)", re.MULTILINE)

ALIKE = 0.8
"""How alike an unknown key must be to a known one to be taken for a slip of the pen (1 is the same)."""

LOOKED_AT = 100
"""Unknown keys of one mapping that are compared with the known ones."""

_TOO_BIG = re.compile(r"Number out of range|Expected `float` [<>]= .*e\+38")


def of_shape(text: str) -> str:
    """msgspec's complaint ``text`` as ``context_size: want a number, got text``."""
    if _TOO_BIG.match(text):
        return f"{text.partition('`$.')[2].partition('`')[0]}: want a number that 32 bits hold"
    found = _SHAPE.search(text)
    if found is None:
        return text.replace("`$.", "`")
    place = found["place"].replace("[...]", "") or "the file"
    kinds = [kind for kind in found["want"].split(" | ") if kind != "null"]
    if found["bound"]:
        return f"{place}: want {_BOUNDS[found['bound']]} {found['limit']}"
    want = " or ".join(dict.fromkeys(_KINDS.get(kind, kind) for kind in kinds))
    if kinds == ["int"] and found["got"] == "float":
        want = "a whole number"
    got = f", got {_KINDS.get(found['got'], found['got'])}" if found["got"] else ""
    return f"{place}: want {want}{got}"


def of_yaml(error: yaml.YAMLError) -> str:
    """A YAML library's complaint as place and cause, in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return f"not YAML: {' '.join(str(error).split())}"
    return f"not YAML: line {mark.line + 1}, column {mark.column + 1}: {' '.join(str(problem).split())}"


def slips(document: Mapping[Any, Any], known: Iterable[str], *, inside: str = "") -> tuple[str, ...]:
    """A sentence for each key of ``document`` that is unknown and nearly a known one; other unknown keys are fine."""
    names = set(known)
    unknown = (key for key in document if isinstance(key, str) and key.isprintable() and key not in names)
    free = sorted(names - set(document))
    nearest = ((key, difflib.get_close_matches(key, free, 1, ALIKE)) for key in islice(unknown, LOOKED_AT))
    return tuple(f"unknown key {inside}{key}: did you mean {inside}{near[0]}?" for key, near in nearest if near)


def name_in(text: str, source: str) -> str:
    """The name that a broken file would serve, as well as can be told: its ``name:`` line, else the file's own name."""
    found = _NAME.search(text)
    return found["name"] if found is not None else source.rpartition(".")[0]
