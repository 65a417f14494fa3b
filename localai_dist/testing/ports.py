"""Free loopback ports outside the kernel's ephemeral range, so that no outgoing connection takes one meanwhile."""

from __future__ import annotations

import random

from localai_dist.errors import LocalAIDistError
from localai_dist.worker.ports import bind_probe

_SERVERS = range(10_240, 19_999)
_BACKENDS = range(20_064, 32_000, 64)
_TRIES = 200


class NoFreePort(LocalAIDistError):
    """Every port tried was taken."""


class Ports:
    """Hands out free ports, none of them twice."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self._chance = chance or random.Random()
        self._given: set[int] = set()

    def one(self) -> int:
        """
        A free port for a server.

        Raises:
            NoFreePort: none found.
        """
        return self._pick(_SERVERS, 1)

    def backends(self, count: int = 64) -> int:
        """
        The first of ``count`` ports for a worker's backends; the first four are free now.

        Raises:
            NoFreePort: none found.
        """
        return self._pick(_BACKENDS, min(count, 4))

    def _pick(self, choices: range, free: int) -> int:
        for _ in range(_TRIES):
            first = self._chance.choice(choices)
            if first not in self._given and all(bind_probe(first + step) for step in range(free)):
                self._given.add(first)
                return first
        raise NoFreePort(f"no free port from {choices.start} to {choices.stop} in {_TRIES} tries")
