"""
Grammars (pure) in GBNF, what llama.cpp and the backends around it take in the contract's ``Grammar``.

Source: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md for the notation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ROOT = "root ::= {}\n"
_WORDS: Final = {
    "ws": '" "?',
    "hex": "[0-9a-fA-F]",
    "char": r'[^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" hex{4})',
    "string": r'"\"" char* "\""',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,17})',
    "number": 'integer ("." [0-9]{1,18})? ([eE] [-+]? [0-9]{1,2})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "pair": 'string ws ":" ws value',
    "object": '"{" ws (pair (ws "," ws pair)*)? ws "}"',
    "array": '"[" ws (value (ws "," ws value)*)? ws "]"',
    "day": '[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])',
    "clock": '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,9})?'
    ' ("Z" | [-+] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])',
    "uuid": 'hex{8} "-" hex{4} "-" hex{4} "-" hex{4} "-" hex{12}',
}
"""Rules every grammar has; an engine does not mind those it does not reach."""

FORMATS: Final = {
    "date": "day",
    "time": "clock",
    "date-time": 'day "T" clock',
    "uuid": "uuid",
}
"""Formats of strings -> what is between the quotes. A month may be told to have 31 days."""


def text_of(root: str, rules: Mapping[str, str]) -> str:
    """The grammar of what the rule ``root`` matches: of ``rules``, or one that every grammar has."""
    made = {**_WORDS, **rules}
    return _ROOT.format(root) + "".join(f"{name} ::= {body}\n" for name, body in made.items())


def literal(text: str) -> str:
    """``text`` as a word of a grammar; what stands for itself nowhere is written by its number."""
    written = (f"\\x{ord(char):02X}" if ord(char) < 32 else "\\" + char if char in '"\\' else char for char in text)
    return '"' + "".join(written) + '"'


def times(least: int, most: int | None) -> str:
    """The mark behind what is repeated."""
    return "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"


ANY_OBJECT: Final = text_of("object", {})
"""The grammar of any JSON object."""
