"""How loads ended: read for estimates, for room on disks, and for the waiters of a load cancelled elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localai_dist.ids import NodeId
from localai_dist.loads.rows import PoolLike
from localai_dist.loads.speed import PastLoad
from localai_dist.registry.acting import acts_on
from localai_dist.store.statements import load_statements
from localai_dist.units import HOUR

_SQL = load_statements("load_endings.sql")

RECENT = 20
"""How many earlier loads on a node an estimate rests on, at most."""

KEPT = 30 * 24 * HOUR
"""How long an ending is kept that a newer one follows (s)."""


class Endings:
    """The endings of all frontends' loads. Every coroutine raises ``StoreUnavailable``."""

    def __init__(self, pool: PoolLike) -> None:
        self._pool = pool

    async def cancelled(self, key: str, attempt: int) -> str | None:
        """Why that attempt was cancelled; None when it was not."""
        row: dict[str, Any] | None = await self._pool.fetch_one(_SQL["cancelled"], {"key": key, "attempt": attempt})
        return None if row is None else row["reason"] or "cancelled"

    async def staged(self, key: str) -> Mapping[NodeId, int]:
        """Bytes of a model that nodes have already, as far as the last load there tells."""
        rows = await self._pool.fetch(_SQL["staged"], {"key": key})
        return {NodeId(row["node_id"]): row["bytes"] for row in rows}

    async def recent(self, node: NodeId) -> list[PastLoad]:
        """The last measured loads on a node."""
        rows = await self._pool.fetch(_SQL["recent"], {"node": node, "most": RECENT})
        return [PastLoad(row["total_bytes"], row["rate"], row["load_seconds"]) for row in rows]

    @acts_on("expired", "load_endings.forget")
    async def sweep(self) -> int:
        """Forget what nothing rests on any more; how many."""
        return await self._pool.execute(_SQL["forget"], {"kept": KEPT})
