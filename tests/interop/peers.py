"""Other people's yamux, prepared once into ``build/peers``, and started as processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

HERE: Final = Path(__file__).resolve().parent
BUILD: Final = HERE.parent.parent / "build" / "peers"
GO_SOURCES: Final = Path("/usr/share/gocode/src/github.com/hashicorp/yamux")


class PeerNotPrepared(Exception):
    """A peer whose tool is here could not be prepared; that is a failure, not a reason to skip."""


def node_missing() -> str | None:
    """Why the Node peer can't run here, or None."""
    absent = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    return f"yamux peer on Node not run: no {' and no '.join(absent)} on this machine" if absent else None


def go_missing() -> str | None:
    """Why the Go peer can't run here, or None."""
    if shutil.which("go") is None:
        return "yamux peer in Go not run: no go on this machine (apt-get install golang-go)"
    if not GO_SOURCES.is_dir():
        return "yamux peer in Go not run: apt-get install golang-github-hashicorp-yamux-dev"
    return None


def node_command() -> list[str]:
    """The Node peer's command line, its libraries installed first."""
    folder = BUILD / "node"
    folder.mkdir(parents=True, exist_ok=True)
    lock = (HERE / "node" / "package-lock.json").read_bytes()
    done = folder / "installed-lock.json"
    if not done.exists() or done.read_bytes() != lock:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / "node" / name, folder / name)
        _prepare(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], folder, {})
        done.write_bytes(lock)
    shutil.copy(HERE / "node" / "peer.mjs", folder / "peer.mjs")
    return ["node", str(folder / "peer.mjs")]


def go_command() -> list[str]:
    """The Go peer's command line, built first."""
    program, source = BUILD / "go-yamux", HERE / "go" / "peer.go"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        BUILD.mkdir(parents=True, exist_ok=True)
        environment = {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOFLAGS": ""}
        _prepare(["go", "build", "-o", str(program), str(source)], HERE, environment)
    return [str(program)]


def _prepare(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise PeerNotPrepared(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


class PeerProcess(ProcessProtocol):
    """
    A running peer.

    Attributes:
        port: fires with the port it listens on.
        ended: fires with its last line.
    """

    def __init__(self) -> None:
        self.port: Deferred[int] = Deferred()
        self.ended: Deferred[str] = Deferred()
        self.output = b""
        self.errors = b""

    def outReceived(self, data: bytes) -> None:
        self.output += data
        if b"\n" in self.output and not self.port.called:
            first = self.output.split(b"\n")[0]
            self.port.callback(int(first) if first.isdigit() else 0)

    def errReceived(self, data: bytes) -> None:
        self.errors += data

    def processEnded(self, reason: Failure) -> None:
        lines = self.output.decode(errors="replace").split()
        self.ended.callback(self.output.decode(errors="replace").strip().rpartition("\n")[2] if lines else "")


def start(reactor: Any, command: list[str], *words: str) -> PeerProcess:
    """Start a peer; the caller waits for ``ended``."""
    peer = PeerProcess()
    reactor.spawnProcess(peer, command[0], [*command, *words], env=dict(os.environ))
    return peer
