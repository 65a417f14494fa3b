"""How far one staging has come: written by the uploader, read by the load job's heartbeat."""

from __future__ import annotations

from dataclasses import dataclass

from localai_dist.errors import LocalAIDistError, without_coordinates
from localai_dist.units import format_size


@dataclass(slots=True)
class Progress:
    """
    Counters of one load.

    Attributes:
        phase: waiting, hashing, sending or verifying.
        total_bytes: bytes of all files.
        total_files: number of files.
        file_index: the file at work, from 1.
        file_name: its relative name.
        finished: bytes of the files before it.
        in_file: bytes of the file at work that are on the node, resumed ones included.
        moved: bytes this load really sent.
        floor: bytes that an earlier attempt had on the node: told until this one knows better.
        trouble: the last thing that interrupted it; ``trouble_told`` is what a client may be told of it.
        waits: whether that still keeps it from going on.
    """

    phase: str = "waiting"
    total_bytes: int = 0
    total_files: int = 0
    file_index: int = 0
    file_name: str = ""
    finished: int = 0
    in_file: int = 0
    moved: int = 0
    trouble: str = ""
    trouble_told: str = ""
    waits: bool = False
    floor: int = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes of the model that are on the node."""
        known = self.finished + self.in_file
        return known if self.moved else max(known, self.floor)

    def begin(self, total_bytes: int, total_files: int) -> None:
        """A staging of so many bytes and files begins."""
        self.total_bytes, self.total_files = total_bytes, total_files
        self.finished = self.in_file = self.file_index = 0

    def next_file(self, name: str) -> None:
        """The next file is at work."""
        self.file_index += 1
        self.file_name, self.in_file = name, 0

    def interrupted(self, error: Exception) -> None:
        """It can't go on until ``error`` has passed."""
        self.trouble = str(error) or type(error).__name__
        self.trouble_told = error.told if isinstance(error, LocalAIDistError) else without_coordinates(self.trouble)
        self.waits = True

    def goes_on(self) -> None:
        """What interrupted it has passed."""
        self.waits = False

    def sent(self, count: int) -> None:
        """The transport took ``count`` more bytes of the file at work."""
        self.in_file += count
        self.moved += count
        self.waits = False

    def file_done(self, size: int) -> None:
        """The file at work is on the node, whole."""
        self.finished += size
        self.in_file = 0

    def summary(self, seconds: float) -> str:
        """For an error's text: how far it came in ``seconds``, how fast, and what stopped it."""
        return self._summary(seconds, self.trouble)

    def summary_told(self, seconds: float) -> str:
        """The same for clients."""
        return self._summary(seconds, self.trouble_told)

    def _summary(self, seconds: float, trouble: str) -> str:
        text = f"{format_size(self.bytes_sent)} of {format_size(self.total_bytes)} done"
        if self.moved and seconds > 0:
            text += f", {format_size(round(self.moved / seconds))}/s"
        return f"{text}; last trouble: {trouble}" if trouble else text
