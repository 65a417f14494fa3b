"""
Named SQL out of ``sql/*.sql``.

A file is a sequence of statements, each under a header and a comment that says what it is for::

    -- name: touch
    -- Says that a replica was used just now.
    -- acts: none
    update replicas set last_used = now() where ...;

``acts`` stands on each statement that changes or deletes rows: ``none``, or the ground it deletes, demotes or evicts on
(see ``acting.py``).
Parameters are psycopg2's: ``%(name)s``; a literal per cent sign is ``%%``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

_HEADER = re.compile(r"^-- name: *(\w+) *$", re.MULTILINE)
_ACTS = re.compile(r"^-- acts: *(\w+) *$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Statement:
    """
    One named statement.

    Attributes:
        name: how code asks for it.
        sql: the text for the driver, starting with a comment that names it in ``pg_stat_activity``.
        why: its comment.
        acts: the ground it deletes, demotes or evicts on; ``none``; or None when the header is absent.
    """

    name: str
    sql: str
    why: str
    acts: str | None


def parse(text: str, file: str) -> dict[str, Statement]:
    """
    The statements in ``text``, by name.

    Raises:
        ValueError: no statement, one twice, or one without a comment or without SQL.
    """
    pieces = _HEADER.split(text)[1:]
    found: dict[str, Statement] = {}
    for name, body in zip(pieces[::2], pieces[1::2], strict=True):
        if name in found:
            raise ValueError(f"{file}: statement {name!r} is there twice")
        found[name] = _statement(name, body, file)
    if not found:
        raise ValueError(f"{file}: no '-- name:' header")
    return found


def _statement(name: str, body: str, file: str) -> Statement:
    acts = _ACTS.search(body)
    lines = _ACTS.sub("", body).strip().splitlines()
    comments = [line[2:].strip() for line in lines if line.startswith("--")]
    sql = "\n".join(line for line in lines if not line.startswith("--")).strip().rstrip(";")
    if not sql or not comments:
        raise ValueError(f"{file}: statement {name!r} wants a comment and SQL")
    return Statement(name, f"/* {file.removesuffix('.sql')}.{name} */ {sql}", " ".join(comments), acts and acts[1])


def read(file: str) -> dict[str, Statement]:
    """
    The statements of ``sql/<file>``, with their comments.

    Raises:
        FileNotFoundError, ValueError: a mistake of ours.
    """
    return parse((resources.files(__package__) / "sql" / file).read_text(encoding="utf-8"), file)


def load_statements(file: str) -> Mapping[str, str]:
    """
    The SQL of ``sql/<file>`` by name, ready for ``Pool.fetch`` and its like.

    Raises:
        FileNotFoundError, ValueError: a mistake of ours.
    """
    return MappingProxyType({name: statement.sql for name, statement in read(file).items()})


def files() -> list[str]:
    """The names of every file in ``sql/``."""
    return sorted(
        entry.name for entry in (resources.files(__package__) / "sql").iterdir() if entry.name.endswith(".sql")
    )
