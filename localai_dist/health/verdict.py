"""What one look at a node means for its status: pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from localai_dist.reach import Outcome, may_demote
from localai_dist.registry.presence import Presence, PresenceState, outcome_of


@dataclass(frozen=True, slots=True)
class Demote:
    """Take it out of placement, because of ``outcome``."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Promote:
    """Its route is there again: into placement, if it also beats."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing to do."""


Verdict: TypeAlias = Demote | Promote | Leave


def judge(node: str, status: str, presence: Presence) -> Verdict:
    """
    What to do with a node of this status whose tunnel is like this.

    A draining node is the operator's, a pending one is not in placement yet.

    Source: internals §5, wire contract §9.
    """
    outcome = outcome_of(node, presence)
    if status == "healthy" and outcome is not None and may_demote(outcome):
        return Demote(outcome)
    if status in ("unhealthy", "offline") and presence.state is PresenceState.CONNECTED:
        return Promote()
    return Leave()
