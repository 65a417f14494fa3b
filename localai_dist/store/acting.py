"""
Every statement that deletes, demotes or evicts, and on what ground: a closed list.

A function that runs such a statement is decorated with ``@acts_on(ground, "file.statement")``. The ground also stands
beside the SQL (``-- acts:``, which every statement that changes rows carries); a test compares both, and finds a
statement that nobody registered, a second place that runs it, and a caller that is not in the matrix of outcomes.

Source: design §2, last paragraph but one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

F = TypeVar("F", bound=Callable[..., object])


class Ground(Enum):
    """Why something may be deleted, demoted or evicted. The first two are predicates of ``reach.py``."""

    MAY_REAP = "may_reap"
    MAY_DEMOTE = "may_demote"
    STALE_HEARTBEAT = "stale_heartbeat"
    """A node was silent too long: its own path to offline, whatever its tunnel does."""
    WORKER_GONE = "worker_gone"
    """The worker itself said that it restarted or leaves."""
    ASKED = "asked"
    """An operator, or the operation that owns the row, asked for exactly this."""
    FENCED = "fenced"
    """Only the very claim that is named, by equality of its epoch."""
    NOT_LIVE = "not_live"
    """A frontend outlived its live window, or stops."""
    EXPIRED = "expired"
    """A row that everybody had time to see, and that nothing rests on any more."""


@dataclass(frozen=True, slots=True)
class Act:
    """One registered place."""

    ground: Ground
    statement: str
    function: str


ACTS: Final[dict[str, Act]] = {}
"""By statement, ``file.name``."""


def acts_on(ground: str, *statements: str) -> Callable[[F], F]:
    """
    Register the decorated function as the one place that runs ``statements``, on ``ground``.

    Raises:
        ValueError: no such ground, or a statement is registered already.
    """
    known = Ground(ground)

    def register(function: F) -> F:
        for statement in statements:
            if statement in ACTS:
                raise ValueError(f"{statement} is registered by {ACTS[statement].function} already")
            ACTS[statement] = Act(known, statement, f"{function.__module__}.{function.__qualname__}")
        return function

    return register
