"""
The life of a node's daemon, worker and agent worker alike: its loopback server, its registration, its tunnel.

Starting never depends on a frontend. Stopping: the frontends are told (nothing new is sent here, what runs may end),
the tunnel closes, the backends end, the server closes.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from localai_dist.roles.ending import end_with, next_sigterm_kills
from localai_dist.tunnel.dialer import TunnelClient
from localai_dist.worker.registration import Profile, Registration
from localai_dist.worker.service import WorkerServer


def boot_id() -> str:
    """A new id for each process: frontends tell by it whether what was loaded here can still be running."""
    return str(uuid.uuid4())


@dataclass(frozen=True, slots=True)
class Ending:
    """What ``/readyz`` and the verbs share with the daemon's end: whether it has begun, and how to begin it."""

    reactor: Any
    program: str

    def refused(self, error: Exception) -> None:
        """A frontend will never take this node."""
        end_with(self.reactor, self.program, str(error))

    def stop(self) -> None:
        """As SIGTERM does."""
        self.reactor.stop()


class NodeService(Service):
    """
    One node for twistd.

    Args:
        server: what is behind the tunnel.
        registration: keeps the node registered.
        tunnel: keeps it reachable.
        patience: how long running requests are waited for when stopping (s).
        data_path: where the chosen port is written when any free one was asked for.
    """

    log = Logger()

    def __init__(
        self,
        *,
        server: WorkerServer,
        registration: Registration,
        tunnel: TunnelClient,
        patience: float,
        data_path: Path,
        may_dial: Callable[[], Deferred[None]] | None = None,
    ) -> None:
        self._server = server
        self._registration = registration
        self._tunnel = tunnel
        self._patience = patience
        self._data_path = data_path
        self._may_dial = may_dial

    def startService(self) -> None:
        """Listen on loopback, register, dial."""
        super().startService()
        self._server.startService()
        port_file = self._data_path / "worker.port"
        port_file.write_text(f"{self._server.http_port}\n")
        self._registration.startService()
        if self._may_dial is None:
            self._tunnel.startService()
        else:
            self._may_dial().addCallback(lambda _: self._dial())

    def stopService(self) -> Deferred[None]:
        """Leave in order; fires when everything has ended."""
        super().stopService()
        next_sigterm_kills()
        return Deferred.fromCoroutine(self._leave())

    def _dial(self) -> None:
        if self.running:
            self._tunnel.startService()

    async def _leave(self) -> None:
        await self._registration.leave(self._patience)
        if self._tunnel.running:
            await self._tunnel.stopService()
        await self._server.stopService()
        self.log.info("this node has left")


def chance() -> float:
    """Randomness for backoff."""
    return random.random()


__all__ = ["Ending", "NodeService", "Profile", "boot_id", "chance"]
