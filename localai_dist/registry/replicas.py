"""Loaded copies of models on nodes."""

from __future__ import annotations

from localai_dist.ids import InstanceId, NodeId
from localai_dist.reach import Outcome, may_reap
from localai_dist.registry.acting import acts_on
from localai_dist.registry.records import REPLICA_STATES, Replica, replica_of
from localai_dist.store.errors import StoreUnavailable
from localai_dist.store.pool import Pool
from localai_dist.store.statements import load_statements

SQL = load_statements("replicas.sql")


class Replicas:
    """
    The replica rows. Every method raises ``StoreUnavailable`` when the database can't answer.

    Args:
        caller: the frontend whose requests are counted: its counts go when it dies. Empty: nobody's.
    """

    def __init__(self, pool: Pool, *, caller: InstanceId | None = None) -> None:
        self._pool = pool
        self._caller = caller or ""

    async def loaded(self, model: str, revision: str | None = None) -> list[Replica]:
        """Replicas that may take a request, the best first; with ``revision`` only those of that configuration."""
        return await self._many("loaded", model=model, revision=revision)

    async def of_model(self, model: str) -> list[Replica]:
        """Every replica of a model, whatever its state and its node's."""
        return await self._many("of_model", model=model)

    async def for_node(self, node: NodeId) -> list[Replica]:
        """Every replica on a node."""
        return await self._many("for_node", node=node)

    async def all(self) -> list[Replica]:
        """Every replica."""
        return await self._many("all")

    async def get(self, node: NodeId, model: str, replica_index: int) -> Replica | None:
        """One replica, or None."""
        found = await self._many("get", node=node, model=model, index=replica_index)
        return found[0] if found else None

    async def put(
        self,
        node: NodeId,
        model: str,
        replica_index: int,
        address: str,
        backend_token: str,
        backend_type: str,
        state: str,
        revision: str,
        *,
        loading_by: str = "",
    ) -> Replica:
        """
        Record a replica, or where it is now; requests in flight are forgotten when its address changed.

        Raises:
            ValueError: no such state.
            StatementFailed: the node was removed.
        """
        found = await self._many(
            "put",
            node=node,
            model=model,
            index=replica_index,
            address=address,
            backend_token=backend_token,
            backend_type=backend_type,
            state=_known(state),
            revision=revision,
            loading_by=loading_by,
        )
        if not found:
            raise StoreUnavailable("the replica's row did not come back")
        return found[0]

    async def touch(self, node: NodeId, model: str, replica_index: int) -> bool:
        """Say that the replica was used just now; False when it has no row."""
        return await self._changed("touch", node=node, model=model, index=replica_index)

    async def begin(self, node: NodeId, model: str, replica_index: int, *, address: str | None = None) -> bool:
        """A request starts: one more in flight; False when the replica is not loaded (at that address) any more."""
        return await self._counted("begin", node, model, replica_index, address)

    async def end(self, node: NodeId, model: str, replica_index: int, *, address: str | None = None) -> bool:
        """A request ended: one fewer in flight, never below zero; False when the row (at that address) is gone."""
        return await self._counted("end", node, model, replica_index, address)

    @acts_on("asked", "replicas.set_state")
    async def set_state(self, node: NodeId, model: str, replica_index: int, state: str) -> bool:
        """
        Move a replica to another state, asked for by the operation that owns it; False when it has no row.

        Raises:
            ValueError: no such state.
        """
        return await self._changed("set_state", node=node, model=model, index=replica_index, state=_known(state))

    @acts_on("may_reap", "replicas.remove")
    async def remove(self, node: NodeId, model: str, replica_index: int, expected_address: str | None = None) -> bool:
        """
        Forget a replica that is really gone: its process answered so, or ``reach.may_reap`` said so.

        Args:
            expected_address: only if that process is still the one on record.

        Returns:
            Whether a row was deleted.
        """
        return await self._changed("remove", node=node, model=model, index=replica_index, address=expected_address)

    async def reap(self, replica: Replica, outcome: Outcome) -> bool:
        """Forget the replica that was asked, if what came of asking permits it; whether a row was deleted."""
        if not may_reap(outcome):
            return False
        return await self.remove(replica.node_id, replica.model_name, replica.replica_index, replica.address)

    async def _many(self, name: str, **values: object) -> list[Replica]:
        return [replica_of(row) for row in await self._pool.fetch(SQL[name], values)]

    async def _counted(self, name: str, node: NodeId, model: str, index: int, address: str | None) -> bool:
        return await self._changed(name, node=node, model=model, index=index, address=address, caller=self._caller)

    async def _changed(self, name: str, **values: object) -> bool:
        return await self._pool.execute(SQL[name], values) > 0


def _known(state: str) -> str:
    if state not in REPLICA_STATES:
        raise ValueError(f"{state!r} is no state of a replica")
    return state
