"""
The cause of a failed load, into the job's row and out of it: every waiter on every frontend gets the same one.

A cause that is one of the outcomes of reaching a node keeps its kind, so that each frontend answers it with its own
status and code; everything else is a text.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from enum import Enum
from typing import Any, get_args

import msgspec

from localai_dist import reach
from localai_dist.errors import LocalAIDistError
from localai_dist.loads.errors import LoadFailed
from localai_dist.reach import Answer, Outcome, Unreached
from localai_dist.scheduler.placement import NoPlace

_OUTCOMES: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Outcome)}

LIMIT = 8000
"""Characters of a cause's text that are kept."""


def encode_cause(error: LocalAIDistError) -> str:
    """``error`` as the text of the row."""
    written: dict[str, Any] = {"kind": _kind(error), "text": str(error)[:LIMIT]}
    if error.told != str(error):
        written["told"] = error.told[:LIMIT]
    outcome = getattr(error, "outcome", None)
    if outcome is not None:
        plain = {name: value.value if isinstance(value, Enum) else value for name, value in asdict(outcome).items()}
        written["outcome"] = {"is": type(outcome).__name__, **plain}
    return msgspec.json.encode(written).decode()


def encode_waits(text: str, told: str) -> str:
    """What keeps a load from going on, as the text of the row; read by ``decode_cause``."""
    return msgspec.json.encode({"text": text[:LIMIT], "told": told[:LIMIT]}).decode()


def decode_cause(text: str) -> LocalAIDistError:
    """The error that ``text`` was written for; a text of another writer is a plain ``LoadFailed``."""
    try:
        written = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return LoadFailed(text or "the load failed and left no reason")
    if not isinstance(written, dict):
        return LoadFailed(text)
    said = str(written.get("text", ""))
    outcome = _outcome(written.get("outcome"))
    match written.get("kind"):
        case "unreached" if outcome is not None:
            return Unreached(outcome)
        case "no_place":
            return NoPlace(said, outcome)
        case _:
            return LoadFailed(said, str(written.get("told", "")))


def _kind(error: LocalAIDistError) -> str:
    if isinstance(error, Unreached):
        return "unreached"
    return "no_place" if isinstance(error, NoPlace) else "failed"


def _outcome(written: Any) -> Outcome | None:
    if not isinstance(written, dict):
        return None
    kind = _OUTCOMES.get(str(written.get("is")))
    if kind is None:
        return None
    known = {field.name for field in fields(kind)}
    values = {name: value for name, value in written.items() if name in known}
    try:
        if kind is reach.Answered:
            values["answer"] = Answer(values["answer"])
        found: Outcome = kind(**values)
    except (TypeError, ValueError, KeyError):
        return None
    return found
