"""What admins want of models: where they may run, in how many copies."""

from __future__ import annotations

import json

from localai_dist.registry.acting import acts_on
from localai_dist.registry.records import SchedulingRow, scheduling_of
from localai_dist.store.errors import StoreUnavailable
from localai_dist.store.pool import Pool
from localai_dist.store.statements import load_statements

SQL = load_statements("scheduling.sql")


class Scheduling:
    """The scheduling rows. Every method raises ``StoreUnavailable`` when the database can't answer."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def get(self, model: str) -> SchedulingRow | None:
        """The model's row, or None."""
        row = await self._pool.fetch_one(SQL["get"], {"model_name": model})
        return None if row is None else scheduling_of(row)

    async def put(self, row: SchedulingRow) -> SchedulingRow:
        """Create or replace a model's row; what was counted as unsatisfiable is tried again."""
        values = {
            "model_name": row.model_name,
            "node_selector": json.dumps(dict(row.node_selector), sort_keys=True) if row.node_selector else "",
            "min_replicas": row.min_replicas,
            "max_replicas": row.max_replicas,
            "spread_all": row.spread_all,
            "route_policy": row.route_policy,
            "balance_abs_threshold": row.balance_abs_threshold,
            "balance_rel_threshold": row.balance_rel_threshold,
            "min_prefix_match": row.min_prefix_match,
        }
        stored = await self._pool.fetch_one(SQL["put"], values)
        if stored is None:
            raise StoreUnavailable("the scheduling row did not come back")
        return scheduling_of(stored)

    async def all(self) -> list[SchedulingRow]:
        """Every row."""
        return [scheduling_of(row) for row in await self._pool.fetch(SQL["all"])]

    @acts_on("asked", "scheduling.delete")
    async def delete(self, model: str) -> bool:
        """Forget a model's row; whether it was there."""
        return await self._pool.execute(SQL["delete"], {"model_name": model}) > 0
