"""What can be said about a running load."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from localai_dist.errors import without_coordinates


class JobState(Enum):
    """Where a load job is. A row that is gone was a success: the replica's row is its record."""

    PENDING = "pending"
    INSTALLING = "installing"
    STAGING = "staging"
    LOADING = "loading"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """
    A running load as clients see it, the same on every frontend.

    Attributes:
        model: the model's name.
        state: pending, installing, staging or loading (failed for a few seconds after a failure).
        node: the node's name, or its id while the name is not known; empty before a node was chosen.
        bytes_sent: bytes of the model that are on the node so far, resumed and skipped ones included.
        total_bytes: bytes of all files of the model; 0 before they were listed.
        file_index: the file being moved, from 1; 0 before the first.
        eta_seconds: until the last byte is on the node; only when the rate was measured, never guessed.
        error: why it failed, in state failed; ``error_told`` is what a client may be told of it.
        waits: what keeps it from going on right now, empty while it goes on; ``waits_told`` likewise.
        phase: waiting, hashing, sending, verifying or loading.
        file_name: the file being moved.
        rate: bytes per second over the last seconds; None while nothing was measured.
        eta_range: seconds until the model is loaded: the tenth and the ninetieth percentile of what earlier loads on
            this node would have needed; None before there is a history.
        cancelled: somebody cancelled it; whoever runs it is stopping.
    """

    model: str
    state: str
    node: str = ""
    bytes_sent: int = 0
    total_bytes: int = 0
    file_index: int = 0
    total_files: int = 0
    eta_seconds: float | None = None
    error: str = ""
    phase: str = "waiting"
    file_name: str = ""
    rate: float | None = None
    eta_range: tuple[float, float] | None = None
    cancelled: bool = False
    error_told: str = ""
    waits: str = ""
    waits_told: str = ""

    @property
    def progress(self) -> float:
        """Per cent of the bytes, 0 to 100."""
        if not self.total_bytes:
            return 0.0
        return round(min(100.0, 100.0 * self.bytes_sent / self.total_bytes), 1)

    def as_json(self) -> dict[str, object]:
        """The ``loading`` object of the API (design §8), as any client may see it."""
        shown: dict[str, object] = {
            "model": self.model,
            "state": self.state,
            "node": self.node,
            "progress": self.progress,
            "bytes_sent": self.bytes_sent,
            "total_bytes": self.total_bytes,
            "file_index": self.file_index,
            "total_files": self.total_files,
        }
        if self.eta_seconds is not None:
            shown["eta_seconds"] = round(self.eta_seconds, 1)
        if self.eta_range is not None:
            shown["eta_range"] = [round(seconds, 1) for seconds in self.eta_range]
        if self.error:
            shown["error"] = self.error_told or without_coordinates(self.error)
        if self.waits:
            shown["waits"] = self._waits_for_clients()
        return shown

    def sentence(self) -> str:
        """One line for an operator: ``model X is staging on node N (41%)``, and what it waits for."""
        return self._sentence(self.waits)

    def sentence_told(self) -> str:
        """The same for a client."""
        return self._sentence(self._waits_for_clients())

    def _waits_for_clients(self) -> str:
        return self.waits and (self.waits_told or without_coordinates(self.waits))

    def _sentence(self, waits: str) -> str:
        where = f" on node {self.node}" if self.node else ""
        if self.cancelled:
            return f"the load of model {self.model}{where} is being cancelled"
        share = f" ({self.progress:.0f}%)" if self.total_bytes and self.state == JobState.STAGING.value else ""
        return f"model {self.model} is {self.state}{where}{share}" + (f"; it waits: {waits}" if waits else "")
