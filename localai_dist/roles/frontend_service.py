"""
The life of one frontend: listening at once, joined when the database answers, gone in order.

Stopping, in this order: ``/readyz`` says no and new tunnels are refused; workers are told to go; new requests are
still served for the lame-duck time; the listener closes; running requests and relayed streams end; then tunnels,
membership, bus and database. A second SIGTERM ends the process at once. Source: design §7, shutdown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from twisted.application.service import Service
from twisted.internet.address import IPv4Address
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IListeningPort
from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import Logger

from localai_dist.bus.service import Bus
from localai_dist.health.monitor import HealthMonitor
from localai_dist.httpapi.readiness import Readiness
from localai_dist.loads.service import Loads
from localai_dist.net.request import StreamingSite
from localai_dist.registry.membership import Membership
from localai_dist.relay.peers import PeerPool
from localai_dist.roles.ending import next_sigterm_kills
from localai_dist.roles.notices import Notices
from localai_dist.serving.received import ReceivedFiles
from localai_dist.serving.watch import CatalogWatch
from localai_dist.settings.frontend import FrontendSettings
from localai_dist.staging.request_files import RequestFiles
from localai_dist.store.errors import StoreError
from localai_dist.store.pool import Pool
from localai_dist.tunnel.held import HeldTunnels
from localai_dist.tunnel.identities import IdentityWatch

CHECK_EVERY = 1.0  # s, how often readiness is looked at
JOIN_AGAIN = 1.0  # s, between attempts to reach a database that went away between check and start
IDLE_EVERY = 0.1  # s, how often a draining frontend looks whether anything still runs
GO_AWAY_SPREAD = 10.0  # s, at most; a third of the drain time if that is less


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What is started and stopped."""

    pool: Pool
    bus: Bus
    notices: Notices
    identities: IdentityWatch
    catalog: CatalogWatch
    membership: Membership
    monitor: HealthMonitor
    loads: Loads
    held: HeldTunnels
    peers: PeerPool | None
    received: ReceivedFiles
    request_files: RequestFiles
    readiness: Readiness


class FrontendService(Service):
    """
    One frontend for twistd.

    Attributes:
        site: what listens; set by ``roles.frontend`` before the start.
        accepting: whether tunnels are admitted: not while starting or draining.
    """

    log = Logger()
    site: StreamingSite  # its root is an ApiResource

    def __init__(self, parts: Parts, settings: FrontendSettings, *, reactor: Any) -> None:
        self._parts = parts
        self._settings = settings
        self._reactor = reactor
        self._port: IListeningPort | None = None
        self._joining: Deferred[None] | None = None
        self._joined = False
        self._draining = False
        self._checks = LoopingCall(self._check)
        self._checks.clock = reactor

    @property
    def accepting(self) -> bool:
        """Whether a tunnel that arrives now may be admitted."""
        return self._joined and not self._draining

    def startService(self) -> None:
        """Listen, and join the cluster as soon as the database answers."""
        super().startService()
        address = self._settings.address
        self._sweep()
        self._parts.catalog.startService()
        self._port = self._reactor.listenTCP(address.port, self.site, interface=address.host)
        self._note_port(address.port)
        self._joining = Deferred.fromCoroutine(self._join())
        self._joining.addErrback(lambda failure: self.log.failure("joining the cluster failed", failure))
        self._checks.start(CHECK_EVERY).addErrback(lambda failure: self.log.failure("readiness checks ended", failure))

    def stopService(self) -> Deferred[None]:
        """Drain and leave; fires when everything is closed."""
        super().stopService()
        next_sigterm_kills()
        return Deferred.fromCoroutine(self._leave())

    def _sweep(self) -> None:
        try:
            swept = self._parts.received.sweep()
        except OSError as problem:
            # It costs the disk some room; requests that can't be taken for the same reason are told so one by one.
            self.log.warn("files that an earlier run left can't be removed: {problem}", problem=problem)
            return
        if swept:
            self.log.info("removed {count} files of requests that an earlier run left", count=swept)

    async def _join(self) -> None:
        try:
            while not await self._tried_to_join():
                await deferLater(self._reactor, JOIN_AGAIN)
        except CancelledError:
            return
        self._joined = True
        self._parts.membership.startService()
        self._parts.monitor.start()
        self._parts.identities.start()
        self._parts.loads.start()
        self._check()
        self.log.info("frontend {id} joined the cluster", id=self._settings.instance_id)

    async def _tried_to_join(self) -> bool:
        try:
            await self._parts.pool.start()
        except StoreError as error:
            self.log.warn("the database does not answer yet: {error}", error=str(error))
            return False
        try:
            await self._parts.bus.start()
            await self._parts.notices.subscribe()
            await self._parts.membership.join()
        except StoreError as error:
            self.log.warn("could not join the cluster yet: {error}", error=str(error))
            await self._parts.bus.stop()
            await self._parts.pool.stop()
            return False
        return True

    def _check(self) -> None:
        pool, membership = self._parts.pool, self._parts.membership
        self._parts.readiness.note("database", pool.healthy, pool.problem or "", pool.problem_told or "")
        problem = membership.problem or ("" if self._joined else "not joined yet")
        self._parts.readiness.note("membership", not problem, problem, membership.problem_told or "")

    def _note_port(self, asked: int) -> None:
        """With port 0 the real one is written where a script finds it."""
        if asked == 0 and self._port is not None:
            port = cast(IPv4Address, self._port.getHost()).port
            (Path(self._settings.data_path) / "frontend.port").write_text(f"{port}\n")

    async def _leave(self) -> None:
        parts, settings = self._parts, self._settings
        until = self._reactor.seconds() + settings.drain_timeout
        self._draining = True
        parts.readiness.drain()
        if self._joining is not None and not self._joined:
            self._joining.cancel()
        self.log.info("draining for at most {seconds:.0f} s", seconds=settings.drain_timeout)
        parts.held.go_away(min(GO_AWAY_SPREAD, settings.drain_timeout / 3))
        await deferLater(self._reactor, min(settings.lame_duck, settings.drain_timeout))
        if self._port is not None:
            await _done(self._port.stopListening())
        await self._idle(until)
        await self._close()

    async def _idle(self, until: float) -> None:
        while self._busy() and self._reactor.seconds() < until:
            await deferLater(self._reactor, IDLE_EVERY)
        if self._busy():
            self.log.warn("{count} requests or streams still ran when the drain time was over", count=self._busy())

    def _busy(self) -> int:
        streams = sum(session.stream_count for session in self._parts.held.sessions().values())
        # A release that goes by way of another frontend is in none of our sessions.
        return self.site.resource.running + streams + self._parts.request_files.releasing

    async def _close(self) -> None:
        parts = self._parts
        if self._checks.running:
            self._checks.stop()
        await parts.loads.stop()
        if self._joined:
            await parts.monitor.stop()
        parts.identities.stop()
        await parts.held.release_all()
        if parts.peers is not None:
            parts.peers.close()
        if self._joined:
            await parts.membership.stopService()
        parts.catalog.stopService()
        await parts.bus.stop()
        await parts.pool.stop()
        parts.received.close()
        self.log.info("frontend {id} left the cluster", id=self._settings.instance_id)


async def _done(result: Deferred[None] | None) -> None:
    """Wait where Twisted may or may not answer with a Deferred."""
    if result is not None:
        await result
