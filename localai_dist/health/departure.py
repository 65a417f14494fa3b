"""
The one place that says a node's route is gone, so that nobody here keeps what only made sense with it.

It speaks on the routing fact alone (*departed*: no live frontend holds the tunnel, and the loss outlived the grace):
never inside the grace, for a node that never dialled, for a query that failed, or for a silent heartbeat. Once per
departure: the epoch of the tunnel that was lost tells one departure from the next, also when the return in between was
shorter than a tick. Each frontend speaks to its own subscribers; the set of their names is closed.

Source: wire contract §9, internals §5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from twisted.logger import Logger

from localai_dist.ids import Epoch, NodeId
from localai_dist.registry.presence import Presence, PresenceState
from localai_dist.registry.records import Node

ROUTES: Final = "routes"
"""What is believed about who holds the node's tunnel (``relay.Forwarder``)."""

SUBSCRIBERS: Final = frozenset({ROUTES})
"""
Everybody who keeps something per node that departs with it. Streams and channels to a node are not among them: each
call has its own, and a lost tunnel ends them (docs/decisions/0005).
"""


@dataclass(frozen=True, slots=True)
class Departure:
    """One node's route is gone; ``node_type`` is backend or agent."""

    id: NodeId
    name: str
    node_type: str


OnDeparture: TypeAlias = Callable[[Departure], None]


class Departures:
    """
    Tells subscribers of departures.

    Args:
        subscribers: by name; exactly those in ``SUBSCRIBERS``.

    Raises:
        ValueError: a name is missing or unknown, so the frontend does not start.
    """

    log = Logger()

    def __init__(self, subscribers: Mapping[str, OnDeparture], *, names: Collection[str] = SUBSCRIBERS) -> None:
        missing, unknown = sorted(set(names) - set(subscribers)), sorted(set(subscribers) - set(names))
        if missing or unknown:
            raise ValueError(f"subscribers of departures: missing {missing}, unknown {unknown}")
        self._subscribers = dict(subscribers)
        self._announced: dict[NodeId, Epoch | None] = {}

    def look(self, seen: Collection[tuple[Node, Presence]]) -> list[Departure]:
        """
        Announce who departed since the last look; what is remembered is bounded by who was looked at.

        Args:
            seen: every node, with its presence. A look that could not read the registry is not made at all.
        """
        departed = {node.id: (node, presence.epoch) for node, presence in seen if _departed(presence)}
        new = [node for node, epoch in departed.values() if self._announced.get(node.id, ...) != epoch]
        self._announced = {id: epoch for id, (_, epoch) in departed.items()}
        return [self._announce(Departure(node.id, node.name, node.node_type)) for node in new]

    def _announce(self, departure: Departure) -> Departure:
        self.log.info("the {kind} node {node} departed", kind=departure.node_type, node=departure.name)
        for name, subscriber in self._subscribers.items():
            try:
                subscriber(departure)
            except Exception:  # noqa: BLE001 - subscribers are isolated from each other; logged with its traceback
                self.log.failure("{name} could not forget node {node}", name=name, node=departure.name)
        return departure


def _departed(presence: Presence) -> bool:
    return presence.state is PresenceState.DEPARTED
