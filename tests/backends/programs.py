"""Backends as the worker starts them: children of the test, on a free port, ended with it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from twisted.internet import reactor
from twisted.internet.endpoints import TCP4ClientEndpoint

from localai_dist.grpcclient import BackendChannel, connect

REPOSITORY = Path(__file__).resolve().parent.parent.parent
LLAMA = REPOSITORY / "localai_dist" / "backends" / "llama_cpp"
MODELS = REPOSITORY / "localai_dist" / "testing" / "models"
FACTS = MODELS / "tiny-facts-1m-q8_0.gguf"
TOKEN = "token-of-this-backend"
START_BOUND = 30.0


def environment(**more: str) -> dict[str, str]:
    """What a worker gives a backend."""
    given = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY),
        "LOCALAI_BACKEND_PYTHON": sys.executable,
        "LOCALAI_GRPC_AUTH_TOKEN": TOKEN,
    }
    return {**given, **more}


def next_line(program: subprocess.Popen[str], seconds: float = START_BOUND) -> str:
    """
    The next line a program prints, read byte by byte: what follows it must stay where ``select`` sees it.

    Raises:
        AssertionError: it printed none in time.
    """
    assert program.stdout is not None
    pipe, line, ends = program.stdout.fileno(), b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], max(0.0, ends - time.monotonic()))
        byte = os.read(pipe, 1) if ready else b""
        if not byte:
            raise AssertionError(f"the backend printed no line within {seconds} s (exit status {program.poll()})")
        line += byte
    return line.decode().strip()


class Program:
    """A running backend."""

    def __init__(self, command: Sequence[str | Path], **env: str) -> None:
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env=environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
        )
        try:
            self.port = int(next_line(self.process).rpartition(":")[2])
        except BaseException:
            self.end()
            raise

    async def channel(self, token: str = TOKEN) -> BackendChannel:
        """A channel to it."""
        return await connect(TCP4ClientEndpoint(reactor, "127.0.0.1", self.port), token=token, clock=reactor)

    def end(self) -> None:
        """End it now."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def gone_within(pid: int, seconds: float) -> bool:
    """Whether the process is gone (or a zombie) within ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False


def listening_addresses(pid: int) -> set[str]:
    """Local addresses (hex, as the kernel writes them) of all sockets the process listens on."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].rpartition(":")[0])
    return found
