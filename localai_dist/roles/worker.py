"""One worker: what it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.application.service import IService

from localai_dist.net.websocket import require_masker
from localai_dist.roles.membership import Member, boot_id, make_member
from localai_dist.roles.node_service import NodeService
from localai_dist.roles.stager import bucket_of
from localai_dist.settings.worker import WorkerSettings
from localai_dist.worker.capability import capabilities
from localai_dist.worker.ports import TOP_PORT, PortRange
from localai_dist.worker.readings import NodeReadings
from localai_dist.worker.registration import Profile
from localai_dist.worker.request_files import RequestLimits
from localai_dist.worker.service import BackendWorkerConfig, WorkerServer, make_backend_worker


def make(settings: WorkerSettings, reactor: Any) -> IService:
    """
    The worker as a service for twistd.

    Raises:
        UserMistake: the native masker is missing, or the identity or a gallery can't be read.
    """
    require_masker()
    able = capabilities(settings.force_meta_backend_capability)
    member = make_member(
        settings,
        reactor,
        profile=Profile(
            name=settings.node_name,
            node_type="backend",
            boot_id=boot_id(),
            labels=settings.node_labels,
            max_replicas_per_model=settings.max_replicas_per_model,
            vram_budget=settings.vram_budget,
            capability=able[0],
        ),
        on_stream=lambda stream: server.on_stream(stream),
        readings=NodeReadings(reactor=reactor, folder=Path(settings.models_path)).take,
    )
    server = _server(settings, reactor, member, able)
    return NodeService(server, member, patience=settings.lame_duck, data_path=Path(settings.data_path))


def _server(settings: WorkerSettings, reactor: Any, member: Member, able: tuple[str, ...]) -> WorkerServer:
    return make_backend_worker(
        BackendWorkerConfig(
            registration_token=settings.registration_token,
            models_path=Path(settings.models_path),
            backends_path=Path(settings.backends_path),
            data_path=Path(settings.data_path),
            ports=PortRange(settings.base_port, settings.grpc_max_port or TOP_PORT),
            http_port=settings.http_port,
            backend_galleries=settings.backend_galleries,
            capabilities=able,
            secrets=(settings.storage_access_key, settings.storage_secret_key),
            bucket=bucket_of(settings),
            cache_limit=settings.storage_cache,
            request_limits=RequestLimits(settings.request_files_limit, settings.request_files_free),
        ),
        reactor=reactor,
        checks=member.checks,
        stop_node=reactor.stop,
    )
