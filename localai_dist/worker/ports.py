"""
Which loopback port a backend gets: a table that is told the time, and the probe that binds a candidate.

Four branches, in this order: the key's *own* port of last time, a *free* one that was given back, a *grown* one never
given before, and one *taken over* from a key that has not come back for it. Every candidate of every branch is probed;
one that can't be bound is quarantined and whoever had a claim on it loses it.

Source: design §7, surface §5.3.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from localai_dist.ids import ProcessKey
from localai_dist.units import MINUTE
from localai_dist.worker.errors import PortsExhausted

LOOPBACK = "127.0.0.1"
QUARANTINE = 15.0
"""Seconds before a released (or busy) port may be given again."""
AFFINITY = 5 * MINUTE
"""Seconds a released port waits for its old key."""
BASE_PORT = 20000
"""Below the kernel's ephemeral range (32768 to 60999)."""
TOP_PORT = 65535

Probe = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports from ``base`` to ``top``, both included."""

    base: int = BASE_PORT
    top: int = TOP_PORT

    def __contains__(self, port: object) -> bool:
        """Whether ``port`` is one of them."""
        return isinstance(port, int) and self.base <= port <= self.top

    def __str__(self) -> str:
        """``20000-20099``."""
        return f"{self.base}-{self.top}"


DEFAULT_RANGE = PortRange()


@dataclass(frozen=True, slots=True)
class _Claim:
    port: int
    expires_at: float


@dataclass(slots=True)
class PortTable:
    """
    Who has which port, and when the others may be given.

    Attributes:
        range: the ports it gives.
    """

    range: PortRange
    _running: dict[int, ProcessKey] = field(default_factory=dict)
    _free_at: dict[int, float] = field(default_factory=dict)
    _claims: dict[ProcessKey, _Claim] = field(default_factory=dict)
    _next: int = 0

    def __post_init__(self) -> None:
        self._next = self.range.base

    def allocate(self, key: ProcessKey, *, now: float, probe: Probe) -> int:
        """
        A port for ``key``, held until ``release``.

        Args:
            key: who gets it.
            now: seconds of the caller's clock.
            probe: whether a port can be bound right now.

        Raises:
            PortsExhausted: every candidate is running, quarantined, or held by another program.
        """
        self._claims = {owner: claim for owner, claim in self._claims.items() if claim.expires_at > now}
        skipped: set[int] = set()
        for port in self._candidates(key, now):
            if port in skipped:
                continue
            if probe(port):
                self._give(port, key)
                return port
            skipped.add(port)
            self._bench(port, now)
        raise PortsExhausted(self._exhausted(now, skipped))

    def release(self, port: int, key: ProcessKey, *, now: float) -> None:
        """Give ``port`` back if ``key`` still holds it: quarantined, then kept a while for the same key."""
        if self._running.get(port) != key:
            return
        del self._running[port]
        self._free_at[port] = now + QUARANTINE
        self._claims[key] = _Claim(port, now + QUARANTINE + AFFINITY)

    def holder(self, port: int) -> ProcessKey | None:
        """Who holds ``port``."""
        return self._running.get(port)

    def _candidates(self, key: ProcessKey, now: float) -> Iterator[int]:
        own = self._claims.get(key)
        if own is not None and self._ready(own.port, now):
            yield own.port
        claimed = {claim.port for owner, claim in self._claims.items() if owner != key}
        yield from [port for port in sorted(self._free_at) if self._ready(port, now) and port not in claimed]
        while self._next <= self.range.top:
            self._next += 1
            yield self._next - 1
        by_age = sorted(self._claims.values(), key=lambda claim: claim.expires_at)
        yield from [claim.port for claim in by_age if self._ready(claim.port, now)]

    def _ready(self, port: int, now: float) -> bool:
        return port not in self._running and self._free_at.get(port, now + 1) <= now

    def _give(self, port: int, key: ProcessKey) -> None:
        self._drop_claims(port)
        self._claims.pop(key, None)
        self._free_at.pop(port, None)
        self._running[port] = key

    def _bench(self, port: int, now: float) -> None:
        self._drop_claims(port)
        self._free_at[port] = now + QUARANTINE

    def _drop_claims(self, port: int) -> None:
        self._claims = {owner: claim for owner, claim in self._claims.items() if claim.port != port}

    def _exhausted(self, now: float, skipped: set[int]) -> str:
        quarantined = sum(1 for port, at in self._free_at.items() if at > now and port not in skipped)
        return (
            f"no free port in {self.range}: {len(self._running)} running, {quarantined} quarantined, "
            f"{len(skipped)} skipped because another program holds them; widen the range with LOCALAI_GRPC_MAX_PORT "
            "(its top) or LOCALAI_SERVE_ADDR (its base)"
        )


def bind_probe(port: int) -> bool:
    """
    Whether 127.0.0.1:``port`` can be bound and listened on right now; nothing is left open.

    SO_REUSEADDR lets a port through that only has connections in TIME_WAIT; one that is listened on or bound fails.
    Without SO_REUSEPORT a listener that set it (gRPC servers do) fails too.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((LOOPBACK, port))
            candidate.listen(1)
        except OSError:
            return False
    return True
