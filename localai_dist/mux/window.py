"""
Flow control arithmetic: how much may be sent, how much the peer may send, when to grant more.

1. Both directions of every stream start at 256 KiB (the yamux specification).
2. A receiver grants credit for bytes the *application* consumed, in pieces of at least ``CREDIT_GRAIN``; of a fast
   stream with a large window in larger pieces, worth ``CREDIT_TIME`` of its rate, because each grant wakes both ends.
3. A receive window may grow; the growth is credit like any other, so the peer is told before it can use it.
4. All growth beyond 256 KiB of all streams of a session comes from one ``WindowPool``. Hence the bytes nobody has read
   stay under streams x 256 KiB + the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from localai_dist.mux.errors import LocalProtocolError, StreamViolation, WindowOverflow
from localai_dist.mux.frame import MAX_LENGTH
from localai_dist.units import KiB

SPEC_WINDOW: Final = 256 * KiB
"""What each side may send before any credit. Source: yamux specification."""

CREDIT_GRAIN: Final = 32 * KiB
"""Credit is granted in pieces of at least this size; finer costs frames, coarser blinds the sender's delay cap."""

CREDIT_TIME: Final = 0.001
"""A grant waits for no more bytes than arrive in this time (s)."""

CREDIT_SHARE: Final = 16
"""Nor for more than this part of the window, so that the sender never runs dry for want of a grant."""

CREDIT_GRAIN_MAX: Final = 256 * KiB
RATE_SPAN: Final = 0.01
"""A stream's rate is measured over at least this time (s)."""

GROWTH_ROUND_TRIPS: Final = 4
"""A window used up within this many round trips is what limits the sender, so it doubles."""


@dataclass(slots=True)
class SendWindow:
    """Bytes the peer still allows us to send."""

    available: int = SPEC_WINDOW

    def use(self, count: int) -> None:
        """
        Take ``count`` bytes of credit.

        Raises:
            LocalProtocolError: there is less.
        """
        if count > self.available:
            raise LocalProtocolError(f"{count} bytes to send, credit for {self.available}")
        self.available -= count

    def granted(self, count: int) -> None:
        """
        The peer allowed ``count`` more bytes.

        Raises:
            WindowOverflow: that would be more than a frame's length field can ever name.
        """
        if self.available + count > MAX_LENGTH:
            raise WindowOverflow(f"credit of {self.available} + {count} bytes is above {MAX_LENGTH}")
        self.available += count


@dataclass(slots=True)
class WindowPool:
    """What all receive windows of one session may grow by, together."""

    free: int

    def take(self, wanted: int) -> int:
        """Up to ``wanted`` bytes out of the pool; returns how many were left to give."""
        taken = min(wanted, self.free)
        self.free -= taken
        return taken

    def give_back(self, count: int) -> None:
        """Return what ``take`` gave."""
        self.free += count


class ReceiveWindow:
    """
    What the peer may send on one stream.

    ``allowed + unread + owed == size`` at all times.

    Attributes:
        size: the window: the most that can ever be unread.
        allowed: what the peer was told it may still send.
        unread: received, not yet consumed by the application.
        owed: consumed (or grown), not yet granted.
        grain: how much has to be owed to be worth a frame.
    """

    __slots__ = (
        "_epoch",
        "_epoch_bytes",
        "_maximum",
        "_pool",
        "_span_bytes",
        "_span_since",
        "allowed",
        "grain",
        "owed",
        "size",
        "unread",
    )

    def __init__(self, pool: WindowPool, maximum: int) -> None:
        self.size = self.allowed = SPEC_WINDOW
        self.unread = self.owed = 0
        self._pool = pool
        self._maximum = maximum
        self._epoch: float | None = None
        self._epoch_bytes = 0
        self.grain = CREDIT_GRAIN
        self._span_since: float | None = None
        self._span_bytes = 0

    def received(self, count: int) -> None:
        """
        The peer sent ``count`` bytes.

        Raises:
            StreamViolation: it had no credit for them.
        """
        if count > self.allowed:
            raise StreamViolation(f"{count} bytes received, credit was {self.allowed}")
        self.allowed -= count
        self.unread += count

    def consumed(self, count: int, now: float, round_trip: float | None) -> None:
        """
        The application took ``count`` bytes.

        Args:
            now: the time (s).
            round_trip: the session's measured round trip (s), or None while unknown (no growth then).
        """
        if count > self.unread:
            raise LocalProtocolError(f"{count} bytes consumed, {self.unread} were unread")
        self.unread -= count
        self.owed += count
        if self._epoch is None:
            self._epoch = now
        self._epoch_bytes += count
        if self._epoch_bytes >= self.size:
            if round_trip is not None and now - self._epoch < GROWTH_ROUND_TRIPS * round_trip:
                self.grow(2 * self.size)
            self._epoch, self._epoch_bytes = now, 0
        self._span_bytes += count
        if self._span_since is None:
            self._span_since = now
        elif now - self._span_since >= RATE_SPAN:
            worth = int(self._span_bytes / (now - self._span_since) * CREDIT_TIME)
            self.grain = max(CREDIT_GRAIN, min(worth, self.size // CREDIT_SHARE, CREDIT_GRAIN_MAX))
            self._span_since, self._span_bytes = now, 0

    def grow(self, size: int) -> None:
        """Widen to ``size``, or as far as the maximum and the pool allow; the growth is owed to the peer."""
        wanted = min(size, self._maximum) - self.size
        if wanted > 0:
            grown = self._pool.take(wanted)
            self.size += grown
            self.owed += grown

    @property
    def grant_due(self) -> bool:
        """Whether enough is owed to be worth a frame."""
        return self.owed >= self.grain

    def take_grant(self) -> int:
        """Everything owed; the caller tells the peer now."""
        grant, self.owed = self.owed, 0
        self.allowed += grant
        return grant

    def release(self) -> None:
        """Give the growth back to the pool; the window is not used after this."""
        self._pool.give_back(self.size - SPEC_WINDOW)
        self.size = SPEC_WINDOW
        self.owed = self.allowed = 0
