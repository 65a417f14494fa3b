"""How fast bytes move, and what earlier loads say about the rest of this one. Pure: measured, never guessed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from localai_dist.units import SECOND

WINDOW = 10 * SECOND
"""The rate that is shown is that of the last so many seconds."""

LEAST_MEASURE = 1 * SECOND
"""Less than this says nothing about a rate."""

LEAST_HISTORY = 3
"""So many earlier loads on a node before a range is told."""


class Speed:
    """The rate of one staging, from counts of bytes that were seen at instants of one clock."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def saw(self, now: float, moved: int) -> None:
        """``moved`` bytes had been sent at ``now`` (s)."""
        self._first = self._first or (now, moved)
        if self._last is None or moved > self._last[1]:
            self._last = (now, moved)
        self._seen.append((now, moved))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW:
            self._seen.popleft()

    @property
    def now(self) -> float | None:
        """Bytes per second of the last seconds; None before it was measured."""
        return _rate(self._seen[0], self._seen[-1]) if self._seen else None

    @property
    def whole(self) -> float | None:
        """Bytes per second from the first sighting to the last byte that moved."""
        return _rate(self._first, self._last)


def _rate(first: tuple[float, int] | None, last: tuple[float, int] | None) -> float | None:
    if first is None or last is None or last[0] - first[0] < LEAST_MEASURE:
        return None
    return (last[1] - first[1]) / (last[0] - first[0])


def eta(left: int, rate: float | None) -> float | None:
    """Seconds until ``left`` bytes are moved; None when that can't be said."""
    return None if left <= 0 or not rate or rate <= 0 else left / rate


@dataclass(frozen=True, slots=True)
class PastLoad:
    """
    One finished load on a node.

    Attributes:
        total_bytes: the model's size.
        rate: bytes per second while they were sent.
        load_seconds: of the backend's own loading.
    """

    total_bytes: int
    rate: float
    load_seconds: float

    def rest(self, left: int, total: int) -> float:
        """Seconds that ``left`` bytes and the loading of a model of ``total`` bytes would take as it went then."""
        return left / self.rate + self.load_seconds * total / self.total_bytes


def eta_range(past: Sequence[PastLoad], *, left: int, total: int, loading_for: float) -> tuple[float, float] | None:
    """
    The tenth and the ninetieth percentile of the seconds left, from earlier loads on the same node.

    Args:
        left: bytes still to be sent.
        total: bytes of the model.
        loading_for: how long the backend has been loading it already (s).
    """
    if len(past) < LEAST_HISTORY or total <= 0:
        return None
    rests = sorted(max(0.0, one.rest(left, total) - loading_for) for one in past)
    return _percentile(rests, 0.1), _percentile(rests, 0.9)


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
