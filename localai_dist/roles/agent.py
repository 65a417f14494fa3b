"""
One agent worker: what it is made of.

It registers, beats and dials like a worker; its control plane answers every verb 404 until the agents' work is built.
With ``--distributed-require-auth`` it waits for an operator's approval before it dials.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from twisted.application.service import IService
from twisted.internet.task import deferLater
from twisted.logger import Logger

from localai_dist.net.websocket import require_masker
from localai_dist.roles.membership import boot_id, make_member
from localai_dist.roles.node_service import NodeService
from localai_dist.settings.agent import AgentSettings
from localai_dist.worker.registration import PENDING, Profile, Registration
from localai_dist.worker.service import WorkerServer

log = Logger()


def make(settings: AgentSettings, reactor: Any) -> IService:
    """
    The agent worker as a service for twistd.

    Raises:
        UserMistake: the native masker is missing, or the identity can't be read.
    """
    require_masker()
    member = make_member(
        settings,
        reactor,
        profile=Profile(name=settings.node_name, node_type="agent", boot_id=boot_id()),
        on_stream=lambda stream: server.on_stream(stream),
    )
    registration, tunnel = member.registration, member.tunnel

    def unapproved() -> str:
        """Why the node waits; a tunnel that is open shows that it was approved since it registered."""
        return registration.waiting() if registration.status == PENDING and not tunnel.connected else ""

    server = WorkerServer(
        reactor=reactor,
        registration_token=settings.registration_token,
        checks={**member.checks, "approval": unapproved},
        http_port=settings.http_port,
    )

    return NodeService(
        server,
        member,
        patience=settings.lame_duck,
        data_path=Path(settings.data_path),
        may_dial=partial(_approval, registration, settings, reactor) if settings.distributed_require_auth else None,
    )


async def _approval(registration: Registration, settings: AgentSettings, reactor: Any) -> None:
    """Until an operator has admitted this node; asked by registering again at each beat."""
    await registration.when_registered()
    if registration.status == PENDING:
        log.info("this node {waits}", waits=registration.waiting())
    while registration.status == PENDING:
        await deferLater(reactor, settings.heartbeat_interval)
        registration.register_again()
