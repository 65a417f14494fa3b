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
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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
    areas = _areas(config)
    supervisor = Supervisor(
        reactor=reactor,
        installer=_installer(config),
        ports=PortTable(config.ports),
        connect=connect or grpc_connect(reactor),
        environment=_scrubber(os.environ if environment is None else environment, _secrets_of(config)),
        mint=lambda: secrets.token_urlsafe(32),
        last_words=lambda key, count: logs.tail(key, count, "stderr"),
        line=lambda key, stream, text: _keep(logs, key, stream, text),
        offload=offload,
    )
    uploads = Uploads(offload=offload, clock=reactor)
    requests = RequestFiles(areas, offload=offload, now=time.time, limits=config.request_limits)
    objects = _object_files(config, reactor, areas, uploads, offload)
    verbs = Verbs(
        supervisor=supervisor,
        areas=areas,
        uploads=uploads,
        requests=requests,
        offload=offload,
        stop_node=stop_node,
        forget=_forgetting(objects),
    )
    sweeper = Sweeper(areas, uploads=uploads, requests=requests, offload=offload, clock=reactor, now=time.time)
    return WorkerServer(
        reactor=reactor,
        registration_token=config.registration_token,
        verbs={**verbs.table(), **{verb: serve for one in objects for verb, serve in one.table().items()}},
        v1=_file_resources(config, areas, uploads, requests, offload)
        | {"backend-logs": BackendLogsResource(config.registration_token, logs)},
        supervisor=supervisor,
        ports=config.ports,
        checks=checks,
        http_port=config.http_port,
        beside=[sweeper, *objects],
    )


def grpc_connect(reactor: Any) -> Connect:
    """Asks backends over gRPC on loopback."""

    async def connect(port: int, token: str) -> Backend:
        return await grpcclient.connect(
            TCP4ClientEndpoint(reactor, LOOPBACK, port, timeout=2), token=token, clock=reactor
        )

    return connect


def _areas(config: BackendWorkerConfig) -> Areas:
    files = config.data_path / "files"
    return Areas(models=config.models_path, data=files / "data", staging=files / "staging")


def _installer(config: BackendWorkerConfig) -> Installer:
    galleries = parse_galleries(config.backend_galleries)
    return Installer(config.backends_path, galleries=galleries, capabilities=config.capabilities, now=_now)


def _file_resources(
    config: BackendWorkerConfig, areas: Areas, uploads: Uploads, requests: RequestFiles, offload: Offload
) -> dict[str, Resource]:
    token = config.registration_token
    temp = config.data_path / "files" / "temp"
    return {
        "files": FilesResource(token, areas=areas, uploads=uploads, requests=requests, offload=offload, temp=temp),
        "files-list": FilesListResource(token, areas=areas, offload=offload),
    }


def _object_files(
    config: BackendWorkerConfig, reactor: Any, areas: Areas, uploads: Uploads, offload: Offload
) -> list[ObjectFiles]:
    """The verbs of the object store, if there is one."""
    if config.bucket is None:
        return []
    files = config.data_path / "files"
    return [
        ObjectFiles(
            ObjectStore(config.bucket, reactor=reactor, now=lambda: datetime.now(UTC)),
            areas=areas,
            uploads=uploads,
            cache=ObjectCache(files / "cache", limit=config.cache_limit, offload=offload),
            offload=offload,
            clock=reactor,
            temp=files / "temp",
        )
    ]


def _forgetting(objects: Sequence[ObjectFiles]) -> Callable[[Path], Awaitable[None]]:
    """Ends every fetch below a folder."""

    async def forget(folder: Path) -> None:
        for one in objects:
            await one.forget(folder)

    return forget


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
