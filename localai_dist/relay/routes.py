"""
From what the registry knows of a tunnel to what to do (pure).

Source: design §2, wire contract §4b and §7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from localai_dist.ids import InstanceId, NodeId
from localai_dist.reach import NoRoute, PeerUnreachable, Reconnecting
from localai_dist.registry.presence import RouteFact, outcome_of


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
    without = outcome_of(node, fact.presence)
    if without is not None:
        return without
    if fact.owner == this:
        return Local()
    if fact.owner is None or not fact.address:
        return PeerUnreachable(fact.owner or "unknown", "it advertises no address")
    return ViaPeer(fact.owner, fact.address)
