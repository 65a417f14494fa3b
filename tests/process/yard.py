"""Scripted backends and their processes: galleries with variants, models pinned to workers, unloading as it is seen."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localai_dist.testing import backend
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Worker
from localai_dist.testing.waiting import until
from localai_dist.worker.install import BOXED_INDEX
from tests.process.kit import command_line, living, localai_dist, open_folder, quick_plan, rows, running
from tests.process.outside import backends_of
from tests.process.scripted import SERVED_WITHIN, chat, pin, serves

LATE = 2.0
"""How long the late backend takes before it listens (s)."""

VARIANTS = {
    # Health can't be answered before this one listens.
    "late-backend": f'sleep {LATE}\nexec "$LOCALAI_BACKEND_PYTHON" "$here/program.py" "$@"\n',
    # A second process in its group, deaf to SIGTERM; it starts none itself, so that there are two whoever looks when.
    "two-backend": '(trap "" TERM; exec "$LOCALAI_BACKEND_PYTHON" -c "import time; time.sleep(600)" "$@") &\n'
    'exec "$LOCALAI_BACKEND_PYTHON" "$here/program.py" "$@"\n',
}
"""The scriptable backend with another ``run.sh``."""


@contextmanager
def open_yard(name: str) -> Iterator[Cluster]:
    """Two frontends and two workers, the scriptable backend in several forms."""
    with open_folder(name) as folder:
        plan = quick_plan(folder / "state", models=["tiny-facts"], frontend_env=gallery(folder / "gallery"))
        with running(plan) as cluster:
            yield cluster


def gallery(folder: Path) -> dict[str, str]:
    """The frontends' environment with the box's gallery, and one with the scriptable backend and its variants."""
    index = backend.write_gallery(folder)
    for name, run in VARIANTS.items():
        shutil.copytree(folder / backend.NAME, folder / name)
        (folder / name / "run.sh").write_text('#!/bin/sh\nhere=$(cd "$(dirname "$0")" && pwd)\n' + run)
        with index.open("a") as entries:
            entries.write(f"- name: {name}\n  uri: {name}\n")
    named = [{"name": "box", "url": str(BOXED_INDEX)}, {"name": "test", "url": str(index)}]
    return {"LOCALAI_BACKEND_GALLERIES": json.dumps(named)}


def place(cluster: Cluster, name: str, *options: str, worker: int = 0, of: str = backend.NAME) -> Path:
    """Serve a scripted model, pinned to a worker; the file that its processes report to."""
    events, models = cluster.state.root / f"{name}.events", cluster.state.models
    (models / f"{name}.bin").write_bytes(name.encode())
    lines = "".join(f"  - {option}\n" for option in [*options, f"test:events={events}"])
    sheet = f"name: {name}\nbackend: {of}\nparameters:\n  model: {name}.bin\noptions:\n{lines}"
    (models / f"{name}.yaml").write_text(sheet)
    for frontend in cluster.frontends:
        until(f"{name} served by {frontend.name}", lambda it=frontend: serves(cluster, it, name), SERVED_WITHIN)
    pin(cluster, name, worker)
    return events


def load(cluster: Cluster, name: str) -> tuple[int, set[int]]:
    """Have a model loaded by its first request: the port of its backend, and the processes behind it."""
    reply = chat(cluster, cluster.frontends[0], name)
    assert reply.status == 200, reply.text
    port = port_of(cluster, name)
    return port, backends_of(worker_of(cluster, name), port)


def row_of(cluster: Cluster, name: str) -> tuple[Any, ...] | None:
    """The row of a loaded model: node and address."""
    found = rows(cluster.database.url, "select node_id, address from node_models where model_name = %s", name)
    return found[0] if found else None


def port_of(cluster: Cluster, name: str) -> int:
    """The port of its backend."""
    row = row_of(cluster, name)
    assert row is not None
    assert row[1].startswith("127.0.0.1:")
    return int(row[1].rpartition(":")[2])


def worker_of(cluster: Cluster, name: str) -> Worker:
    """The worker it is loaded on."""
    row = row_of(cluster, name)
    assert row is not None
    return next(worker for worker in cluster.workers if worker.node_id == row[0])


def server_of(pids: set[int]) -> int:
    """The one of a backend's processes that is no guard: the program itself."""
    [found] = [pid for pid in pids if "guard.py" not in command_line(pid)]
    return found


def operator(cluster: Cluster, *words: str) -> subprocess.Popen[str]:
    """The operator's command at the first frontend."""
    env = {"LOCALAI_SERVER": cluster.frontends[0].url, "LOCALAI_CLI_API_KEY": cluster.secrets.api_key}
    return localai_dist(*words, env=env)


def unloaded(cluster: Cluster, name: str, processes: set[int], port: int) -> tuple[int, str, str]:
    """
    Unload a model by the operator's command: exit code and both outputs.

    Meanwhile its row may not be gone before its processes are, and its port not given to another one.
    """
    assert row_of(cluster, name), "there was no row to begin with"
    command = operator(cluster, "models", "unload", name)
    while command.poll() is None:
        gone = row_of(cluster, name) is None
        assert not (gone and living(processes)), "the row was removed while the process ran"
        time.sleep(0.02)
    out, err = command.communicate()
    if command.returncode == 0:
        assert row_of(cluster, name) is None and not living(processes)
    return command.returncode, out, err


@contextmanager
def held(port: int, *, listen: bool, shared: bool = False) -> Iterator[None]:
    """A port in another process's hands: bound, and listened on if asked."""
    code = (
        "import socket, sys, time\n"
        "it = socket.socket()\n"
        f"it.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, {int(shared)})\n"
        f"it.bind(('127.0.0.1', {port}))\n"
        f"{'it.listen(8)' if listen else ''}\n"
        "print('held', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield
        finally:
            process.kill()
