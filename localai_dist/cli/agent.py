"""``twistd localai-agent-worker``."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from twisted.application.service import IService

from localai_dist.cli.options import DaemonOptions
from localai_dist.cli.start import check_can_listen, make_folder, one_clear_line, prepared
from localai_dist.settings.agent import AgentSettings
from localai_dist.settings.kinds import HostPort
from localai_dist.settings.worker import LOOPBACK


class Options(DaemonOptions, settings_type=AgentSettings):
    """The agent worker's options."""


def makeService(options: Options) -> IService:
    """
    Build the agent worker that ``options`` ask for.

    Raises:
        SystemExit: one line that says what can't be used.
    """
    from twisted.internet import reactor

    from localai_dist.roles import agent
    from localai_dist.roles.ending import sigterm_ends_well

    with one_clear_line(AgentSettings.program):
        settings = prepared(options, AgentSettings)
        name = settings.node_name or f"agent-{socket.gethostname() or os.getpid()}"
        settings = replace(settings, node_name=name)
        make_folder(settings.data_path, "data folder")
        check_can_listen(HostPort(LOOPBACK, settings.http_port), "LOCALAI_HTTP_ADDR")
        sigterm_ends_well(reactor)
        return agent.make(settings, reactor)
