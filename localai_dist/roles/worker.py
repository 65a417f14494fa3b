"""One worker: what it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.application.service import IService

from localai_dist.net.websocket import require_masker
from localai_dist.roles.frontend import session_config
from localai_dist.roles.node_service import Ending, NodeService, boot_id, chance
from localai_dist.settings.worker import WorkerSettings
from localai_dist.tunnel.dialer import TunnelClient
from localai_dist.worker.frontends import Frontends
from localai_dist.worker.identity import IdentityFile
from localai_dist.worker.ports import TOP_PORT, PortRange
from localai_dist.worker.readings import NodeReadings
from localai_dist.worker.registration import Profile, Registration
from localai_dist.worker.service import BackendWorkerConfig, WorkerServer, make_backend_worker


def make(settings: WorkerSettings, reactor: Any) -> IService:
    """
    The worker as a service for twistd.

    Raises:
        UserMistake: the native masker is missing, or a gallery can't be read.
    """
    require_masker()
    data = Path(settings.data_path)
    ending = Ending(reactor, settings.program)
    registration = Registration(
        reactor=reactor,
        frontends=Frontends(reactor=reactor, urls=settings.register_to, registration_token=settings.registration_token),
        registration_token=settings.registration_token,
        profile=_profile(settings),
        identity_file=IdentityFile(data),
        readings=NodeReadings(reactor=reactor, folder=Path(settings.models_path)).take,
        interval=settings.heartbeat_interval,
        chance=chance,
        on_refused=ending.refused,
        on_registered=lambda: tunnel.retry_now(),
    )
    registration.load_identity()
    tunnel = TunnelClient(
        reactor=reactor,
        urls=settings.register_to,
        node_id=registration.node_id,
        token=registration.node_token,
        on_stream=lambda stream: server.on_stream(stream),
        chance=chance,
        config=session_config(settings.tunnel_keepalive),
        on_unauthorised=registration.register_again,
    )
    server = _server(settings, reactor, registration, tunnel, ending)
    return NodeService(
        server=server, registration=registration, tunnel=tunnel, patience=settings.lame_duck, data_path=data
    )


def _profile(settings: WorkerSettings) -> Profile:
    return Profile(
        name=settings.node_name,
        node_type="backend",
        boot_id=boot_id(),
        labels=settings.node_labels,
        max_replicas_per_model=settings.max_replicas_per_model,
        vram_budget=settings.vram_budget,
    )


def _server(
    settings: WorkerSettings, reactor: Any, registration: Registration, tunnel: TunnelClient, ending: Ending
) -> WorkerServer:
    return make_backend_worker(
        BackendWorkerConfig(
            registration_token=settings.registration_token,
            models_path=Path(settings.models_path),
            backends_path=Path(settings.backends_path),
            data_path=Path(settings.data_path),
            ports=PortRange(settings.base_port, settings.grpc_max_port or TOP_PORT),
            http_port=settings.http_port,
            backend_galleries=settings.backend_galleries,
        ),
        reactor=reactor,
        checks={
            "registration": registration.why_not,
            "tunnel": lambda: "" if tunnel.connected else tunnel.state.reason,
        },
        stop_node=ending.stop,
    )
