"""Small backends, and a supervisor over them, for tests with real processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from twisted.internet import reactor as _reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory, Protocol

from localai_dist.ids import ProcessKey
from localai_dist.worker.gallery import Gallery
from localai_dist.worker.install import Installer
from localai_dist.worker.logs import LogLine, LogStore
from localai_dist.worker.ports import PortRange, PortTable
from localai_dist.worker.supervisor import Supervisor

reactor: Any = _reactor
PYTHON = sys.executable

LISTENER = """
import os, signal, socket, sys, time
host, port = sys.argv[2].split(":")
{setup}
listening = socket.create_server((host, int(port)))
print("up", flush=True)
while True:
    try:
        listening.accept()[0].close()
    except OSError:
        pass
"""
"""Stands for a backend: it listens, and that is all; ``setup`` may be more code, done before anybody can connect."""


def write_backend(folder: Path, name: str, *, setup: str = "", run: str = "") -> None:
    """A backend's source directory; ``run`` replaces the shell command."""
    source = folder / name
    source.mkdir(parents=True)
    (source / "main.py").write_text(LISTENER.format(setup=setup))
    command = run or 'exec "$LOCALAI_BACKEND_PYTHON" -S "$(dirname "$0")/main.py" "$@"'
    (source / "run.sh").write_text(f"#!/bin/sh\n{command}\n")


def write_index(folder: Path, *names: str) -> Gallery:
    """A gallery index for backends written before."""
    (folder / "index.yaml").write_text(json.dumps([{"name": name, "uri": name, "version": "1"} for name in names]))
    return Gallery(str(folder / "index.yaml"), "test")


class Answer:
    """What Free answers."""

    def __init__(self, success: bool, message: str = "") -> None:
        self.success, self.message = success, message


class FakeBackend:
    """Asks nothing: healthy while the port accepts; Free answers as scripted."""

    def __init__(self, script: FakeConnect) -> None:
        self._script = script

    async def health(self, timeout: float = 2.0) -> bool:
        """As scripted."""
        return self._script.healthy

    async def free(self, timeout: float = 5.0) -> Any:
        """As scripted: an answer, an exception, or never."""
        self._script.freed += 1
        if self._script.free is None:
            await Deferred()
        if isinstance(self._script.free, Exception):
            raise self._script.free
        return self._script.free

    def close(self) -> None:
        """Nothing is open."""


class FakeConnect:
    """Connects for real, to see whether anybody listens, then speaks no gRPC."""

    def __init__(self) -> None:
        self.healthy = True
        self.free: Any = Answer(True)
        self.freed = 0
        self.tokens: list[str] = []

    async def __call__(self, port: int, token: str) -> FakeBackend:
        """See ``process.Connect``."""
        self.tokens.append(token)
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", port, timeout=2)
        protocol = await endpoint.connect(Factory.forProtocol(Protocol))
        protocol.transport.abortConnection()  # type: ignore[union-attr]
        return FakeBackend(self)


async def offload(function: Any, *args: Any, **kwargs: Any) -> Any:
    """At once, in this thread."""
    return function(*args, **kwargs)


class World:
    """A supervisor and what it was built from."""

    def __init__(self, folder: Path, gallery: Gallery, ports: PortRange) -> None:
        self.connect = FakeConnect()
        self.logs = LogStore()
        self.installer = Installer(folder / "installed", galleries=[gallery], now=lambda: "2026-01-01T00:00:00Z")
        self.supervisor = Supervisor(
            reactor=reactor,
            installer=self.installer,
            ports=PortTable(ports),
            connect=self.connect,
            environment=lambda token: os.environ | {"LOCALAI_GRPC_AUTH_TOKEN": token, "LOCALAI_BACKEND_PYTHON": PYTHON},
            mint=lambda: f"token-{len(self.connect.tokens)}",
            last_words=lambda key, count: self.logs.tail(key, count, "stderr"),
            line=self._line,
            offload=offload,
        )

    def _line(self, key: ProcessKey, stream: str, text: str) -> None:
        self.logs.append(key, LogLine("", stream, text))
