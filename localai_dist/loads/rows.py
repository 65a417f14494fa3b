"""What the tables of loads hold, as values."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from localai_dist.catalog.model import ModelConfig
from localai_dist.ids import InstanceId, NodeId
from localai_dist.loads.cause import decode_cause
from localai_dist.loads.lack import Lack, Resort, lack_of, last_resort
from localai_dist.loads.speed import eta
from localai_dist.loads.status import JobState, LoadStatus


class PoolLike(Protocol):
    """What is needed of the database pool."""

    def fetch(self, statement: str, params: Mapping[str, Any]) -> Awaitable[list[dict[str, Any]]]:
        """Rows."""

    def fetch_one(self, statement: str, params: Mapping[str, Any]) -> Awaitable[dict[str, Any] | None]:
        """One row or none."""

    def execute(self, statement: str, params: Mapping[str, Any]) -> Awaitable[int]:
        """Rows changed."""


NOWHERE = NodeId("")


@dataclass(frozen=True, slots=True)
class Claim:
    """
    The right to run one attempt of one job.

    Attributes:
        key: the model's name.
        attempt: the fence; unique over all jobs, also after the row was deleted.
        node: the node that the attempt taken over had chosen, or empty.
        bytes: bytes that the attempt taken over had put there.
        lacking: what each frontend lacks, when none has every file: load it with what is here.
    """

    key: str
    attempt: int
    node: NodeId
    bytes: int = 0
    lacking: Mapping[str, Lack] = field(default_factory=dict)


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
class Measured:
    """
    How a load went.

    Attributes:
        total_bytes: of all files.
        moved: bytes that had to be sent.
        rate: bytes per second while they were; None when too little moved to say.
        load_seconds: of the backend's LoadModel.
    """

    total_bytes: int = 0
    moved: int = 0
    rate: float | None = None
    load_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class JobRow:
    """
    One job as the database has it.

    Attributes:
        orphaned: nobody runs it, or not any more.
        error: the encoded cause of the last failure: of this attempt in state failed, else of the one before it.
        node: the node's id.
        cancelled: the cancel mark.
        cancel_reason: who or what cancelled it.
        cancelled_for: how long ago that was (s).
        lacking: by frontend, what it lacks of the files.
        live: the live frontends.
        offered_for: how long it has looked for a frontend that has the files (s).
        in_state_for: how long it has been in its state (s).
        revision: of the configuration that is loaded.
        config: that configuration, encoded.
    """

    key: str
    attempt: int
    state: JobState
    owner: InstanceId
    orphaned: bool
    error: str
    status: LoadStatus
    node: NodeId = NOWHERE
    cancelled: bool = False
    cancel_reason: str = ""
    cancelled_for: float = 0.0
    lacking: Mapping[str, Lack] = field(default_factory=dict)
    live: frozenset[str] = frozenset()
    offered_for: float = 0.0
    in_state_for: float = 0.0
    revision: str = ""
    config: str = ""

    @property
    def unasked(self) -> tuple[str, ...]:
        """Live frontends that have not said that they lack anything."""
        return tuple(sorted(self.live - self.lacking.keys()))

    def resort(self, me: InstanceId, patience: float) -> Resort:
        """What this frontend does about the job, if nobody runs it and it has said that it lacks something."""
        if not self.orphaned or self.cancelled or me not in self.lacking:
            return Resort.WAIT
        return last_resort(self.lacking, self.live, me, offered_for=self.offered_for, patience=patience)

    def model(self) -> ModelConfig | None:
        """The configuration that is loaded; None when another version of this program wrote it."""
        try:
            model = msgspec.json.decode(self.config, type=ModelConfig)
        except msgspec.DecodeError:
            return None
        return model if model.revision == self.revision else None


def job_row(row: Mapping[str, Any]) -> JobRow:
    """A row of ``load_jobs.read``."""
    state = JobState(row["state"])
    return JobRow(
        key=row["tracking_key"],
        attempt=row["attempt"],
        state=state,
        owner=InstanceId(row["owner_replica"]),
        orphaned=row["orphaned"],
        error=row["last_error"],
        status=_status(row, state),
        node=NodeId(row["node_id"]),
        cancelled=row["cancelled_at"] is not None,
        cancel_reason=row["cancel_reason"],
        cancelled_for=row["cancelled_for"],
        lacking={name: lack_of(written) for name, written in row["lacking"].items()},
        live=frozenset(row["live"]),
        offered_for=row["offered_for"],
        in_state_for=row["in_state_for"],
        revision=row["config_revision"],
        config=row["model_config"],
    )


def _status(row: Mapping[str, Any], state: JobState) -> LoadStatus:
    staging = state is JobState.STAGING
    failed = decode_cause(row["last_error"]) if state is JobState.FAILED and row["last_error"] else None
    waits = decode_cause(row["waits"]) if state is not JobState.FAILED and row["waits"] else None
    return LoadStatus(
        model=row["tracking_key"],
        state=state.value,
        node=row["node_name"] or row["node_id"],
        bytes_sent=row["bytes_sent"],
        total_bytes=row["total_bytes"],
        file_index=row["file_index"],
        total_files=row["total_files"],
        eta_seconds=eta(row["total_bytes"] - row["bytes_sent"], row["rate"]) if staging else None,
        error="" if failed is None else str(failed),
        error_told="" if failed is None else failed.told,
        waits="" if waits is None else str(waits),
        waits_told="" if waits is None else waits.told,
        phase=row["phase"] or "waiting",
        file_name=row["file_name"],
        rate=row["rate"] if staging else None,
        cancelled=row["cancelled_at"] is not None,
    )
