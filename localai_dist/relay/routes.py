"""
From what the registry knows of a tunnel to what to do (pure).

Source: design §2, wire contract §4b and §7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, assert_never

from localai_dist.ids import InstanceId, NodeId
from localai_dist.reach import NoRoute, PeerUnreachable, Reconnecting
from localai_dist.registry.ownership import PresenceState, RouteFact


@dataclass(frozen=True, slots=True)
class Local:
    """The registry names this very frontend."""


@dataclass(frozen=True, slots=True)
class ViaPeer:
    """Another live frontend holds the tunnel; ``address`` is ``host:port``."""

    owner: InstanceId
    address: str


Route: TypeAlias = Local | ViaPeer | NoRoute | Reconnecting | PeerUnreachable


def decide(node: NodeId, fact: RouteFact, *, this: InstanceId) -> Route:
    """
    The way to ``node`` from frontend ``this``, or which condition stands in it.

    Args:
        fact: one reading of the registry.
    """
    match fact.presence.state:
        case PresenceState.CONNECTED:
            return _owned(fact, this)
        case PresenceState.RECONNECTING:
            return Reconnecting(node)
        case PresenceState.DEPARTED:
            return NoRoute(node, departed=True)
        case PresenceState.NEVER_DIALLED:
            return NoRoute(node, departed=False)
        case _:
            assert_never(fact.presence.state)


def _owned(fact: RouteFact, this: InstanceId) -> Route:
    if fact.owner == this:
        return Local()
    if fact.owner is None or not fact.address:
        return PeerUnreachable(fact.owner or "unknown", "it advertises no address")
    return ViaPeer(fact.owner, fact.address)
