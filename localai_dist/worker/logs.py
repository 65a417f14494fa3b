"""
The last lines each backend wrote, kept in rings; a snapshot and the subscription after it miss no line between them.

Source: surface §5.5 (its race avoided: ``subscribe`` takes the snapshot and the place in one call).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from localai_dist.ids import ProcessKey
from localai_dist.units import KiB

LINES_KEPT = 1000
"""Lines per process key."""
KEYS_KEPT = 256
"""Process keys remembered; the one that was silent longest is forgotten first."""
LINE_BYTES = 8 * KiB
"""A longer line is cut into pieces of this size."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """
    One line.

    Attributes:
        timestamp: RFC 3339, UTC.
        stream: ``stdout`` or ``stderr``.
        text: without its newline.
    """

    timestamp: str
    stream: str
    text: str


class LineCutter:
    """Chunks of bytes in, lines of text out; holds at most ``LINE_BYTES`` of an unfinished one."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that ``chunk`` finished."""
        self._rest += chunk
        lines: list[str] = []
        while True:
            end = self._rest.find(b"\n", 0, LINE_BYTES)
            if end < 0 and len(self._rest) < LINE_BYTES:
                return lines
            cut = LINE_BYTES if end < 0 else end
            lines.append(bytes(self._rest[:cut]).decode("utf-8", "replace").rstrip("\r"))
            del self._rest[: cut if end < 0 else cut + 1]

    def finish(self) -> list[str]:
        """What was left without a newline."""
        rest, self._rest = bytes(self._rest), bytearray()
        return [rest.decode("utf-8", "replace")] if rest else []


Listener = Callable[[LogLine], None]


@dataclass(slots=True)
class _Ring:
    lines: deque[LogLine] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))
    listeners: list[Listener] = field(default_factory=list)


class LogStore:
    """Rings by process key."""

    def __init__(self) -> None:
        self._rings: OrderedDict[ProcessKey, _Ring] = OrderedDict()

    def append(self, key: ProcessKey, line: LogLine) -> None:
        """Keep ``line`` and tell whoever subscribed."""
        ring = self._ring(key)
        ring.lines.append(line)
        for listener in tuple(ring.listeners):
            listener(line)

    def models(self) -> list[str]:
        """The names that have lines, sorted, without replica suffixes."""
        return sorted({key.model for key in self._rings})

    def lines(self, name: str) -> list[LogLine] | None:
        """The lines of ``model#n``, or of every replica of ``model`` merged by time; None = never heard of it."""
        rings = [ring for key, ring in self._rings.items() if name in (str(key), key.model)]
        if not rings:
            return None
        return sorted((line for ring in rings for line in ring.lines), key=lambda line: line.timestamp)

    def tail(self, key: ProcessKey, count: int, stream: str | None = None) -> list[str]:
        """The last ``count`` lines of one process (of one stream of it)."""
        ring = self._rings.get(key, _Ring())
        return [line.text for line in ring.lines if stream in (None, line.stream)][-count:]

    def subscribe(self, key: ProcessKey, listener: Listener) -> tuple[list[LogLine], Callable[[], None]]:
        """The lines so far and a way to stop; every later line goes to ``listener``, none twice, none missed."""
        ring = self._ring(key)
        ring.listeners.append(listener)

        def stop() -> None:
            if listener in ring.listeners:
                ring.listeners.remove(listener)

        return list(ring.lines), stop

    def _ring(self, key: ProcessKey) -> _Ring:
        ring = self._rings.setdefault(key, _Ring())
        self._rings.move_to_end(key)
        self._forget(candidate for candidate in list(self._rings) if candidate != key)
        return ring

    def _forget(self, candidates: Iterable[ProcessKey]) -> None:
        for key in candidates:
            if len(self._rings) <= KEYS_KEPT:
                return
            if not self._rings[key].listeners:
                del self._rings[key]
