"""
The same port forward by others: ``ssh -R``, and Go's yamux over a WebSocket. And ours, by two processes as theirs.

``missing`` says why one can't run here; it is then named in the table instead of measured.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.near import Child

HERE = Path(__file__).resolve().parent
GO_SOURCES = Path("/usr/share/gocode/src/github.com")
GO_PAIR = HERE.parent / "build" / "peers" / "go-pair"


@dataclass(frozen=True, slots=True)
class Forward:
    """
    A running port forward.

    Attributes:
        port: where to connect to.
        pids: the processes it is made of.
    """

    port: int
    pids: list[int]


@contextmanager
def ours(target: int) -> Iterator[Forward]:
    """A frontend and a worker, with splices at both ends of the tunnel."""
    with Child("forward") as near, Child("far", near.tunnel_url, str(target)) as far:
        yield Forward(near.plain_port, [near.pid, far.pid])


def go_missing() -> str:
    """Why the Go pair can't run, or nothing."""
    if shutil.which("go") is None:
        return "no go (apt-get install golang-go)"
    for name in ("hashicorp/yamux", "gorilla/websocket"):
        if not (GO_SOURCES / name).is_dir():
            return f"apt-get install golang-github-{name.replace('/', '-')}-dev"
    return ""


@contextmanager
def go_pair(target: int) -> Iterator[Forward]:
    """Built with Debian's sources when it is older than its own."""
    source = HERE / "go" / "pair.go"
    if not GO_PAIR.exists() or GO_PAIR.stat().st_mtime < source.stat().st_mtime:
        GO_PAIR.parent.mkdir(parents=True, exist_ok=True)
        flags = {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOFLAGS": ""}
        subprocess.run(["go", "build", "-o", str(GO_PAIR), str(source)], check=True, env={**os.environ, **flags})
    with ExitStack() as stack:
        accepting = stack.enter_context(running([str(GO_PAIR), "accept"]))
        tunnel, port = accepting.stdout.readline().split()  # type: ignore[union-attr]
        dialling = stack.enter_context(running([str(GO_PAIR), "dial", tunnel.decode(), str(target)]))
        dialling.stdout.readline()  # type: ignore[union-attr]
        yield Forward(int(port), [accepting.pid, dialling.pid])


def ssh_missing() -> str:
    """Why ``ssh -R`` can't run, or nothing."""
    absent = [name for name in ("sshd", "ssh", "ssh-keygen") if tool(name) is None]
    return f"no {', no '.join(absent)} (apt-get install openssh-server)" if absent else ""


@contextmanager
def ssh_reverse(target: int) -> Iterator[Forward]:
    """An own sshd with own keys on a free port; the client asks it to listen."""
    with TemporaryDirectory(prefix="bench-ssh") as name, ExitStack() as stack:
        folder = Path(name)
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
        sshd_port, port = free_port(), free_port()
        options = [
            f"Port={sshd_port}", "ListenAddress=127.0.0.1", f"HostKey={folder / 'host'}", "PidFile=none",
            f"AuthorizedKeysFile={folder / 'user.pub'}", "StrictModes=no", "UsePAM=no", "PermitRootLogin=yes",
        ]  # fmt: skip
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        sshd = [tool("sshd") or "sshd", "-D", "-e", "-f", "/dev/null", *(part for o in options for part in ("-o", o))]
        server = stack.enter_context(running(sshd))
        connectable(sshd_port)
        client = stack.enter_context(
            running(
                [
                    "ssh",
                    "-N",
                    "-F",
                    "/dev/null",
                    "-i",
                    str(folder / "user"),
                    "-p",
                    str(sshd_port),
                    "-o",
                    "StrictHostKeyChecking=no",
                    "-o",
                    "UserKnownHostsFile=/dev/null",
                    "-o",
                    "LogLevel=ERROR",
                    "-R",
                    f"127.0.0.1:{port}:127.0.0.1:{target}",
                    f"{getpass.getuser()}@127.0.0.1",
                ]
            )
        )
        connectable(port)
        yield Forward(port, [*_descendants(server.pid), client.pid])


# -- processes ---------------------------------------------------------------------------------------------------------


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """``command``, until the block ends."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def tool(name: str) -> str | None:
    """Where the program is, or None."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def connectable(port: int) -> None:
    """Wait until somebody listens on ``port``."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"nobody listens on port {port}")


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += _descendants(int(child))
    return found
