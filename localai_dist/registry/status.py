"""
The status of a node, as a table. The same guards stand in the ``where`` of each statement in ``store/sql/nodes.sql``.

Approval is a column of its own: ``pending`` ends by approval alone, and a database constraint says so too.
"""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """What the registry says of a node."""

    PENDING = "pending"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    OFFLINE = "offline"
    DRAINING = "draining"


class Trigger(Enum):
    """What may move a node from one status to another."""

    APPROVE = "an admin approved it"
    RESTARTED = "its worker restarted and registered again"
    REGISTERED = "the same worker process registered again"
    HEARTBEAT = "it sent a heartbeat"
    RECOVERED = "it beats and has its route again"
    STALE = "it was silent for too long"
    DEPARTED = "its tunnel was lost for longer than the grace"
    LEFT = "its worker said good-bye"
    DRAIN = "somebody asked to drain it"
    RESUME = "somebody asked to resume it"


_P, _H, _U, _O, _D = Status.PENDING, Status.HEALTHY, Status.UNHEALTHY, Status.OFFLINE, Status.DRAINING

TRANSITIONS: dict[tuple[Status, Trigger], Status] = {
    (_P, Trigger.APPROVE): _H,
    (_H, Trigger.STALE): _O,
    (_H, Trigger.DEPARTED): _U,
    (_H, Trigger.LEFT): _O,
    (_H, Trigger.DRAIN): _D,
    (_U, Trigger.RESTARTED): _H,
    (_U, Trigger.REGISTERED): _H,
    (_U, Trigger.RECOVERED): _H,
    (_U, Trigger.STALE): _O,
    (_U, Trigger.LEFT): _O,
    (_U, Trigger.DRAIN): _D,
    (_O, Trigger.RESTARTED): _H,
    (_O, Trigger.REGISTERED): _H,
    (_O, Trigger.HEARTBEAT): _H,
    (_O, Trigger.RECOVERED): _H,
    (_O, Trigger.DRAIN): _D,
    (_D, Trigger.RESTARTED): _H,
    (_D, Trigger.LEFT): _O,
    (_D, Trigger.RESUME): _H,
}
"""Every change there is; any other pair leaves the status as it was."""


def step(status: Status, trigger: Trigger) -> Status:
    """The status after ``trigger``."""
    return TRANSITIONS.get((status, trigger), status)
