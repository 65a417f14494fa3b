"""
Where a model goes: a warm replica, else the node that suits it best. Pure: facts in, a decision out.

A node suits when it is an approved backend node that matches the selector, its tunnel is connected, it is healthy, it
has room on its disk and a free replica slot; among those the one asked for (a resumed load), else the idlest. A node
whose tunnel is lost for less than the grace is not replaced by another copy elsewhere while a replica on it may come
back: ``warm`` names that replica, and the caller waits for it.

Source: design §2 (placement), internals §2a, §2b.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from localai_dist.errors import LocalAIDistError
from localai_dist.ids import NodeId
from localai_dist.reach import NoRoute, Outcome, Reconnecting
from localai_dist.scheduler.facts import NodeFacts, ReplicaFacts, Tie
from localai_dist.units import GiB, format_size

UNKNOWN_PAYLOAD: int = 2 * GiB
"""Room a node must have when the model's size is not known (bytes)."""

_LEAST_MARGIN = 1 * GiB


class NoPlace(LocalAIDistError):
    """
    No node can take the model now.

    Attributes:
        reason: one sentence; names the nodes and what each lacks.
        outcome: set when nodes would suit and only their tunnels are missing: the condition to report (design §2).
    """

    def __init__(self, reason: str, outcome: Outcome | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Need:
    """
    What is to be placed.

    Attributes:
        model: its name.
        revision: the configuration's hash; replicas of another one serve no new request.
        payload: bytes of its files; None when unknown.
        prefer: the node that an earlier attempt of this load chose, so that its bytes are resumed.
        staged: bytes of it that nodes have on their disks already.
    """

    model: str
    revision: str
    payload: int | None = None
    prefer: NodeId | None = None
    staged: Mapping[NodeId, int] = field(default_factory=dict, hash=False)

    def room(self, node: NodeId) -> int:
        """Free disk bytes a node must have: what of the payload is not there, and 5 % of it, at least 1 GiB."""
        if self.payload is None:
            return UNKNOWN_PAYLOAD
        return max(0, self.payload - self.staged.get(node, 0)) + max(self.payload // 20, _LEAST_MARGIN)


@dataclass(frozen=True, slots=True)
class Placement:
    """
    Where to load.

    Attributes:
        node: the node's id.
        node_name: for people.
        replica_index: the lowest free slot.
        replaces: a replica of an older revision that must be stopped first, because it holds the slot.
    """

    node: NodeId
    node_name: str
    replica_index: int
    replaces: ReplicaFacts | None = None


def warm(replicas: Iterable[ReplicaFacts], presence: Mapping[NodeId, Tie], need: Need) -> ReplicaFacts | None:
    """
    The loaded replica to use: connected before reconnecting, then the least busy, then the longest unused.

    Replicas on departed nodes, and on nodes that never dialled, are not among them.
    """
    usable = [
        (tie, replica)
        for replica in replicas
        if replica.model == need.model
        and replica.state == "loaded"
        and replica.revision == need.revision
        and (tie := _tie(presence, replica.node)) in (Tie.CONNECTED, Tie.RECONNECTING)
    ]
    if not usable:
        return None
    return min(usable, key=lambda one: (one[0] is not Tie.CONNECTED, one[1].in_flight, one[1].last_used))[1]


def choose(
    candidates: Sequence[NodeFacts],
    selector: Mapping[str, str],
    replicas: Sequence[ReplicaFacts],
    presence: Mapping[NodeId, Tie],
    need: Need,
) -> Placement | NoPlace:
    """
    The node for a cold load, or why there is none.

    Args:
        candidates: every registered node.
        selector: labels a node must have, all of them.
        replicas: every replica row of every model.
        presence: what PostgreSQL says about each node's tunnel.
    """
    approved = [node for node in candidates if node.node_type == "backend" and node.approved]
    if not approved:
        return NoPlace("no worker is registered and approved")
    matching = [node for node in approved if matches(node, selector)]
    if not matching:
        return NoPlace(f"no node has the labels {_labels(selector)} that the scheduling rule of {need.model} asks for")
    serving = [node for node in matching if node.status != "draining"]
    if not serving:
        return NoPlace(f"every node that suits is draining: {_names(matching)}")
    connected = [node for node in serving if _tie(presence, node.id) is Tie.CONNECTED]
    if not connected:
        # Nobody waits for a worker that said good-bye, unless it holds the bytes of this very load (a restart).
        expected = [node for node in serving if not node.left or node.id == need.prefer]
        if not expected:
            return NoPlace(f"every node that suits was stopped on purpose: {_names(serving)}; start its worker again")
        return _unrouted(expected, presence)
    return _among(connected, replicas, need)


def matches(node: NodeFacts, selector: Mapping[str, str]) -> bool:
    """Whether ``node`` has every label of ``selector``."""
    return all(node.labels.get(key) == value for key, value in selector.items())


def _among(connected: Sequence[NodeFacts], replicas: Sequence[ReplicaFacts], need: Need) -> Placement | NoPlace:
    healthy = [node for node in connected if node.status == "healthy"]
    if not healthy:
        return NoPlace("no node is healthy: " + _each(connected, lambda node: node.status))
    roomy = [node for node in healthy if has_room(node, need.room(node.id))]
    if not roomy:
        return NoPlace(f"no node has the disk space for {need.model}: {_each(healthy, lambda node: _room(node, need))}")
    slots = {node.id: slot for node in roomy if (slot := _slot(node, replicas, need)) is not None}
    open_nodes = [node for node in roomy if node.id in slots]
    if not open_nodes:
        return NoPlace(f"every replica slot for {need.model} is taken: {_each(roomy, _slots_text)}")
    best = min(open_nodes, key=lambda node: _order(node, replicas, need))
    index, replaces = slots[best.id]
    return Placement(best.id, best.name, index, replaces)


def has_room(node: NodeFacts, room: int) -> bool:
    """Whether ``node`` has ``room`` bytes free; a node that reports no disk at all is not excluded."""
    return node.total_disk == 0 or node.available_disk >= room


def _slot(node: NodeFacts, replicas: Sequence[ReplicaFacts], need: Need) -> tuple[int, ReplicaFacts | None] | None:
    """The lowest free replica index, or one that an older revision holds and must give up."""
    held = {row.index: row for row in replicas if row.node == node.id and row.model == need.model}
    slots = range(max(1, node.slots))
    for index in slots:
        if index not in held:
            return index, None
    for index in slots:
        if held[index].revision != need.revision:
            return index, held[index]
    return None


def _order(node: NodeFacts, replicas: Sequence[ReplicaFacts], need: Need) -> tuple[bool, bool, int, int, int, str]:
    held = [row for row in replicas if row.node == node.id]
    return (
        node.id != need.prefer,
        bool(held),
        sum(row.in_flight for row in held),
        len(held),
        -node.available_vram,
        node.name,
    )


def _unrouted(nodes: Sequence[NodeFacts], presence: Mapping[NodeId, Tie]) -> NoPlace:
    """The condition that is nearest to passing by itself, of the nodes that would suit if they were connected."""
    ties = [(_tie(presence, node.id), node) for node in nodes]
    for wanted in (Tie.RECONNECTING, Tie.DEPARTED, Tie.NEVER_DIALLED):
        for tie, node in ties:
            if tie is wanted:
                return NoPlace(f"no node that suits is connected: {_names(nodes)}", _outcome(tie, node.name))
    return NoPlace(f"no node that suits is connected: {_names(nodes)}")


def _outcome(tie: Tie, node: str) -> Outcome:
    if tie is Tie.RECONNECTING:
        return Reconnecting(node)
    return NoRoute(node, departed=tie is Tie.DEPARTED)


def _tie(presence: Mapping[NodeId, Tie], node: NodeId) -> Tie:
    return presence.get(node, Tie.NEVER_DIALLED)


def _room(node: NodeFacts, need: Need) -> str:
    free, total = format_size(node.available_disk), format_size(node.total_disk)
    return f"needs {format_size(need.room(node.id))} and has {free} free of {total}"


def _slots_text(node: NodeFacts) -> str:
    return f"{max(1, node.slots)} of {max(1, node.slots)}"


def _each(nodes: Collection[NodeFacts], say: Callable[[NodeFacts], str]) -> str:
    return ", ".join(f"{node.name} {say(node)}" for node in nodes)


def _names(nodes: Collection[NodeFacts]) -> str:
    return ", ".join(node.name for node in nodes)


def _labels(selector: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(selector.items()))
