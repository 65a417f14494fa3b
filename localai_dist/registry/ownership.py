"""Who holds a node's tunnel: claims with epochs, and presence by one statement."""

from __future__ import annotations

from collections.abc import Sequence

from localai_dist.ids import Epoch, InstanceId, NodeId, NodeNames
from localai_dist.registry.acting import acts_on
from localai_dist.registry.presence import Presence, RouteFact, presence_of, route_of
from localai_dist.store.connection import Row
from localai_dist.store.errors import FencedOut, StoreUnavailable
from localai_dist.store.pool import Pool
from localai_dist.store.statements import load_statements

SQL = load_statements("ownership.sql")


class Ownership:
    """
    The ownership rows. Every method raises ``StoreUnavailable`` when the database can't answer.

    Args:
        live_window: a frontend not seen for longer owns nothing (s, database clock).
        names: told the name of each node that is asked for.
    """

    def __init__(self, pool: Pool, *, live_window: float, names: NodeNames | None = None) -> None:
        self._pool = pool
        self._live_window = live_window
        self._names = names or NodeNames()

    async def claim(self, node: NodeId, instance: InstanceId) -> Epoch:
        """
        Take the node's tunnel; the last claim wins.

        Cancelling leaves it open whether the claim was made: whoever cancels must claim again or let the next one win.
        """
        row = await self._pool.fetch_one(SQL["claim"], {"node": node, "instance": instance})
        if row is None:
            raise StoreUnavailable("the claim returned no epoch")
        return Epoch(row["epoch"])

    async def reclaim(self, node: NodeId, instance: InstanceId, epoch: Epoch) -> Epoch:
        """
        Take a tunnel back that this instance claimed with ``epoch`` and still holds.

        Raises:
            FencedOut: somebody claimed it since; nothing was changed.
        """
        values = {"node": node, "instance": instance, "epoch": epoch}
        row = await self._pool.fetch_one(SQL["reclaim"], values)
        if row is None:
            raise self._fenced_out(node, epoch)
        return Epoch(row["epoch"])

    async def adopt(self, nodes: Sequence[NodeId], instance: InstanceId) -> dict[NodeId, Epoch]:
        """
        Take those of ``nodes`` whose row says that nobody owns them; a row with an owner is left alone.

        Called at each beat with the nodes whose tunnel this instance holds: a second tunnel of a node may have come
        and gone at another frontend, and its end must not make the living one count as lost.

        Returns:
            The new epoch of each node taken.
        """
        if not nodes:
            return {}
        rows = await self._pool.fetch(SQL["adopt"], {"nodes": list(nodes), "instance": instance})
        return {NodeId(row["node_id"]): Epoch(row["epoch"]) for row in rows}

    @acts_on("fenced", "ownership.release")
    async def release(self, node: NodeId, instance: InstanceId, epoch: Epoch) -> None:
        """
        Give the tunnel up, if it is still this very claim.

        Raises:
            FencedOut: somebody claimed it since; nothing was changed.
        """
        values = {"node": node, "instance": instance, "epoch": epoch}
        if await self._pool.execute(SQL["release"], values) == 0:
            raise self._fenced_out(node, epoch)

    async def route(self, node: NodeId, *, grace: float) -> RouteFact:
        """Where the node is and how to get to its owner, by one statement."""
        rows = await self._presence([node], grace)
        if not rows:
            raise StoreUnavailable("the presence query returned nothing")
        return route_of(rows[0])

    async def presence_many(self, nodes: Sequence[NodeId], grace: float) -> dict[NodeId, Presence]:
        """Where each of these nodes is, by one statement."""
        return {NodeId(row["node_id"]): presence_of(row) for row in await self._presence(nodes, grace)}

    async def held_by(self, instance: InstanceId) -> dict[NodeId, Epoch]:
        """The nodes a frontend owns, with their epochs."""
        rows = await self._pool.fetch(SQL["held_by"], {"instance": instance})
        return {NodeId(row["node_id"]): Epoch(row["epoch"]) for row in rows}

    def _fenced_out(self, node: NodeId, epoch: Epoch) -> FencedOut:
        return FencedOut(f"the tunnel of node {self._names(node)} was claimed by somebody else since epoch {epoch}")

    async def _presence(self, nodes: Sequence[NodeId], grace: float) -> list[Row]:
        values = {"nodes": list(dict.fromkeys(nodes)), "grace": grace, "window": self._live_window}
        rows = await self._pool.fetch(SQL["presence"], values)
        for row in rows:
            self._names.learn(row["node_id"], row["name"])
        return rows
