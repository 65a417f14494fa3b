"""Whoever reads a frontend's log or an error finds nodes by the names people gave them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import localai_dist

PACKAGE = Path(localai_dist.__file__).parent

ELSEWHERE = {"backends", "cli", "testing", "worker"}
"""A worker knows one node, itself; the command is told names; the rest is no part of a frontend."""

NAMED = {
    "httpapi/auth.py": "the node that the caller itself named",
    "loads/status.py": "its node is the name",
    "registry/errors.py": "its callers give names",
    "tunnel/acceptor.py": "what a stranger claims to be, quoted; the name comes after it",
}
"""Files where something called ``node`` may stand in a text, and why."""

IDS = {"node", "node_id", "_node"}


def is_id(value: ast.expr) -> bool:
    """Whether an expression is a bare node id, by how such things are called here."""
    if isinstance(value, ast.Name):
        return value.id in IDS
    return isinstance(value, ast.Attribute) and value.attr in IDS


def logged(tree: ast.AST) -> Iterator[ast.expr]:
    """What log calls are given as their ``node``."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            target = call.func.value
            name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
            if name.strip("_") == "log":
                yield from (keyword.value for keyword in call.keywords if keyword.arg == "node")


def written(tree: ast.AST) -> Iterator[ast.expr]:
    """What f-strings put behind the word node."""
    for text in ast.walk(tree):
        if isinstance(text, ast.JoinedStr):
            for before, value in zip(text.values, text.values[1:], strict=False):
                said = isinstance(before, ast.Constant) and str(before.value).endswith("node ")
                if said and isinstance(value, ast.FormattedValue):
                    yield value.value


def bare(source: str) -> list[str]:
    """The ids that ``source`` writes where a person reads."""
    tree = ast.parse(source)
    return [ast.unparse(value) for value in (*logged(tree), *written(tree)) if is_id(value)]


class NamesTests(SynchronousTestCase):
    def test_nobody_is_shown_a_bare_id(self) -> None:
        """No log line and no text of a frontend names a node by its id alone."""
        found = {}
        for path in sorted(PACKAGE.rglob("*.py")):
            place = path.relative_to(PACKAGE).as_posix()
            if place.split("/")[0] not in ELSEWHERE and (ids := bare(path.read_text())):
                found[place] = ids
        self.assertEqual({place: ids for place, ids in found.items() if place not in NAMED}, {})
        self.assertEqual(set(NAMED) - set(found), set())  # an exception that is none any more goes
        self.assertEqual(bare('log.info("{node}", node=row.node_id)'), ["row.node_id"])  # a control
        self.assertEqual(bare('self._log.warn("x", node=names(node)); f"on node {node}: x"'), ["node"])
