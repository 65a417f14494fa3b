"""
``WorkerServer``: everything behind the tunnel of one node, built and started.

A worker with backends is built by ``make_backend_worker``; an agent worker is ``WorkerServer`` with no verbs, no files
and no backends: its control plane answers every verb 404.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.logger import Logger
from twisted.web.resource import Resource

from localai_dist import grpcclient
from localai_dist.ids import ProcessKey
from localai_dist.net.stream import MuxStream
from localai_dist.objects.bucket import Bucket
from localai_dist.objects.store import ObjectStore
from localai_dist.wire.verbs import CONTROL_PREFIX
from localai_dist.worker.backend_logs import BackendLogsResource
from localai_dist.worker.containment import Areas
from localai_dist.worker.control import ControlResource
from localai_dist.worker.environment import backend_environment
from localai_dist.worker.files import FilesListResource, FilesResource
from localai_dist.worker.gallery import DEFAULT_CAPABILITY, parse_galleries
from localai_dist.worker.install import Installer
from localai_dist.worker.logs import LogLine, LogStore
from localai_dist.worker.object_cache import DEFAULT_LIMIT, ObjectCache
from localai_dist.worker.object_files import ObjectFiles
from localai_dist.worker.offload import Offload, ThreadOffload
from localai_dist.worker.ports import DEFAULT_RANGE, LOOPBACK, PortRange, PortTable
from localai_dist.worker.process import Backend, Connect
from localai_dist.worker.request_files import RequestFiles, RequestLimits
from localai_dist.worker.router import StreamRouter
from localai_dist.worker.server import Check, LoopbackServer, make_root
from localai_dist.worker.supervisor import Supervisor
from localai_dist.worker.sweeper import Sweeper
from localai_dist.worker.uploads import Uploads
from localai_dist.worker.verbs import Verbs, VerbTable

_CONTROL = CONTROL_PREFIX.strip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendWorkerConfig:
    """
    What a worker with backends is built from.

    Attributes:
        registration_token: bearer of everything behind the tunnel but probes and backends.
        models_path, backends_path, data_path: folders; made when needed.
        ports: the backends' ports.
        http_port: of our own server on loopback; 0 = any free one.
        backend_galleries: JSON text; empty = the gallery in the box.
        capabilities: for meta entries of a gallery; the one it likes most first.
        request_limits: of files of single requests.
        bucket: the object store; None = there is none.
        cache_limit: bytes of its files that are kept when no model has them any more.
        secrets: more values that no backend may see, whatever variable they are in.
    """

    registration_token: str
    models_path: Path
    backends_path: Path
    data_path: Path
    ports: PortRange = DEFAULT_RANGE
    http_port: int = 0
    backend_galleries: str = ""
    capabilities: tuple[str, ...] = (DEFAULT_CAPABILITY,)
    request_limits: RequestLimits | None = None
    bucket: Bucket | None = None
    cache_limit: int = DEFAULT_LIMIT
    secrets: tuple[str, ...] = ()


class Beside(Protocol):
    """Runs as long as the server does."""

    def start(self) -> None:
        """Begin."""

    async def stop(self) -> None:
        """End."""


class WorkerServer(Service):
    """
    The server behind the tunnel.

    Args:
        reactor: listens, dials, and is the clock.
        registration_token: bearer of everything but the probes; empty admits nobody.
        verbs: the control verbs; None or empty = every verb is answered 404.
        v1: more resources below ``/v1/``.
        supervisor: the backends, or None for an agent worker.
        ports: their range.
        checks: what ``/readyz`` asks: name -> why not, or an empty text.
        http_port: 0 = any free one.
        beside: what runs as long as this does.

    Attributes:
        supervisor: as given.
    """

    _log = Logger()

    def __init__(
        self,
        *,
        reactor: Any,
        registration_token: str,
        verbs: VerbTable | None = None,
        v1: Mapping[str, Resource] | None = None,
        supervisor: Supervisor | None = None,
        ports: PortRange = DEFAULT_RANGE,
        checks: Mapping[str, Check] | None = None,
        http_port: int = 0,
        beside: Sequence[Beside] = (),
    ) -> None:
        self.supervisor = supervisor
        self._beside = tuple(beside)
        resources: dict[str, Resource] = {_CONTROL: ControlResource(registration_token, verbs or {})}
        root = make_root(checks or {}, resources | dict(v1 or {}))
        self._http = LoopbackServer(root, reactor=reactor, port=http_port)
        self._router = StreamRouter(
            reactor=reactor,
            is_backend=lambda port: supervisor is not None and supervisor.serves(port),
            in_range=lambda port: supervisor is not None and port in ports,
            http=self._http.connection,
        )

    @property
    def http_port(self) -> int:
        """Where our own HTTP server listens on 127.0.0.1, once started."""
        return self._http.port

    def on_stream(self, stream: MuxStream) -> None:
        """Serve a stream a frontend opened: the tunnel's ``on_stream``."""
        self._router.serve(stream)

    async def start(self) -> None:
        """
        Listen on loopback.

        Raises:
            UserMistake: the port is taken.
        """
        self._begin()
        self._log.info("this worker's own server listens on {host}:{port}", host=LOOPBACK, port=self.http_port)

    async def stop(self) -> None:
        """End every backend, then stop listening; takes as long as ending a process may, a few seconds."""
        if self.supervisor is not None:
            stopped = await self.supervisor.close()
            if stopped.error:
                self._log.error("left running: {error}", error=stopped.error)
        await self._http.stop()
        for one in self._beside:
            await one.stop()

    def _begin(self) -> None:
        self._http.start()
        for one in self._beside:
            one.start()

    def startService(self) -> None:
        """As ``start``, for a service tree."""
        super().startService()
        self._begin()

    def stopService(self) -> Deferred[None]:
        """As ``stop``, for a service tree."""
        super().stopService()
        return Deferred.fromCoroutine(self.stop())


def make_backend_worker(
    config: BackendWorkerConfig,
    *,
    reactor: Any,
    checks: Mapping[str, Check],
    stop_node: Callable[[], None],
    environment: Mapping[str, str] | None = None,
    connect: Connect | None = None,
) -> WorkerServer:
    """
    A worker with backends, not started yet.

    Args:
        config: see there.
        reactor: everything's.
        checks: of ``/readyz``.
        stop_node: ends the daemon the way SIGTERM does.
        environment: ours, that backends get a scrubbed copy of; None = the process's.
        connect: how to ask a backend something; None = over gRPC.
    """
    offload = ThreadOffload(reactor)
    logs = LogStore()
    scrubbed = _scrubber(os.environ if environment is None else environment, _secrets_of(config))
    supervisor = _supervisor(config, reactor, logs, offload, scrubbed, connect or grpc_connect(reactor))
    files = _Files(config, reactor, offload)
    return WorkerServer(
        reactor=reactor,
        registration_token=config.registration_token,
        verbs=files.verbs(supervisor, stop_node),
        v1={**files.resources(), "backend-logs": BackendLogsResource(config.registration_token, logs)},
        supervisor=supervisor,
        ports=config.ports,
        checks=checks,
        http_port=config.http_port,
        beside=files.beside(),
    )


class _Files:
    """Where this node's files are, and everything that takes, fetches, tells of and removes them."""

    def __init__(self, config: BackendWorkerConfig, reactor: Any, offload: Offload) -> None:
        below = config.data_path / "files"
        self._temp = below / "temp"
        self._token = config.registration_token
        self._reactor = reactor
        self._offload = offload
        self._areas = Areas(models=config.models_path, data=below / "data", staging=below / "staging")
        self._uploads = Uploads(offload=offload, clock=reactor)
        self._requests = RequestFiles(self._areas, offload=offload, now=time.time, limits=config.request_limits)
        self._fetched = None
        if config.bucket is not None:
            cache = ObjectCache(below / "cache", limit=config.cache_limit, offload=offload)
            self._fetched = self._object_files(config.bucket, cache)

    def verbs(self, supervisor: Supervisor, stop_node: Callable[[], None]) -> VerbTable:
        """The control verbs, those of the object store too if there is one."""
        verbs = Verbs(
            supervisor=supervisor,
            areas=self._areas,
            uploads=self._uploads,
            requests=self._requests,
            offload=self._offload,
            stop_node=stop_node,
            forget=self._forget,
        )
        return {**verbs.table(), **(self._fetched.table() if self._fetched is not None else {})}

    def resources(self) -> dict[str, Resource]:
        """The file protocol, below ``/v1/``."""
        files = FilesResource(
            self._token,
            areas=self._areas,
            uploads=self._uploads,
            requests=self._requests,
            offload=self._offload,
            temp=self._temp,
        )
        return {"files": files, "files-list": FilesListResource(self._token, areas=self._areas, offload=self._offload)}

    def beside(self) -> Sequence[Beside]:
        """What runs as long as the server does."""
        sweeper = Sweeper(
            self._areas,
            uploads=self._uploads,
            requests=self._requests,
            offload=self._offload,
            clock=self._reactor,
            now=time.time,
        )
        return [sweeper] if self._fetched is None else [sweeper, self._fetched]

    def _object_files(self, bucket: Bucket, cache: ObjectCache) -> ObjectFiles:
        return ObjectFiles(
            ObjectStore(bucket, reactor=self._reactor, now=lambda: datetime.now(UTC)),
            areas=self._areas,
            uploads=self._uploads,
            cache=cache,
            offload=self._offload,
            clock=self._reactor,
            temp=self._temp,
        )

    async def _forget(self, folder: Path) -> None:
        """End every fetch below a folder."""
        if self._fetched is not None:
            await self._fetched.forget(folder)


def grpc_connect(reactor: Any) -> Connect:
    """Asks backends over gRPC on loopback."""

    async def connect(port: int, token: str) -> Backend:
        return await grpcclient.connect(
            TCP4ClientEndpoint(reactor, LOOPBACK, port, timeout=2), token=token, clock=reactor
        )

    return connect


def _supervisor(
    config: BackendWorkerConfig,
    reactor: Any,
    logs: LogStore,
    offload: Offload,
    environment: Callable[[str], Mapping[str, str]],
    connect: Connect,
) -> Supervisor:
    return Supervisor(
        reactor=reactor,
        installer=_installer(config),
        ports=PortTable(config.ports),
        connect=connect,
        environment=environment,
        mint=lambda: secrets.token_urlsafe(32),
        last_words=lambda key, count: logs.tail(key, count, "stderr"),
        line=lambda key, stream, text: _keep(logs, key, stream, text),
        offload=offload,
    )


def _installer(config: BackendWorkerConfig) -> Installer:
    galleries = parse_galleries(config.backend_galleries)
    return Installer(config.backends_path, galleries=galleries, capabilities=config.capabilities, now=_now)


def _scrubber(parent: Mapping[str, str], hidden: Iterable[str]) -> Callable[[str], Mapping[str, str]]:
    kept = dict(parent)
    values = tuple(hidden)
    code = str(Path(__file__).resolve().parent.parent.parent)
    return lambda token: backend_environment(kept, token=token, python=sys.executable, secrets=values, code=code)


def _secrets_of(config: BackendWorkerConfig) -> tuple[str, ...]:
    return (config.registration_token, *config.secrets)


def _keep(logs: LogStore, key: ProcessKey, stream: str, text: str) -> None:
    logs.append(key, LogLine(_now(), stream, text))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
