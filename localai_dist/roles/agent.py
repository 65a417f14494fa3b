"""
One agent worker: what it is made of.

It registers, beats and dials like a worker; its control plane answers every verb 404 until the agents' work is built.
With ``--distributed-require-auth`` it waits for an operator's approval before it dials.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.application.service import IService
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from localai_dist.net.websocket import require_masker
from localai_dist.roles.frontend import session_config
from localai_dist.roles.node_service import Ending, NodeService, boot_id, chance
from localai_dist.settings.agent import AgentSettings
from localai_dist.tunnel.dialer import TunnelClient
from localai_dist.worker.frontends import Frontends
from localai_dist.worker.identity import IdentityFile
from localai_dist.worker.registration import Profile, Registration
from localai_dist.worker.service import WorkerServer

log = Logger()

PENDING = "pending"


def make(settings: AgentSettings, reactor: Any) -> IService:
    """
    The agent worker as a service for twistd.

    Raises:
        UserMistake: the native masker is missing.
    """
    require_masker()
    data = Path(settings.data_path)
    ending = Ending(reactor, settings.program)
    registration = Registration(
        reactor=reactor,
        frontends=Frontends(reactor=reactor, urls=settings.register_to, registration_token=settings.registration_token),
        registration_token=settings.registration_token,
        profile=Profile(name=settings.node_name, node_type="agent", boot_id=boot_id()),
        identity_file=IdentityFile(data),
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
    server = WorkerServer(
        reactor=reactor,
        registration_token=settings.registration_token,
        checks={
            "registration": registration.why_not,
            "approval": lambda: "waiting for approval" if registration.status == PENDING else "",
            "tunnel": lambda: "" if tunnel.connected else tunnel.state.reason,
        },
        http_port=settings.http_port,
    )
    return NodeService(
        server=server,
        registration=registration,
        tunnel=tunnel,
        patience=settings.lame_duck,
        data_path=data,
        may_dial=_approval(settings, reactor, registration) if settings.distributed_require_auth else None,
    )


def _approval(settings: AgentSettings, reactor: Any, registration: Registration) -> Any:
    """Waits until an operator approved this node; asks by registering again at each beat."""

    async def approved() -> None:
        await registration.when_registered()
        if registration.status == PENDING:
            log.info("waiting for approval: localai-dist nodes approve {name}", name=settings.node_name)
        while registration.status == PENDING:
            await deferLater(reactor, settings.heartbeat_interval)
            registration.register_again()

    return lambda: Deferred.fromCoroutine(approved())
