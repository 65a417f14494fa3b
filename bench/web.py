"""
An HTTP client and nginx at the ends of a port forward: curl fetches a file through it and puts one (MUX-19).

Both are Debian's; ``missing`` says what is not there. nginx is one process, and its files are in memory where there is
a folder for that. To keep a file put to it costs nginx about what the forward costs: so the two are told apart.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.forwards import connectable, free_port, running, tool
from bench.near import Transfer, cpu_time

MEMORY = Path("/dev/shm")

CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log stderr;
events {{ worker_connections 64; }}
http {{
    access_log off; sendfile on; client_max_body_size 0; client_body_buffer_size 256k;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{ listen 127.0.0.1:{port}; root {folder}; dav_methods PUT; }}
}}
"""


def missing() -> str:
    """Why it can't run, or nothing."""
    absent = [name for name in ("nginx", "curl") if tool(name) is None]
    return f"no {', no '.join(absent)} (apt-get install {' '.join(absent)})" if absent else ""


@dataclass(frozen=True, slots=True)
class Server:
    """A running nginx."""

    port: int
    pid: int
    folder: Path


@contextmanager
def nginx(sizes: list[int]) -> Iterator[Server]:
    """nginx with a file of each of ``sizes`` (bytes), named by it; takes new ones."""
    with TemporaryDirectory(prefix="bench-web", dir=MEMORY if MEMORY.is_dir() else None) as name:
        folder, port = Path(name), free_port()
        for size in sizes:
            (folder / str(size)).write_bytes(bytes(size))
        (folder / "conf").write_text(CONFIG.format(folder=folder, port=port))
        command = [tool("nginx") or "nginx", "-p", name, "-c", str(folder / "conf"), "-e", "stderr"]
        with running(command) as process:
            connectable(port)
            yield Server(port, process.pid, folder)


class WebWay:
    """
    A way from curl to nginx.

    Attributes:
        name: in words.
        port: where curl connects to.
        pids: the processes of the forward.
    """

    def __init__(self, name: str, port: int, server: Server, pids: list[int]) -> None:
        self.name = name
        self.port = port
        self.pids = pids
        self._server = server

    async def down(self, size: int) -> Transfer:
        """curl fetches the file of ``size`` bytes."""
        return self._timed(size, "%{size_download}", ["-o", os.devnull, self._url(str(size))])

    async def up(self, size: int) -> Transfer:
        """curl puts it."""
        return self._timed(size, "%{size_upload}", ["-T", str(self._server.folder / str(size)), self._url("put")])

    def _url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"

    def _timed(self, size: int, counted: str, arguments: list[str]) -> Transfer:
        """The processor times are curl's, nginx's, and those of each process between them."""
        command = [shutil.which("curl") or "curl", "-sSf", "-H", "Expect:", "-w", counted, *arguments]
        pids = [self._server.pid, *self.pids]
        before = [_children(), *map(cpu_time, pids)]
        began = time.perf_counter()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120)
        seconds = time.perf_counter() - began
        after = [_children(), *map(cpu_time, pids)]
        if int(done.stdout) != size:
            raise RuntimeError(f"{self.name}: {done.stdout} bytes moved of {size}")
        return Transfer(size, seconds, [late - early for early, late in zip(before, after, strict=True)])


def _children() -> float:
    """Processor time of all children that ended (s)."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
