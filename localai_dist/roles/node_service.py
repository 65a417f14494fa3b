"""
The life of a node's daemon, worker and agent worker alike: its loopback server, its registration, its tunnel.

Starting never depends on a frontend. Stopping: the frontends are told (nothing new is sent here, what runs may end),
the tunnel closes, the backends end, the server closes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from localai_dist.roles.ending import next_sigterm_kills
from localai_dist.roles.membership import Member
from localai_dist.worker.service import WorkerServer


class NodeService(Service):
    """
    One node for twistd.

    Args:
        server: what is behind the tunnel.
        member: keeps the node registered and reachable.
        patience: how long running requests are waited for when stopping (s).
        data_path: where the port of the loopback server is written, for scripts that asked for any free one.
        may_dial: awaited before the first dial; None dials at once.
    """

    log = Logger()

    def __init__(
        self,
        server: WorkerServer,
        member: Member,
        *,
        patience: float,
        data_path: Path,
        may_dial: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._server = server
        self._registration = member.registration
        self._tunnel = member.tunnel
        self._patience = patience
        self._data_path = data_path
        self._may_dial = may_dial
        self._dialling: Deferred[None] | None = None

    def startService(self) -> None:
        """Listen on loopback, register, dial."""
        super().startService()
        self._server.startService()
        (self._data_path / "worker.port").write_text(f"{self._server.http_port}\n")
        self._registration.startService()
        self._dialling = Deferred.fromCoroutine(self._dial())
        self._dialling.addErrback(lambda failure: self.log.failure("the tunnel was never dialled", failure))

    def stopService(self) -> Deferred[None]:
        """Leave in order; fires when everything has ended."""
        super().stopService()
        next_sigterm_kills()
        return Deferred.fromCoroutine(self._leave())

    async def _dial(self) -> None:
        try:
            if self._may_dial is not None:
                await self._may_dial()
        except CancelledError:
            return
        self._tunnel.startService()

    async def _leave(self) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
        await self._registration.leave(self._patience)
        if self._tunnel.running:
            await self._tunnel.stopService()
        await self._server.stopService()
        self.log.info("this node has left")
