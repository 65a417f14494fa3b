"""What process tests share: quick knobs, questions to the database, processes seen from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psycopg2

from localai_dist.settings.frontend import FrontendSettings
from localai_dist.settings.option import options_of
from localai_dist.settings.worker import WorkerSettings
from localai_dist.testing.child import checkout, child_environment
from localai_dist.testing.cluster import Cluster, Plan
from localai_dist.testing.members import Frontend
from localai_dist.testing.web import ask

Clustered = TypeVar("Clustered", bound=Cluster)

CLUSTERS: list[Cluster] = []
"""Those that run now: a failing test shows what their children said last."""

FACTOR = 5.0
"""By how much every time knob is shortened; one scenario of each kind runs at the defaults in ``make test-slow``."""


def quick(settings_type: type[Any], factor: float = FACTOR) -> dict[str, str]:
    """The environment that divides every time knob of a daemon by ``factor``."""
    return {row.env: f"{round(row.default / factor * 1000)}ms" for row in options_of(settings_type) if row.lab}


QUICK_FRONTEND = quick(FrontendSettings)
QUICK_WORKER = quick(WorkerSettings)

NAIROBI = "The capital of Kenya is Nairobi."
"""What the model tiny-facts says to ``capital_of_kenya``."""


@contextmanager
def open_folder(name: str) -> Iterator[Path]:
    """A temporary folder that any user may pass through: root's PostgreSQL runs under another uid."""
    folder = Path(tempfile.mkdtemp(prefix=f"localai-dist-{name}-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def quick_plan(state: Path, **more: Any) -> Plan:
    """A plan with quick knobs and a forgetful database; ``more`` goes over it, the two environments are merged."""
    more["frontend_env"] = {**QUICK_FRONTEND, **more.get("frontend_env", {})}
    more["worker_env"] = {**QUICK_WORKER, **more.get("worker_env", {})}
    return Plan(state=state, **{"durable": False, **more})


@contextmanager
def running(plan: Plan) -> Iterator[Cluster]:
    """A started cluster; at the end every child must be gone."""
    with run_to_the_end(Cluster(plan)) as cluster:
        yield cluster


@contextmanager
def run_to_the_end(cluster: Clustered) -> Iterator[Clustered]:
    """The same of a cluster of any kind."""
    CLUSTERS.append(cluster)
    try:
        cluster.start()
        yield cluster
    finally:
        CLUSTERS.remove(cluster)
        cluster.stop()
        assert [child.name for child in cluster.children if child.is_alive()] == []


def rows(database_url: str, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """The rows of one statement."""
    connection = psycopg2.connect(database_url)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


def localai_dist(*words: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """The operator's command of this checkout, its two outputs as pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "localai_dist.cli.operator.main", *words],
        env=child_environment({"PYTHONUNBUFFERED": "1", **(env or {})}),
        cwd=checkout(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def descendants(pid: int) -> set[int]:
    """Every living process that descends from ``pid``."""
    parents = {child: parent for child, (parent, state) in _processes().items() if state not in "ZX"}
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found - {pid}
        found |= more


def living(pids: set[int]) -> set[int]:
    """Which of them still run; a zombie doesn't."""
    seen = _processes()
    return {pid for pid in pids if pid in seen and seen[pid][1] not in "ZX"}


def _processes() -> dict[int, tuple[int, str]]:
    """Pid -> parent and state letter."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            found[int(entry.name)] = (int(words[1]), words[0])
    return found


def command_line(pid: int) -> str:
    """A process's command line as everybody on the machine can read it; empty once the process is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace")


def end(process: subprocess.Popen[str]) -> None:
    """Kill what a test left running, and reap it."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.communicate()


@contextmanager
def open_chat(cluster: Cluster, frontend: Frontend, model: str) -> Iterator[socket.socket]:
    """A plain socket on which a streamed chat was asked for."""
    url = urlsplit(frontend.url)
    body = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": "go"}]}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {cluster.secrets.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=60) as connection:
        connection.sendall(head + body)
        yield connection


def capital_of_kenya(ready: Mapping[str, Any], *, frontend: int = 1, model: str = "tiny-facts") -> str:
    """What a model of the cluster of a ready file says to that question."""
    messages = [{"role": "user", "content": "What is the capital of Kenya?"}]
    body = {"model": model, "temperature": 0, "max_tokens": 32, "messages": messages}
    url = ready["frontends"][frontend]["url"] + "/v1/chat/completions"
    reply = ask(url, key=ready["api_key"], method="POST", body=body, timeout=60)
    assert reply.status == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])
