"""``twistd localai-worker``."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from twisted.application.service import IService

from localai_dist.cli.options import DaemonOptions
from localai_dist.cli.start import check_can_listen, make_folder, one_clear_line, prepared
from localai_dist.settings.kinds import HostPort
from localai_dist.settings.worker import LOOPBACK, WorkerSettings


class Options(DaemonOptions, settings_type=WorkerSettings):
    """The worker's options."""


def makeService(options: Options) -> IService:
    """
    Build the worker that ``options`` ask for.

    Raises:
        SystemExit: one line that says what can't be used.
    """
    from twisted.internet import reactor

    from localai_dist.roles import worker
    from localai_dist.roles.ending import sigterm_ends_well

    with one_clear_line(WorkerSettings.program):
        settings = prepared(options, WorkerSettings)
        settings = replace(settings, node_name=settings.node_name or socket.gethostname() or f"node-{os.getpid()}")
        make_folder(settings.data_path, "data folder")
        make_folder(settings.models_path, "models folder")
        make_folder(settings.backends_path, "backends folder")
        check_can_listen(HostPort(LOOPBACK, settings.http_port), "LOCALAI_HTTP_ADDR")
        sigterm_ends_well(reactor)
        return worker.make(settings, reactor)
