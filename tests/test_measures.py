"""The measures of style: no module and no function is too long to be read at one go."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.support.pages import ROOT

PACKAGE = ROOT / "localai_dist"
MODULE_LINES = 400
BODY_LINES = 40

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> dict[str, str]:
    """Every module's text, by its path; what protoc wrote is not ours."""
    found = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: path.read_text("utf-8") for name, path in found.items() if "_pb2" not in Path(name).name}


def body_lines(function: Function) -> int:
    """Lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, Function]]:
    """Every function below ``tree`` with its dotted name."""
    for child in ast.iter_child_nodes(tree):
        name = outer
        if isinstance(child, Function | ast.ClassDef):
            name = f"{outer}.{child.name}".lstrip(".")
        if isinstance(child, Function):
            yield name, child
        yield from functions(child, name)


class MeasureTests(SynchronousTestCase):
    """Of what a release holds."""

    def test_modules(self) -> None:
        """No module has more than 400 lines."""
        long = {name: lines for name, text in modules().items() if (lines := len(text.splitlines())) > MODULE_LINES}
        self.assertEqual(long, {})

    def test_functions(self) -> None:
        """No function's body has more than 40 lines."""
        long = {
            f"{name}:{function}": lines
            for name, text in modules().items()
            for function, node in functions(ast.parse(text))
            if (lines := body_lines(node)) > BODY_LINES
        }
        self.assertEqual(long, {})
