"""Two mux sessions over a link with a rate and a delay, in a test's own time: ``LinkedPair``."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import Clock

from localai_dist.net.session import SessionConfig
from localai_dist.testing.sessions import CarrierPair, MemoryCarrier, SessionPair


class LinkEnd(MemoryCarrier):
    """
    One end of a link whose queue stands where no socket option reaches, as in a router on the way.

    The transport itself is always empty a turn later, so only the round trip shows how much waits.

    Attributes:
        far: the other end.
        sent: every message given, with the time, for tests of their order.
    """

    far: LinkEnd

    def __init__(self, clock: Clock, rate: float, delay: float) -> None:
        super().__init__()
        self.sent: list[tuple[float, bytes]] | None = None
        self._clock = clock
        self._rate = rate
        self._delay = delay
        self._free_at = 0.0
        self._drain: IDelayedCall | None = None

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """One message; it arrives when those before it have left, plus the delay."""
        message = b"".join(parts)
        now = self._clock.seconds()
        if self.sent is not None:
            self.sent.append((now, message))
        self._free_at = max(self._free_at, now) + len(message) / self._rate
        self._clock.callLater(self._free_at - now + self._delay, self.far.arrived, message)
        if self._drain is None:
            self._drain = self._clock.callLater(0, self._drained)

    def arrived(self, message: bytes) -> None:
        """A message of the other end is here."""
        if self.user is not None:
            self.user.bytes_received(message)

    def _drained(self) -> None:
        self._drain = None
        if self.user is not None:
            self.user.carrier_drained()


class LinkedPair(SessionPair):
    """
    A ``SessionPair`` over a link.

    Args:
        rate: what the link carries each way (bytes/s).
        delay: one way (s).
    """

    def __init__(
        self, *, rate: float, delay: float, config: SessionConfig | None = None, clock: Clock | None = None
    ) -> None:
        clock = clock or Clock()
        carriers = CarrierPair()
        self.up, self.down = LinkEnd(clock, rate, delay), LinkEnd(clock, rate, delay)
        self.up.far, self.down.far = self.down, self.up
        carriers.a, carriers.b = self.up, self.down
        super().__init__(config=config, clock=clock, carriers=carriers)

    def run(self, seconds: float) -> None:
        """Let time pass, from one event to the next."""
        run(self.clock, seconds)

    def settle(self, turns: int = 0) -> None:
        """Long enough for what is under way to arrive on a link that is not full."""
        self.run(0.2)


def run(clock: Clock, seconds: float) -> None:
    """Let ``seconds`` pass on ``clock``, each delayed call at its own instant."""
    end = clock.seconds() + seconds
    while calls := [call.getTime() for call in clock.getDelayedCalls()]:
        if min(calls) > end:
            break
        clock.advance(max(0.0, min(calls) - clock.seconds()))
    clock.advance(max(0.0, end - clock.seconds()))
