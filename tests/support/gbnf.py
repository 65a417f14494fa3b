"""Texts that a grammar in GBNF matches, drawn at random: as much of the notation as our grammars use."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\{\d+(?:,\d*)?\}|[()|*?]|[a-z0-9]+)')
_ESCAPE = re.compile(r"\\x([0-9A-F]{2})|\\(.)")
_MANY = 3
"""Repetitions without an end are drawn up to this many more."""


@dataclass(frozen=True)
class _Node:
    """``kind`` is text, any (of characters), rule, all (in a row), one (of several), or times."""

    kind: str
    value: str = ""
    parts: tuple[_Node, ...] = ()
    least: int = 0
    most: int = 0


class Grammar:
    """A parsed grammar."""

    def __init__(self, text: str) -> None:
        lines = [line.partition(" ::= ") for line in text.rstrip("\n").split("\n")]
        self.rules = {name: _Parser(body).parsed() for name, _, body in lines}
        self._heights: dict[str, float] = dict.fromkeys(self.rules, float("inf"))
        known: dict[str, float] = {}
        while known != self._heights:
            known, self._heights = self._heights, {name: 1 + self._height(it) for name, it in self.rules.items()}

    def draw(self, chance: random.Random, depth: int = 12) -> str:
        """A text that the rule ``root`` matches; deeper than ``depth`` the shortest way out is taken."""
        return "".join(self._draw(self.rules["root"], chance, depth))

    def _draw(self, node: _Node, chance: random.Random, depth: int) -> Iterator[str]:
        if node.kind == "text":
            yield node.value
        elif node.kind == "any":
            yield chance.choice(node.value)
        elif node.kind == "rule":
            yield from self._draw(self.rules[node.value], chance, depth - 1)
        elif node.kind == "all":
            for part in node.parts:
                yield from self._draw(part, chance, depth)
        elif node.kind == "one":
            ways = node.parts if depth > 0 else (min(node.parts, key=self._height),)
            yield from self._draw(chance.choice(ways), chance, depth)
        else:
            for _ in range(chance.randint(node.least, node.most) if depth > 0 else node.least):
                yield from self._draw(node.parts[0], chance, depth)

    def _height(self, node: _Node) -> float:
        heights = [self._height(part) for part in node.parts]
        if node.kind == "rule":
            return self._heights[node.value]
        if node.kind == "one":
            return min(heights)
        return 0 if node.kind == "times" and node.least == 0 else max(heights, default=0)


class _Parser:
    def __init__(self, body: str) -> None:
        self._words = _TOKEN.findall(body)
        assert not _TOKEN.sub("", body).strip(), body

    def parsed(self) -> _Node:
        node = self._choice()
        assert not self._words, self._words
        return node

    def _choice(self) -> _Node:
        ways = [self._row()]
        while self._words and self._words[0] == "|":
            self._words.pop(0)
            ways.append(self._row())
        return ways[0] if len(ways) == 1 else _Node("one", parts=tuple(ways))

    def _row(self) -> _Node:
        parts: list[_Node] = []
        while self._words and self._words[0] not in "|)":
            word = self._words.pop(0)
            if word in "*?" or word[0] == "{":
                parts[-1] = _repeated(parts[-1], word)
            elif word == "(":
                parts.append(self._choice())
                assert self._words.pop(0) == ")"
            else:
                parts.append(_leaf(word))
        return _Node("all", parts=tuple(parts))


def _leaf(word: str) -> _Node:
    if word[0] == '"':
        return _Node("text", "".join(_characters(word[1:-1])))
    if word[0] == "[":
        return _Node("any", _class(word[1:-1]))
    return _Node("rule", word)


def _class(body: str) -> str:
    """The ASCII characters of a class, and one that is not ASCII where it excludes."""
    negated = body.startswith("^")
    found: set[str] = set()
    listed = list(_characters(body.removeprefix("^")))
    while listed:
        first = listed.pop(0)
        if listed[:1] == ["-"] and len(listed) > 1:
            last = listed[1]
            del listed[:2]
            found.update(map(chr, range(ord(first), ord(last) + 1)))
        else:
            found.add(first)
    return "".join(sorted(set(map(chr, range(128))) - found)) + "é" if negated else "".join(sorted(found))


def _characters(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        escape = _ESCAPE.match(text, at)
        if escape:
            yield chr(int(escape[1], 16)) if escape[1] else escape[2]
            at = escape.end()
        else:
            yield text[at]
            at += 1


def _repeated(node: _Node, mark: str) -> _Node:
    if mark in "*?":
        return _Node("times", parts=(node,), least=0, most=1 if mark == "?" else _MANY)
    low, comma, high = mark[1:-1].partition(",")
    least = int(low)
    most = int(high) if high else least + _MANY if comma else least
    return _Node("times", parts=(node,), least=least, most=most)
