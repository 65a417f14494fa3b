"""The tick that keeps every node's status true; each frontend runs one, and all of them agree."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from localai_dist.health.departure import Departures
from localai_dist.health.verdict import Demote, Leave, Promote, judge
from localai_dist.ids import NodeId, NodeNames
from localai_dist.reach import Outcome, describe
from localai_dist.registry.presence import NEVER_DIALLED, Presence
from localai_dist.registry.records import Node
from localai_dist.store.errors import StoreError


class NodesLike(Protocol):
    """Registered nodes (``registry.Nodes``)."""

    def all(self) -> Awaitable[Sequence[Node]]:
        """Every node."""

    def mark_stale_offline(self, stale_after: float) -> Awaitable[Sequence[NodeId]]:
        """Set silent nodes offline, and name them."""

    def mark_unhealthy(self, node_id: NodeId, outcome: Outcome) -> Awaitable[bool]:
        """Take a node out of placement."""

    def mark_healthy(self, node_id: NodeId, *, fresh_within: float) -> Awaitable[bool]:
        """Take a node into placement again."""


class PresenceLike(Protocol):
    """Tunnels as PostgreSQL knows them (``registry.Ownership``)."""

    def presence_many(self, nodes: Sequence[NodeId], grace: float) -> Awaitable[Mapping[NodeId, Presence]]:
        """Where each of these nodes is."""


class HealthMonitor:
    """
    Looks at every node now and then.

    The statements guard themselves, so that two frontends that look at the same moment do no harm.

    Args:
        nodes, ownership: the registry.
        departures: told of every node and its presence at each look.
        clock: times the tick.
        interval: between two looks (s).
        stale_after: silence that makes a node offline (s).
        grace: how long a lost tunnel may take to come back (s).
        names: what people call the nodes.
    """

    log = Logger()

    def __init__(
        self,
        nodes: NodesLike,
        ownership: PresenceLike,
        departures: Departures,
        *,
        clock: IReactorTime,
        interval: float = 15.0,
        stale_after: float = 60.0,
        grace: float = 90.0,
        names: NodeNames | None = None,
    ) -> None:
        self._names = names or NodeNames()
        self._nodes = nodes
        self._ownership = ownership
        self._departures = departures
        self._interval = interval
        self._stale_after = stale_after
        self._grace = grace
        self._tick = LoopingCall(lambda: Deferred.fromCoroutine(self.look()))
        self._tick.clock = clock
        self._done: Deferred[LoopingCall] | None = None
        self._answered = True  # whether the database answered the last look

    def start(self) -> None:
        """Begin to look."""
        self._done = self._tick.start(self._interval, now=False)
        self._done.addErrback(lambda failure: self.log.failure("the health monitor stopped", failure))

    async def stop(self) -> None:
        """Stop looking; a look that is under way ends first."""
        if self._tick.running:
            self._tick.stop()
        if self._done is not None:
            await self._done

    async def look(self) -> None:
        """
        One look at every node.

        The first one after a look that the database did not answer calls nobody silent: no heartbeat could be written.
        """
        answered, self._answered = self._answered, False
        try:
            for silent in await self._nodes.mark_stale_offline(self._stale_after) if answered else ():
                self.log.warn(
                    "node {node} is offline: no heartbeat for {seconds} s",
                    node=self._names.with_id(silent),
                    seconds=self._stale_after,
                )
            nodes = await self._nodes.all()
            presence = await self._ownership.presence_many([node.id for node in nodes], self._grace)
            seen = [(node, presence.get(node.id, NEVER_DIALLED)) for node in nodes]
            self._departures.look(seen)
            for node, known in seen:
                await self._act(node, known)
            self._answered = True
        except StoreError as error:
            self.log.warn("node health is not known now: {error}", error=error)

    async def _act(self, node: Node, presence: Presence) -> None:
        match judge(node.name, node.status, presence):
            case Demote(outcome=outcome):
                if await self._nodes.mark_unhealthy(node.id, outcome):
                    self.log.warn("node {node} is unhealthy: {why}", node=node.name, why=describe(outcome))
            case Promote():
                if await self._nodes.mark_healthy(node.id, fresh_within=self._stale_after):
                    self.log.info("node {node} is healthy again", node=node.name)
            case Leave():
                pass
