"""A database that is there and says nothing: to one frontend alone, and to all while more is broken."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from localai_dist.testing.database import Launched
from localai_dist.testing.faults import FaultProxy
from localai_dist.testing.members import Frontend
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from tests.process.faults import SilentSocket
from tests.process.fleet import HOMED_WITHIN, Fleet, fleet_of
from tests.process.kit import descendants, open_chat
from tests.process.load import ANSWER
from tests.process.scripted import chat

NOTICED_WITHIN = 30.0
"""A frontend says that it is not ready within this (s) of the database's last word."""
AT_ONCE = 0.1
"""Liveness takes no longer than this (s)."""
NEVER_LONGER = 3.0
"""Not even once on a machine that does other things (s); whoever waits for the database or a peer waits longer."""
TOKENS = 2000


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Two frontends, two workers; the first frontend's way to the database and the ways to its peer can fall silent."""
    models = {"on-0": (0,), "on-1": (1,), "slow-0": (0, f"test:tokens={TOKENS}", "test:delay=0.1")}
    with fleet_of("silent", models, {"LOCALAI_WORKER_RECONNECT_GRACE": "60s"}) as started:
        for number in (0, 1):
            assert started.asked(0, f"on-{number}") == (200, ANSWER)
        yield started


@contextmanager
def between(fleet: Fleet, frontend: Frontend, name: str, value: str) -> Iterator[None]:
    """A frontend with another setting; it is restarted before and after."""
    kept = frontend.env[name]
    frontend.env[name] = value
    try:
        fleet.cluster.restart(frontend)
        fleet.settle()
        yield
    finally:
        frontend.env[name] = kept
        fleet.cluster.restart(frontend)
        fleet.settle()


def why_unready(frontend: Frontend) -> str:
    """The reason of a 503, empty for another status."""
    status, reason = readiness(frontend)
    return reason if status == 503 else ""


def readiness(frontend: Frontend) -> tuple[int, str]:
    """Status of ``/readyz``, and why the database is not in order."""
    reply = ask(frontend.url + "/readyz", timeout=10)
    check = (reply.json() or {}).get("checks", {}).get("database", {})
    return reply.status, "" if check.get("ok") else str(check.get("reason", ""))


def test_one_frontends_way_falls_silent(fleet: Fleet) -> None:
    """
    A frontend that hears nothing of the database any more says so within 30 s; what streams through it goes on; the
    other one stays ready; back, it is ready and serves (BR-023).
    """
    cluster = fleet.cluster
    first, other = cluster.frontends
    folder = cluster.state.folder("way", inside=[])
    way = SilentSocket(cluster.database.url, folder)
    with between(fleet, first, "LOCALAI_AUTH_DATABASE_URL", way.url):
        assert fleet.home(0) == 0
        with open_chat(cluster, first, "slow-0") as stream:
            more_tokens(stream, 3)
            way.swallow()
            try:
                until("not ready, and why", lambda: why_unready(first), NOTICED_WITHIN)
                assert ask(first.url + "/healthz").status == 200
                assert readiness(other) == (200, "")
                assert fleet.asked(1, "on-1") == (200, ANSWER)
                so_far(stream)
                more_tokens(stream, 20)  # what was on its way before is not among them
            finally:
                way.heal()
        until("ready again", lambda: readiness(first) == (200, ""), 30)
        assert fleet.asked(0, "on-1") == (200, ANSWER)
    way.close()


def so_far(stream: socket.socket) -> None:
    """Take what has arrived by now."""
    stream.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while stream.recv(65536):
            pass


def more_tokens(stream: socket.socket, count: int) -> None:
    """So many more tokens arrive, and no error."""
    stream.settimeout(30)
    received = b""
    while received.count(b'"content":"') < count:
        piece = stream.recv(65536)
        received += piece
        assert piece and b'"error"' not in received, received[-300:]


@contextmanager
def stopped(fleet: Fleet) -> Iterator[None]:
    """PostgreSQL stands still, every process of it."""
    assert isinstance(fleet.cluster.database, Launched)
    server = fleet.cluster.database.server.pid
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    until("PostgreSQL's first process standing still", lambda: standing(server), 10)
    pids = [server, *descendants(server)]  # it makes no other one now; one that was ending may be gone
    for pid in pids:
        send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            send(pid, signal.SIGCONT)


def standing(pid: int) -> bool:
    """Whether a process is stopped."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()[0] == "T"


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def test_everything_hangs_at_once(fleet: Fleet) -> None:
    """
    PostgreSQL stopped, a worker frozen, a peer that swallows everything, and requests that wait for all of them: on
    both frontends liveness answers at once, readiness turns 503 with the reason, and both are well again (BR-106).
    """
    cluster = fleet.cluster
    first = cluster.frontends[0]
    inside: FaultProxy = fleet.faults.proxy(first.url)
    with (
        between(fleet, first, "LOCALAI_DISTRIBUTED_ADVERTISE_ADDR", urlsplit(inside.url).netloc),
        ThreadPoolExecutor(16) as pool,
    ):
        for number in (0, 1):
            assert fleet.asked(1, f"on-{number}") == (200, ANSWER)  # one of them by relay: the link is there
        cluster.workers[1].freeze()
        inside.swallow()
        with stopped(fleet):
            for number in range(8):
                at, model = cluster.frontends[number % 2], f"on-{number // 2 % 2}"
                pool.submit(chat, cluster, at, model, stream=number >= 4)
                pool.submit(ask, at.url + "/api/nodes", key=cluster.secrets.api_key, timeout=60)
            took: list[float] = []

            def unready() -> bool:
                took.extend(alive(frontend) for frontend in cluster.frontends)
                return all(why_unready(frontend) for frontend in cluster.frontends)

            until("neither is ready, and why", unready, NOTICED_WITHIN)
            took += [alive(frontend) for frontend in cluster.frontends for _ in range(20)]
        cluster.workers[1].thaw()
        inside.heal()
        for frontend in cluster.frontends:
            until(f"{frontend.name} ready again", lambda it=frontend: readiness(it) == (200, ""), 40)
        took.sort()
        assert took[len(took) // 2] < AT_ONCE and took[-1] < NEVER_LONGER, took[-5:]
    for number in (0, 1):
        until(f"on-{number} serves", lambda it=number: fleet.asked(1, f"on-{it}") == (200, ANSWER), HOMED_WITHIN)


def alive(frontend: Frontend) -> float:
    """How long ``/healthz`` took (s)."""
    began = time.monotonic()
    assert ask(frontend.url + "/healthz", timeout=30).status == 200
    return time.monotonic() - began
