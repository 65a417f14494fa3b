"""The rows of load jobs: claimed, advanced, beaten, ended. The statements are in ``store/sql/load_jobs.sql``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from localai_dist.catalog.model import ModelConfig
from localai_dist.ids import InstanceId, NodeId
from localai_dist.loads.cause import encode_waits
from localai_dist.loads.lack import Lack
from localai_dist.loads.rows import Claim, JobRow, Loaded, Measured, PoolLike, job_row
from localai_dist.loads.status import JobState
from localai_dist.registry.acting import acts_on
from localai_dist.staging.progress import Progress
from localai_dist.store.statements import load_statements

_SQL = load_statements("load_jobs.sql")

SILENCE = 5.0
"""Seconds without a heartbeat before an owner that is in no live instances row is believed gone (five beats)."""

FAILED_KEPT = 15.0
"""How long a failed job's row stays (s)."""

UNCLAIMED_KEPT = 600.0
"""How long an orphan waits for a frontend that can run it (s)."""


class JobTable:
    """
    The jobs of all frontends, written by this one. Every coroutine raises ``StoreUnavailable``.

    Args:
        pool: the database.
        instance: this frontend.
        live_window: seconds after which a silent frontend is not live (s).
        orphan_after: silence after which a job is anybody's (s).
    """

    def __init__(self, pool: PoolLike, instance: InstanceId, *, live_window: float, orphan_after: float) -> None:
        self._pool = pool
        self._instance = instance
        self._times: dict[str, Any] = {
            "owner": instance,
            "live_window": live_window,
            "orphan_after": orphan_after,
            "silence": min(SILENCE, orphan_after),
        }

    @acts_on("not_live", "load_jobs.claim")
    async def claim(self, model: ModelConfig) -> Claim | None:
        """The right to load ``model``, or None while somebody else does, or this frontend said that it can't."""
        config = msgspec.json.encode(model).decode()
        values = {"key": model.name, "revision": model.revision, "config": config}
        row = await self._pool.fetch_one(_SQL["claim"], {**values, **self._times})
        return None if row is None else Claim(model.name, row["attempt"], NodeId(row["node_id"]), row["bytes_sent"])

    @acts_on("not_live", "load_jobs.claim_lacking")
    async def claim_lacking(self, model: ModelConfig, seen: JobRow) -> Claim | None:
        """The right to load ``model`` with what is here, as no frontend has all of it; None = the row has changed."""
        config = msgspec.json.encode(model).decode()
        values = {"key": model.name, "attempt": seen.attempt, "revision": model.revision, "config": config}
        row = await self._pool.fetch_one(_SQL["claim_lacking"], {**values, **self._times})
        if row is None:
            return None
        return Claim(model.name, row["attempt"], NodeId(row["node_id"]), row["bytes_sent"], seen.lacking)

    @acts_on("not_live", "load_jobs.claim_cancelled")
    async def claim_cancelled(self, key: str) -> tuple[Claim, int] | None:
        """The duty to clear away a cancelled job whose owner is gone, and its replica index; None = it is not so."""
        row = await self._pool.fetch_one(_SQL["claim_cancelled"], {"key": key, **self._times})
        if row is None:
            return None
        return Claim(key, row["attempt"], NodeId(row["node_id"]), row["bytes_sent"]), row["replica_index"]

    async def advance(self, claim: Claim, state: JobState, *, node: NodeId, node_name: str, replica_index: int) -> bool:
        """Write the next state; False = the job was taken over or cancelled."""
        values = {"state": state.value, "node": node, "node_name": node_name, "replica_index": replica_index}
        return await self._write("advance", claim, values)

    async def beat(self, claim: Claim, progress: Progress, *, phase: str, rate: float | None) -> str | None:
        """
        Say that the job is alive and how far it is.

        Returns:
            An empty text; the reason when it was cancelled; None when it was taken over.
        """
        values = {
            "bytes_sent": progress.bytes_sent,
            "total_bytes": progress.total_bytes,
            "file_index": progress.file_index,
            "total_files": progress.total_files,
            "file_name": progress.file_name,
            "moved": progress.moved,
            "phase": phase,
            "rate": rate,
            "waits": encode_waits(progress.trouble, progress.trouble_told) if progress.waits else "",
        }
        row = await self._pool.fetch_one(_SQL["beat"], {**self._fence(claim), **values})
        if row is None:
            return None
        return row["cancel_reason"] or "cancelled" if row["cancelled"] else ""

    async def fail(self, claim: Claim, error: str) -> bool:
        """End the job with an encoded cause; False = the job was taken over or cancelled."""
        return await self._write("fail", claim, {"error": error})

    @acts_on("fenced", "load_jobs.finish")
    async def finish(self, claim: Claim, loaded: Loaded, measured: Measured) -> bool:
        """Trade the job's row for the replica's; False = it was taken over or cancelled, and nothing changed."""
        values = {
            "node": loaded.node,
            "replica_index": loaded.replica_index,
            "address": loaded.address,
            "backend_token": loaded.backend_token,
            "backend_type": loaded.backend_type,
            "revision": loaded.revision,
            "total_bytes": measured.total_bytes,
            "moved": measured.moved,
            "rate": measured.rate,
            "load_seconds": measured.load_seconds,
        }
        return await self._pool.fetch_one(_SQL["finish"], {**self._fence(claim), **values}) is not None

    @acts_on("fenced", "load_jobs.drop")
    async def drop(self, claim: Claim) -> bool:
        """Give the claim back before anything was done with it."""
        return await self._write("drop", claim, {})

    async def offer(self, claim: Claim, lack: Lack) -> bool:
        """Leave the job to a frontend that has its files; ``lack`` is what this one lacks."""
        return await self._write("offer", claim, {"lack": msgspec.json.encode(lack.as_json()).decode()})

    async def refuse(self, row: JobRow, error: str) -> bool:
        """End a job that nobody can run; False = somebody took it meanwhile."""
        values = {"key": row.key, "attempt": row.attempt, "error": error, **self._times}
        return await self._pool.execute(_SQL["refuse"], values) > 0

    async def abandon(self, claim: Claim) -> bool:
        """Let another frontend have the job at once."""
        return await self._write("abandon", claim, {})

    async def cancel(self, key: str, reason: str) -> bool:
        """Mark the job as cancelled, wherever it runs; False = there is none. A mark is never taken back."""
        return await self._pool.fetch_one(_SQL["cancel"], {"key": key, "reason": reason}) is not None

    @acts_on("asked", "load_jobs.close_cancelled")
    async def close_cancelled(self, claim: Claim) -> bool:
        """End a cancelled job once nothing of it is left; its ending is kept for the waiters elsewhere."""
        return await self._write("close_cancelled", claim, {})

    async def read(self, key: str) -> JobRow | None:
        """The job of ``key``."""
        row = await self._pool.fetch_one(_SQL["read"], {"key": key, **self._times})
        return None if row is None else job_row(row)

    async def all(self) -> list[JobRow]:
        """Every job, the oldest first."""
        return [job_row(row) for row in await self._pool.fetch(_SQL["all"], self._times)]

    @acts_on("expired", "load_jobs.sweep")
    async def sweep(self) -> int:
        """Remove failures everybody has seen and orphans nobody wanted; how many."""
        times = {**self._times, "failed_kept": FAILED_KEPT, "unclaimed_kept": UNCLAIMED_KEPT}
        return await self._pool.execute(_SQL["sweep"], times)

    async def _write(self, name: str, claim: Claim, values: Mapping[str, Any]) -> bool:
        return await self._pool.execute(_SQL[name], {**self._times, **self._fence(claim), **values}) > 0

    def _fence(self, claim: Claim) -> dict[str, Any]:
        return {"key": claim.key, "owner": self._instance, "attempt": claim.attempt}
