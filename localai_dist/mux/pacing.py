"""
How many bulk bytes may be under way, by measured delay; and how many bytes the transport may hold.

On a slow link the queue stands in a router, where no socket option reaches. So while bulk moves, the session pings
every ``PING_INTERVAL``; what a round trip takes above the smallest one seen lately is the queue, and the cap on bulk
under way shrinks when it is above the target and grows when below.

1. Under way is what was sent after the last ping that was answered, less what was credited since: an answer comes ahead
   of any credit for later bytes, so it settles the books. Thus a bulk stream whose reader stopped holds up no other
   one, peers work that grant credit coarsely, and credit that was a larger window misleads for one interval at most.
2. The base round trip ages: it is the least of the last one to two ``BASE_PERIOD``. When a period ends the cap drops
   to its minimum for a moment, so that the next base is not measured through our own queue.
3. Where a frame itself takes milliseconds the target is three frame times.
4. The cap shrinks by the least of the last few round trips: a queue shows in each of them, a busy processor in some.
   It grows by the latest one: by a quarter while there is hardly any delay, by a step while it is below the target.
5. If at the smallest cap the delay stays, it is not ours (other traffic, a busy host): it becomes the base.

6. Behind a proxy the transport drains at once; there the rate at which bulk is seen to arrive sets the message size.

Source: traffic-classes §4 and rules 3 and 5; growth in two grades because one quarter a step swings by 20 ms.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from localai_dist.units import KiB, MiB

PING_INTERVAL: Final = 0.05
TARGET: Final = 0.005
BASE_PERIOD: Final = 30.0
CAP_START: Final = 256 * KiB
CAP_MIN: Final = 64 * KiB
CAP_MAX: Final = 32 * MiB
CAP_STEP: Final = 16 * KiB
FRAME_MIN: Final = 16 * KiB
LIMIT_MIN: Final = 16 * KiB
LIMIT_START: Final = 64 * KiB
LIMIT_MAX: Final = 256 * KiB
"""Reached above 128 MB/s only, so it never holds more than two milliseconds; half of it costs a seventh more CPU."""

DRAIN_TIME: Final = 0.002
FRAME_TIMES: Final = 3
PINGS_KEPT: Final = 16
FILTER: Final = 3
CREDIT_MOST: Final = 1 * MiB
"""A grant above this is taken for a window that grew: only so much of it counts as arrived."""

RATE_LEAST: Final = 16 * KiB
"""Fewer bulk bytes between two answered pings say nothing about the rate."""

FUTILE: Final = 10
"""So many measurements in a row above the target at the smallest cap, and the delay is not ours."""


class BaseRoundTrip:
    """The least round trip of the last one to two periods."""

    __slots__ = ("_current", "_previous", "_until")

    def __init__(self) -> None:
        self._previous: float | None = None
        self._current: float | None = None
        self._until: float | None = None

    def observe(self, round_trip: float, now: float) -> bool:
        """Note one measurement; True when a period ended with it."""
        ended = self._until is not None and now >= self._until
        if self._until is None or ended:
            self._previous, self._current = self._current, None
            self._until = now + BASE_PERIOD
        self._current = round_trip if self._current is None else min(self._current, round_trip)
        return ended

    def reset(self, round_trip: float) -> None:
        """Forget what was seen: this is the base now."""
        self._previous, self._current = None, round_trip

    @property
    def value(self) -> float | None:
        """The base (s), or None before any measurement."""
        known = [value for value in (self._previous, self._current) if value is not None]
        return min(known) if known else None


class DelayCap:
    """
    The cap on bulk bytes under way, and their count.

    Attributes:
        cap: how many may be under way.
        under_way: how many are.
        round_trip: the latest measurement (s), or None.
        rate: how fast bulk arrives at the far end, smoothed (bytes/s); 0 while unknown.
    """

    def __init__(self) -> None:
        self.cap = CAP_START
        self.under_way = 0
        self.round_trip: float | None = None
        self._base = BaseRoundTrip()
        self._total = 0
        self._pings: deque[tuple[int, float, int]] = deque()
        self._next_ping = 1
        self._recent: deque[float] = deque(maxlen=FILTER)
        self._futile = 0
        self._answered: tuple[float, int] | None = None
        self.rate = 0.0

    @property
    def open(self) -> bool:
        """Whether another bulk frame may go."""
        return self.under_way < self.cap

    @property
    def base(self) -> float | None:
        """The base round trip (s), or None while unknown."""
        return self._base.value

    def bulk_sent(self, count: int) -> None:
        """Bulk bytes left for the transport."""
        if not self.under_way:
            self._answered = None  # a rate that counts the time before says nothing of the link
        self.under_way += count
        self._total += count

    def bulk_credited(self, count: int) -> None:
        """The peer granted credit on a bulk stream: that much was consumed there, or much of it is a larger window."""
        self.under_way = max(0, self.under_way - min(count, CREDIT_MOST))

    def ping_sent(self, now: float) -> int:
        """A ping leaves now; returns the value it carries."""
        value = self._next_ping
        self._next_ping = value + 1 if value < 2**32 - 1 else 1
        self._pings.append((value, now, self._total))
        if len(self._pings) > PINGS_KEPT:
            self._pings.popleft()
        return value

    @property
    def pings_out(self) -> int:
        """How many pings are unanswered."""
        return len(self._pings)

    def pong_received(self, value: int, now: float, frame_time: float) -> float | None:
        """
        A ping was answered.

        Args:
            value: what it carried; an unknown one is ignored.
            now: the time (s).
            frame_time: how long one bulk frame takes on this link (s).

        Returns:
            The round trip (s), or None for an answer to no ping of ours.
        """
        sent = next((ping for ping in self._pings if ping[0] == value), None)
        if sent is None:
            return None
        while self._pings and self._pings[0] != sent:
            self._pings.popleft()
        self._pings.popleft()
        _, at, total = sent
        self._deliveries(now, total)
        self.under_way = self._total - total
        self.round_trip = now - at
        period_ended = self._base.observe(self.round_trip, now)
        self._adapt(self.round_trip, max(TARGET, FRAME_TIMES * frame_time))
        if period_ended:
            self.cap = CAP_MIN
        return self.round_trip

    def _deliveries(self, now: float, total: int) -> None:
        """At the time ``now`` the peer is known to have had ``total`` bulk bytes."""
        before, self._answered = self._answered, (now, total)
        if before is not None and now > before[0] and total - before[1] >= RATE_LEAST:
            rate = (total - before[1]) / (now - before[0])
            self.rate = 0.7 * self.rate + 0.3 * rate if self.rate else rate

    def _adapt(self, round_trip: float, target: float) -> None:
        self._recent.append(round_trip)
        base, least = self.base or 0.0, min(self._recent)
        if least - base >= target:
            self._shrink(least, 0.9 if least - base < 2 * target else 0.75)
        elif round_trip - base < target / 4:
            self.cap = min(int(self.cap * 1.25), CAP_MAX)
        elif round_trip - base < target:
            self.cap = min(self.cap + max(CAP_STEP, self.cap // 16), CAP_MAX)

    def _shrink(self, least: float, factor: float) -> None:
        self._futile = self._futile + 1 if self.cap == CAP_MIN else 0
        if self._futile >= FUTILE:
            self._futile = 0
            self._base.reset(least)
        self.cap = max(int(self.cap * factor), CAP_MIN)


class TransportLimit:
    """
    How many bytes the transport may hold: two milliseconds of what it drains, within 16 to 256 KiB.

    Behind a proxy the transport drains at once whatever the link does; there the rate at which bulk arrives counts.

    Attributes:
        limit: the number of bytes.
        rate: smoothed drain rate (bytes/s), 0 while unknown.
    """

    def __init__(self) -> None:
        self.limit = LIMIT_START
        self.rate = 0.0
        self._arriving = 0.0

    def drained(self, count: int, seconds: float) -> None:
        """The transport sent ``count`` bytes in ``seconds``; small counts say nothing about the rate."""
        if count <= 4 * KiB or seconds <= 0:
            return
        rate = count / seconds
        self.rate = 0.8 * self.rate + 0.2 * rate if self.rate else rate
        self._set()

    def arriving(self, rate: float) -> None:
        """Bulk arrives at the far end with ``rate`` (bytes/s)."""
        self._arriving = rate
        self._set()

    def _set(self) -> None:
        self.limit = max(LIMIT_MIN, min(LIMIT_MAX, int(self._known * DRAIN_TIME)))

    @property
    def _known(self) -> float:
        """The slower of the rates that are known (bytes/s), 0 for none."""
        return min((rate for rate in (self.rate, self._arriving) if rate), default=0.0)

    @property
    def frame_time(self) -> float:
        """How long the smallest bulk frame takes (s); 0 while the rate is unknown."""
        return FRAME_MIN / self._known if self._known else 0.0
