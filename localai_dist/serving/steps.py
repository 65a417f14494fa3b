"""What to do after a failed attempt to reach a replica: the decision, apart from doing it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

from localai_dist.reach import NoRoute, Outcome, Retry, may_reap, may_retry

POLL = 0.25
"""How often a waiting request looks again whether the way is open (s)."""

MAX_RELOADS = 2
"""How often one request may find its replica gone and have it loaded again."""


@dataclass(frozen=True, slots=True)
class DropRow:
    """The replica's row is false: remove it, then choose (or load) anew."""


@dataclass(frozen=True, slots=True)
class TryOther:
    """Leave this replica alone and try another one."""


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Try the same replica once more, at once, on a fresh stream."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait ``seconds``, then choose among all replicas again."""

    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Tell the client."""


Step: TypeAlias = DropRow | TryOther | TryAgain | Wait | GiveUp


@dataclass(frozen=True, slots=True)
class Attempts:
    """
    What one request has spent so far.

    Attributes:
        route_deadline: when its wait for a way to the node is over (s).
        fresh: whether it used its one retry on a fresh stream.
        reloads: how often it dropped a false row.
    """

    route_deadline: float
    fresh: bool = False
    reloads: int = 0

    def after(self, step: Step) -> Attempts:
        """The account after ``step`` was decided."""
        match step:
            case DropRow():
                return replace(self, reloads=self.reloads + 1)
            case TryAgain():
                return replace(self, fresh=True)
            case TryOther() | Wait() | GiveUp():
                return self
            case _:
                assert_never(step)


def next_step(outcome: Outcome, attempts: Attempts, *, now: float, has_row: bool, others: bool) -> Step:
    """
    What to do after ``outcome``.

    Args:
        now: the caller's clock (s).
        has_row: whether a replica's row was asked; False when loading one failed.
        others: whether another replica, not yet tried, is loaded.

    Source: design §2, the table's may_reap and may_retry columns and the paragraph on placement.
    """
    if has_row and may_reap(outcome) and attempts.reloads < MAX_RELOADS:
        return DropRow()
    retry = may_retry(outcome)
    if others and (retry is not Retry.NEVER or isinstance(outcome, NoRoute)):
        return TryOther()
    if retry is Retry.ONCE_FRESH:
        return GiveUp() if attempts.fresh else TryAgain()
    if retry is Retry.NEVER or now >= attempts.route_deadline:
        return GiveUp()
    return Wait(min(POLL, attempts.route_deadline - now))
