"""The registry's rows as the facts that placement decides on."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from localai_dist.ids import NodeId
from localai_dist.reach import NoRoute, Outcome
from localai_dist.registry.presence import Presence
from localai_dist.registry.records import Node, Replica, SchedulingRow
from localai_dist.scheduler.facts import NodeFacts, ReplicaFacts, Tie
from localai_dist.scheduler.placement import Need, NoPlace, Placement, choose, warm


class NodesLike(Protocol):
    """Registered nodes (``registry.Nodes``)."""

    def all(self) -> Awaitable[Sequence[Node]]:
        """Every node."""


class ReplicasLike(Protocol):
    """Replica rows (``registry.Replicas``)."""

    def all(self) -> Awaitable[Sequence[Replica]]:
        """Every replica of every model."""

    def loaded(self, model: str, revision: str | None = None) -> Awaitable[Sequence[Replica]]:
        """Those that may take a request."""

    def of_model(self, model: str) -> Awaitable[Sequence[Replica]]:
        """Every replica of a model, whatever its state."""

    def set_state(self, node: NodeId, model: str, replica_index: int, state: str) -> Awaitable[bool]:
        """Move a replica to another state."""

    def remove(
        self, node: NodeId, model: str, replica_index: int, expected_address: str | None = None
    ) -> Awaitable[bool]:
        """Forget a replica that is really gone."""

    def reap(self, replica: Replica, outcome: Outcome) -> Awaitable[bool]:
        """Forget a replica if that outcome permits it."""


class SchedulingLike(Protocol):
    """Scheduling rules (``registry.Scheduling``)."""

    def get(self, model: str) -> Awaitable[SchedulingRow | None]:
        """The model's rule."""


class PresenceLike(Protocol):
    """Tunnels as PostgreSQL knows them (``registry.Ownership``)."""

    def presence_many(self, nodes: Sequence[NodeId], grace: float) -> Awaitable[Mapping[NodeId, Presence]]:
        """Where each of these nodes is."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """
    The cluster as a load sees it.

    Attributes:
        grace: seconds a lost tunnel may take to come back.
    """

    nodes: NodesLike
    replicas: ReplicasLike
    scheduling: SchedulingLike
    ownership: PresenceLike
    grace: float

    async def warm(self, need: Need) -> Replica | None:
        """The loaded replica to use now, if there is one; raises ``StoreError``."""
        rows = {replica_facts(row): row for row in await self.replicas.loaded(need.model, need.revision)}
        if not rows:
            return None
        found = warm(rows, await self._ties({facts.node for facts in rows}), need)
        return None if found is None else rows[found]

    async def choose(self, need: Need) -> Placement | NoPlace:
        """The node for a cold load, or why there is none; raises ``StoreError``."""
        nodes = [_node(row) for row in await self.nodes.all()]
        rule = await self.scheduling.get(need.model)
        selector = {} if rule is None else rule.node_selector
        replicas = [replica_facts(row) for row in await self.replicas.all()]
        ties = await self._ties({node.id for node in nodes})
        if need.prefer is not None and ties.get(need.prefer) is Tie.RECONNECTING:
            # The bytes of an interrupted load are there: its tunnel is waited for, as long as the grace lasts.
            nodes = [node for node in nodes if node.id == need.prefer] or nodes
        return choose(nodes, selector, replicas, ties, need)

    async def connected(self) -> list[NodeId]:
        """The approved nodes whose tunnels are up; raises ``StoreError``."""
        nodes = {node.id for node in await self.nodes.all() if node.approved and node.left_at is None}
        ties = await self._ties(nodes)
        return sorted(node for node in nodes if ties.get(node) is Tie.CONNECTED)

    async def forget_departed(self, model: str) -> None:
        """
        Forget the copies of a model that is about to be loaded elsewhere because their nodes departed (BR-015).

        Inside the grace, and on a node that never dialled, they stay. Raises ``StoreError``.
        """
        rows = await self.replicas.of_model(model)
        ties = await self._ties({row.node_id for row in rows})
        for row in rows:
            if ties.get(row.node_id) is Tie.DEPARTED and row.state == "loaded":
                await self.replicas.reap(row, NoRoute(row.node_id, departed=True, name=row.node_name))

    async def _ties(self, nodes: set[NodeId]) -> dict[NodeId, Tie]:
        found = await self.ownership.presence_many(sorted(nodes), self.grace)
        return {node: Tie(presence.state.value) for node, presence in found.items()}


def _node(row: Node) -> NodeFacts:
    return NodeFacts(
        id=row.id,
        name=row.name,
        status=row.status,
        approved=row.approved,
        node_type=row.node_type,
        labels=row.labels,
        total_disk=row.total_disk,
        available_disk=row.available_disk,
        available_vram=row.available_vram,
        slots=row.max_replicas_per_model,
        left=row.left_at is not None,
    )


def replica_facts(row: Replica) -> ReplicaFacts:
    return ReplicaFacts(
        node=row.node_id,
        model=row.model_name,
        index=row.replica_index,
        state=row.state,
        revision=row.config_revision,
        in_flight=row.in_flight,
        last_used=row.last_used.timestamp() if row.last_used else 0.0,
        address=row.address,
    )
