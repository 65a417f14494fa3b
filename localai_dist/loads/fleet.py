"""The registry's rows as the facts that placement decides on."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Protocol

import msgspec

from localai_dist.ids import NodeId
from localai_dist.scheduler.facts import NodeFacts, ReplicaFacts, Tie
from localai_dist.scheduler.placement import Need, NoPlace, Placement, choose, warm


class NodeRow(Protocol):
    """A registered node (``registry.Node``)."""

    @property
    def id(self) -> NodeId: ...
    @property
    def name(self) -> str: ...
    @property
    def node_type(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def approved(self) -> bool: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def total_disk(self) -> int: ...
    @property
    def available_disk(self) -> int: ...
    @property
    def available_vram(self) -> int: ...
    @property
    def max_replicas_per_model(self) -> int: ...


class ReplicaRow(Protocol):
    """One replica's row (``registry.Replica``)."""

    @property
    def node_id(self) -> NodeId: ...
    @property
    def model_name(self) -> str: ...
    @property
    def replica_index(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def backend_token(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def last_used(self) -> datetime: ...
    @property
    def config_revision(self) -> str: ...


class PresenceRow(Protocol):
    """What PostgreSQL says about one tunnel (``registry.Presence``)."""

    @property
    def state(self) -> Enum: ...


class SchedulingRowLike(Protocol):
    """One model's scheduling rule (``registry.SchedulingRow``)."""

    @property
    def node_selector(self) -> Any: ...


class NodesLike(Protocol):
    def all(self) -> Awaitable[Sequence[NodeRow]]: ...


class ReplicasLike(Protocol):
    def all(self) -> Awaitable[Sequence[ReplicaRow]]: ...

    def loaded(self, model: str, revision: str | None = None) -> Awaitable[Sequence[ReplicaRow]]: ...

    def remove(
        self, node: NodeId, model: str, replica_index: int, expected_address: str | None = None
    ) -> Awaitable[bool]: ...


class SchedulingLike(Protocol):
    def get(self, model: str) -> Awaitable[SchedulingRowLike | None]: ...


class PresenceLike(Protocol):
    def presence_many(self, nodes: Sequence[NodeId], grace: float) -> Awaitable[Mapping[NodeId, PresenceRow]]: ...


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

    async def warm(self, need: Need) -> ReplicaRow | None:
        """The loaded replica to use now, if there is one; raises ``StoreError``."""
        rows = {_replica(row): row for row in await self.replicas.loaded(need.model, need.revision)}
        if not rows:
            return None
        found = warm(rows, await self._ties({facts.node for facts in rows}), need)
        return None if found is None else rows[found]

    async def choose(self, need: Need) -> Placement | NoPlace:
        """The node for a cold load, or why there is none; raises ``StoreError``."""
        nodes = [_node(row) for row in await self.nodes.all()]
        rule = await self.scheduling.get(need.model)
        selector = {} if rule is None else read_selector(rule.node_selector)
        replicas = [_replica(row) for row in await self.replicas.all()]
        ties = await self._ties({node.id for node in nodes})
        if need.prefer is not None and ties.get(need.prefer) is Tie.RECONNECTING:
            # The bytes of an interrupted load are there: its tunnel is waited for, as long as the grace lasts.
            nodes = [node for node in nodes if node.id == need.prefer] or nodes
        return choose(nodes, selector, replicas, ties, need)

    async def _ties(self, nodes: set[NodeId]) -> dict[NodeId, Tie]:
        found = await self.ownership.presence_many(sorted(nodes), self.grace)
        return {node: Tie(presence.state.value) for node, presence in found.items()}


def read_selector(stored: Any) -> dict[str, str]:
    """The labels of a scheduling rule, whose column holds a JSON object in text (or nothing)."""
    if isinstance(stored, str):
        stored = msgspec.json.decode(stored) if stored.strip() else {}
    return {str(key): str(value) for key, value in dict(stored or {}).items()}


def _node(row: NodeRow) -> NodeFacts:
    return NodeFacts(
        id=row.id,
        name=row.name,
        status=_word(row.status),
        approved=row.approved,
        node_type=_word(row.node_type),
        labels=row.labels,
        total_disk=row.total_disk,
        available_disk=row.available_disk,
        available_vram=row.available_vram,
        slots=row.max_replicas_per_model,
    )


def _replica(row: ReplicaRow) -> ReplicaFacts:
    return ReplicaFacts(
        node=row.node_id,
        model=row.model_name,
        index=row.replica_index,
        state=_word(row.state),
        revision=row.config_revision,
        in_flight=row.in_flight,
        last_used=row.last_used.timestamp(),
        address=row.address,
    )


def _word(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)
