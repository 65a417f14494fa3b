"""Where a node is, as PostgreSQL says: never dialled, connected, reconnecting, departed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, assert_never

from localai_dist.ids import Epoch, InstanceId
from localai_dist.reach import NoRoute, Reconnecting


class PresenceState(Enum):
    """
    The four values. Only ``DEPARTED`` licenses action.

    Source: wire contract §7 (there ``unknown`` and ``gone`` for the first and the last).
    """

    NEVER_DIALLED = "never_dialled"
    CONNECTED = "connected"
    RECONNECTING = "reconnecting"
    DEPARTED = "departed"


@dataclass(frozen=True, slots=True)
class Presence:
    """
    Where a node is.

    Attributes:
        owner: the live frontend that holds its tunnel.
        epoch: the fencing token of the last claim.
        connected_at: when that claim was made.
        disconnected_at: since when nobody holds it.
        grace_ends_at: when reconnecting becomes departed.
        grace_left: seconds until then by the database's clock, not below 0.
        name: what people call the node; empty when the registry has no such node.
    """

    state: PresenceState
    owner: InstanceId | None = None
    epoch: Epoch | None = None
    connected_at: datetime | None = None
    disconnected_at: datetime | None = None
    grace_ends_at: datetime | None = None
    grace_left: float | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class RouteFact:
    """
    Presence, and how to get to the owner.

    Attributes:
        address: ``host:port`` of the owner; None when nobody live holds the tunnel, or its owner can't be dialled.
    """

    presence: Presence
    owner: InstanceId | None
    address: str | None
    epoch: Epoch | None


NEVER_DIALLED = Presence(PresenceState.NEVER_DIALLED)


def presence_of(row: Mapping[str, Any]) -> Presence:
    """The presence in a row of the ``presence`` statement."""
    left = row["grace_left"]
    return Presence(
        PresenceState(row["state"]),
        None if row["owner"] is None else InstanceId(row["owner"]),
        None if row["epoch"] is None else Epoch(row["epoch"]),
        row["connected_at"],
        row["disconnected_at"],
        row["grace_ends_at"],
        None if left is None else max(0.0, left),
        row["name"],
    )


def route_of(row: Mapping[str, Any]) -> RouteFact:
    """The route in a row of the ``presence`` statement."""
    presence = presence_of(row)
    return RouteFact(presence, presence.owner, row["address"] or None, presence.epoch)


def outcome_of(node: str, presence: Presence) -> NoRoute | Reconnecting | None:
    """Why ``node`` has no route, or None when a live frontend holds its tunnel."""
    match presence.state:
        case PresenceState.CONNECTED:
            return None
        case PresenceState.NEVER_DIALLED:
            return NoRoute(node, departed=False, name=presence.name)
        case PresenceState.DEPARTED:
            return NoRoute(node, departed=True, name=presence.name)
        case PresenceState.RECONNECTING:
            return Reconnecting(node, presence.grace_left, presence.name)
        case _:
            assert_never(presence.state)
