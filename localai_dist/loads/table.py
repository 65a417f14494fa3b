"""The rows of load jobs: claimed, advanced, beaten, ended. The statements are in ``store/sql/load_jobs.sql``."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from localai_dist.ids import InstanceId, NodeId
from localai_dist.loads.cause import cause_text
from localai_dist.loads.status import JobState, LoadStatus
from localai_dist.registry.acting import acts_on
from localai_dist.staging.progress import Progress
from localai_dist.store.statements import load_statements

_SQL = load_statements("load_jobs.sql")

SILENCE = 5.0
"""Seconds without a heartbeat before an owner that is in no live instances row is believed gone (five beats)."""

FAILED_KEPT = 15.0
"""How long a failed job's row stays (s)."""

UNCLAIMED_KEPT = 600.0
"""How long an orphan waits for a frontend that knows its model (s)."""


class PoolLike(Protocol):
    """What is needed of the database pool."""

    def fetch(self, statement: str, params: Mapping[str, Any]) -> Awaitable[list[dict[str, Any]]]:
        """Rows."""

    def fetch_one(self, statement: str, params: Mapping[str, Any]) -> Awaitable[dict[str, Any] | None]:
        """One row or none."""

    def execute(self, statement: str, params: Mapping[str, Any]) -> Awaitable[int]:
        """Rows changed."""


@dataclass(frozen=True, slots=True)
class Claim:
    """
    The right to run one attempt of one job.

    Attributes:
        key: the model's name.
        attempt: the fence; unique over all jobs, also after the row was deleted.
        node: the node that the attempt taken over had chosen, or empty.
    """

    key: str
    attempt: int
    node: NodeId


@dataclass(frozen=True, slots=True)
class Loaded:
    """The replica that a finished load leaves."""

    node: NodeId
    replica_index: int
    address: str
    backend_token: str
    backend_type: str
    revision: str


@dataclass(frozen=True, slots=True)
class JobRow:
    """
    One job as the database has it.

    Attributes:
        orphaned: nobody runs it any more; it may be claimed.
        error: the encoded cause of the last failure: of this attempt in state failed, else of the one before it.
    """

    key: str
    attempt: int
    state: JobState
    owner: InstanceId
    orphaned: bool
    error: str
    status: LoadStatus


class JobTable:
    """
    The jobs of all frontends, written by this one.

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
    async def claim(self, key: str) -> Claim | None:
        """The right to load ``key``, or None while somebody else does; raises ``StoreUnavailable``, as all here do."""
        row = await self._pool.fetch_one(_SQL["claim"], {"key": key, **self._times})
        return None if row is None else Claim(key, row["attempt"], NodeId(row["node_id"]))

    async def advance(self, claim: Claim, state: JobState, *, node: NodeId, node_name: str, replica_index: int) -> bool:
        """Write the next state; False = the job was taken over."""
        values = {"state": state.value, "node": node, "node_name": node_name, "replica_index": replica_index}
        return await self._write("advance", claim, values)

    async def beat(self, claim: Claim, progress: Progress) -> bool:
        """Say that the job is alive and how far it is; False = the job was taken over."""
        values = {
            "bytes_sent": progress.bytes_sent,
            "total_bytes": progress.total_bytes,
            "file_index": progress.file_index,
            "total_files": progress.total_files,
            "moved": progress.moved,
        }
        return await self._write("beat", claim, values)

    async def fail(self, claim: Claim, error: str) -> bool:
        """End the job with an encoded cause; False = the job was taken over."""
        return await self._write("fail", claim, {"error": error})

    @acts_on("fenced", "load_jobs.finish")
    async def finish(self, claim: Claim, loaded: Loaded) -> bool:
        """Trade the job's row for the replica's; False = the job was taken over, and nothing changed."""
        values = {
            "node": loaded.node,
            "replica_index": loaded.replica_index,
            "address": loaded.address,
            "backend_token": loaded.backend_token,
            "backend_type": loaded.backend_type,
            "revision": loaded.revision,
        }
        return await self._pool.fetch_one(_SQL["finish"], {**self._fence(claim), **values}) is not None

    @acts_on("fenced", "load_jobs.drop")
    async def drop(self, claim: Claim) -> bool:
        """Give the claim back before anything was done with it."""
        return await self._write("drop", claim, {})

    async def abandon(self, claim: Claim) -> bool:
        """Let another frontend have the job at once."""
        return await self._write("abandon", claim, {})

    async def read(self, key: str) -> JobRow | None:
        """The job of ``key``."""
        row = await self._pool.fetch_one(_SQL["read"], {"key": key, **self._times})
        return None if row is None else _job(row)

    async def all(self) -> list[JobRow]:
        """Every job, the oldest first."""
        return [_job(row) for row in await self._pool.fetch(_SQL["all"], self._times)]

    @acts_on("expired", "load_jobs.sweep")
    async def sweep(self) -> int:
        """Remove failures everybody has seen and orphans nobody wanted; how many."""
        times = {**self._times, "failed_kept": FAILED_KEPT, "unclaimed_kept": UNCLAIMED_KEPT}
        return await self._pool.execute(_SQL["sweep"], times)

    async def _write(self, name: str, claim: Claim, values: Mapping[str, Any]) -> bool:
        return await self._pool.execute(_SQL[name], {**self._times, **self._fence(claim), **values}) > 0

    def _fence(self, claim: Claim) -> dict[str, Any]:
        return {"key": claim.key, "owner": self._instance, "attempt": claim.attempt}


def _job(row: Mapping[str, Any]) -> JobRow:
    state = JobState(row["state"])
    status = LoadStatus(
        model=row["tracking_key"],
        state=state.value,
        node=row["node_name"] or row["node_id"],
        bytes_sent=row["bytes_sent"],
        total_bytes=row["total_bytes"],
        file_index=row["file_index"],
        total_files=row["total_files"],
        error=cause_text(row["last_error"]) if state is JobState.FAILED else "",
    )
    owner = InstanceId(row["owner_replica"])
    return JobRow(row["tracking_key"], row["attempt"], state, owner, row["orphaned"], row["last_error"], status)
