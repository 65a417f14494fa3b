"""Where the code runs the statements of ``store/sql`` and who calls those places, read from the source."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import localai_dist
from localai_dist.registry.acting import ACTS
from localai_dist.store.statements import Statement, files, read

PACKAGE = Path(localai_dist.__file__).parent

#: Changes rows: also the half of an upsert that overwrites what somebody else wrote.
CHANGES = re.compile(r"\b(?:delete\s+from|truncate|merge\s+into|update\s+(?!skip\b|of\b)\w+)\b", re.IGNORECASE)
DELETES = re.compile(r"\b(?:delete\s+from|truncate)\b", re.IGNORECASE)
#: SQL that changes rows, as a string in Python.
IN_PYTHON = re.compile(
    r"\b(?:delete\s+from\s+\w+|truncate\s+\w+|insert\s+into\s+\w+|update\s+\w+(?:\s+as\s+\w+)?\s+set)\b", re.IGNORECASE
)


def statements() -> dict[str, Statement]:
    """Every statement of every file, as ``file.name``."""
    return {
        f"{file.removesuffix('.sql')}.{statement.name}": statement
        for file in files()
        for statement in read(file).values()
    }


def import_all() -> None:
    """Import every module that registers something, so that its decorators have run."""
    for path, tree in sources():
        if any(isinstance(node, ast.Name) and node.id == "acts_on" for node in ast.walk(tree)):
            importlib.import_module(module_of(path))


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """Every module of the package, parsed; what is generated or runs in another process is left out."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")) and "backends" not in path.parts:
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    """The dotted name of a module."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


@dataclass(frozen=True, slots=True)
class Within:
    """A node of the syntax tree and the function it stands in, ``Class.method`` (inner functions count as theirs)."""

    node: ast.AST
    function: str


def within(tree: ast.AST) -> Iterator[Within]:
    """Every node of ``tree`` with its function."""

    def walk(node: ast.AST, names: tuple[str, ...], in_function: bool) -> Iterator[Within]:
        for child in ast.iter_child_nodes(node):
            inner, deeper = names, in_function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not in_function:
                inner = (*names, child.name)
                deeper = not isinstance(child, ast.ClassDef)
            yield Within(child, ".".join(inner))
            yield from walk(child, inner, deeper)

    yield from walk(tree, (), False)


def runners() -> dict[str, set[str]]:
    """For each acting statement the functions that name it, as ``module.Class.method``."""
    found: dict[str, set[str]] = {statement: set() for statement in ACTS}
    for path, tree in sources():
        loaded = set(_files_loaded(tree))
        for each in within(tree):
            if isinstance(each.node, ast.Constant) and isinstance(each.node.value, str):
                for file in loaded:
                    if (statement := f"{file}.{each.node.value}") in found and each.function:
                        found[statement].add(f"{module_of(path)}.{each.function}")
    return found


def _files_loaded(tree: ast.Module) -> Iterator[str]:
    """The files whose statements a module has, loaded by itself or taken from the module that did."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="load_statements"), args=[ast.Constant(value=str(file))]):
                yield file.removesuffix(".sql")
            case ast.ImportFrom(module=str(module), names=names) if any("SQL" in alias.name for alias in names):
                source = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
                yield from _files_loaded(ast.parse(source.read_text(encoding="utf-8")))


def callers() -> dict[str, set[str]]:
    """For each acting function (its last name) the functions that call one of that name on a store of the registry."""
    names = {act.function.rpartition(".")[2] for act in ACTS.values()}
    found: dict[str, set[str]] = {}
    for path, tree in sources():
        for each in within(tree):
            match each.node:
                case ast.Call(func=ast.Attribute(attr=attr, value=receiver)) if attr in names:
                    owner = _last(receiver)
                    if owner in STORES:
                        found.setdefault(f"{STORES[owner]}.{attr}", set()).add(
                            f"{module_of(path).removeprefix('localai_dist.')}.{each.function}"
                        )
    return found


#: What an object of the registry is called wherever the code holds one.
STORES = {
    prefix + name: name
    for name in ("nodes", "replicas", "instances", "ownership", "scheduling", "table")
    for prefix in ("", "_")
}


def _last(receiver: ast.expr) -> str:
    if isinstance(receiver, ast.Attribute):
        return receiver.attr
    return receiver.id if isinstance(receiver, ast.Name) else ""


def sql_in_python() -> dict[str, list[str]]:
    """SQL that changes rows and stands in Python, by module; docstrings do not count."""
    found: dict[str, list[str]] = {}
    for path, tree in sources():
        docs = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in docs else None
            if isinstance(text, str) and IN_PYTHON.search(text):
                found.setdefault(module_of(path), []).append(text)
    return found
