"""What messages between frontends take, and what a fleet of simulated workers costs, at the default knobs (CLUS-25)."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg2

from bench.rows import Row, at_most, quantile
from localai_dist.registry.membership import retention
from localai_dist.store.statements import load_statements
from localai_dist.testing.cluster import Cluster, Plan
from localai_dist.testing.waiting import until
from tests.process.kit import open_folder, running

FEW, MANY = 100, 1000
SETTLE, SPAN = 10.0, 60.0
"""How long a fleet is left alone before it is looked at (PostgreSQL counts late), and how long it is looked at (s)."""
GROWN_WITHIN = 300.0
SWEEPS = 10
GRACE, LIVE_WINDOW = 90.0, 30.0
SQL = load_statements("instances.sql")


@dataclass(frozen=True, slots=True)
class Cost:
    """
    What a fleet of one size cost.

    Attributes:
        statements: of the whole cluster in a minute.
        cpu: of one frontend: the share of a core, in percent.
        sweep: one membership beat that finds a dead frontend and marks its half of the tunnels as lost (ms).
        look: one look of the health monitor at every node (ms).
    """

    workers: int
    statements: float
    cpu: float
    sweep: float = 0.0
    look: float = 0.0


def run() -> list[Row]:
    """The rows of CLUS-25, and how a frontend's death looks to 1000 workers."""
    with open_folder("bench-fleet") as folder:
        plan = Plan(state=folder / "state", workers=0, models=[])
        with running(plan) as cluster:
            messages = _measured("bus", cluster.database.url)
            time.sleep(SETTLE)
            none = _cost(cluster, 0)
            without = _resident(cluster.frontends[1].pid)
            with _flock(cluster) as flock:
                few = _grown(cluster, flock, FEW)
                many = _grown(cluster, flock, MANY)
                back = _orphaned(cluster)
                everybody = _everybody(cluster, without)
    return [*_bus_rows(messages), *_fleet_rows(none, few, many), back, everybody]


def _bus_rows(messages: list[float]) -> list[Row]:
    took = [1000 * seconds for seconds in messages]
    what = f"bus, send to receive, {len(took)} messages at 500/s"
    return [
        Row("CLUS-25", f"{what}, p50", round(quantile(took, 0.5), 3), "ms"),
        at_most("CLUS-25", f"{what}, p99", quantile(took, 0.99), "ms", 5.0),
    ]


def _fleet_rows(none: Cost, few: Cost, many: Cost) -> list[Row]:
    per = [cost.statements / cost.workers for cost in (few, many)]
    grown = f"from {FEW} to {MANY} workers"
    linear = MANY / FEW
    rows = [at_most("BR-105", "idle, no worker: statements of a frontend", none.statements / 2 / 60, "/s", 2.0)]
    for cost, each in zip((few, many), per, strict=True):
        rows += [
            Row("CLUS-25", f"{cost.workers} workers: statements per worker", round(each, 2), "/min"),
            Row("CLUS-25", f"{cost.workers} workers: processor of a frontend without requests", _short(cost.cpu), "%"),
            Row("CLUS-25", f"{cost.workers} workers: sweep of a dead frontend", _short(cost.sweep), "ms"),
            Row("CLUS-25", f"{cost.workers} workers: look at every node", _short(cost.look), "ms"),
        ]
    return [
        *rows,
        Row("CLUS-25", "no worker: processor of a frontend without requests", _short(none.cpu), "%"),
        at_most("CLUS-25", f"statements per worker, {grown}", per[1] / per[0], "times", 1.0),
        at_most(
            "CLUS-25",
            f"processor beyond that of no worker, {grown}",
            (many.cpu - none.cpu) / (few.cpu - none.cpu),
            "times",
            linear,
        ),
        at_most("CLUS-25", f"sweep, {grown}", many.sweep / few.sweep, "times", linear),
        at_most("CLUS-25", f"look, {grown}", many.look / few.look, "times", linear),
    ]


def _short(number: float) -> float:
    return round(number, 2)


def _measured(what: str, dsn: str) -> list[float]:
    """What ``bench.flock`` prints."""
    command = [sys.executable, "-m", "bench.flock", what, dsn]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=GROWN_WITHIN)
    return [float(number) for number in json.loads(done.stdout)]


@contextmanager
def _flock(cluster: Cluster) -> Iterator[subprocess.Popen[str]]:
    """The process of the simulated workers; none yet."""
    folder = cluster.state.folder("flock", inside=[])
    urls = [frontend.url for frontend in cluster.frontends]
    env = {**os.environ, "LOCALAI_REGISTRATION_TOKEN": cluster.secrets.registration_token}
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.flock", "workers", str(folder), *urls],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _grown(cluster: Cluster, flock: subprocess.Popen[str], workers: int) -> Cost:
    """What so many workers cost once all are there."""
    assert flock.stdin is not None and flock.stdout is not None
    flock.stdin.write(f"{workers}\n")
    flock.stdin.flush()
    if flock.stdout.readline() != f"{workers}\n":
        raise RuntimeError("the simulated workers ended")
    until("a tunnel of each", lambda: _held(cluster) == workers, GROWN_WITHIN)
    time.sleep(SETTLE)
    cost = _cost(cluster, workers)
    if _held(cluster) != workers:
        raise RuntimeError("tunnels were lost while they were counted")
    look = statistics.median(_measured("look", cluster.database.url))
    return Cost(workers, cost.statements, cost.cpu, 1000 * _sweep(cluster), 1000 * look)


def _cost(cluster: Cluster, workers: int) -> Cost:
    """Statements and processor time of ``SPAN`` seconds."""
    before = [_statements(cluster), *(_cpu(frontend.pid) for frontend in cluster.frontends)]
    began = time.monotonic()
    time.sleep(SPAN)
    seconds = time.monotonic() - began
    after = [_statements(cluster), *(_cpu(frontend.pid) for frontend in cluster.frontends)]
    spent = [late - early for early, late in zip(before, after, strict=True)]
    cost = Cost(workers, spent[0] / seconds * 60, 100 * statistics.mean(spent[1:]) / seconds)
    sys.stdout.write(f"  {workers} workers: {cost.statements:.0f} statements/min, {cost.cpu:.1f} % of a core each\n")
    sys.stdout.flush()
    return cost


def _cpu(pid: int | None) -> float:
    """Processor time of a process so far (s); Linux gives every process a clock."""
    assert pid is not None
    return time.clock_gettime((~pid << 3) | 2)


def _statements(cluster: Cluster) -> float:
    """What ran so far: outside a registration every statement is a transaction of its own."""
    statement = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
    with _connected(cluster) as cursor:
        cursor.execute(statement)
        return float(cursor.fetchone()[0])


def _held(cluster: Cluster) -> int:
    with _connected(cluster) as cursor:
        cursor.execute("select count(*) from node_connections where owner_instance_id <> ''")
        return int(cursor.fetchone()[0])


def _sweep(cluster: Cluster) -> float:
    """The median time of a beat that finds the first frontend dead (s); each is rolled back."""
    values = {"id": "bench", "window": LIVE_WINDOW, "retention": retention(GRACE)}
    took = []
    for _ in range(SWEEPS):
        with _connected(cluster) as cursor:
            cursor.execute("begin")
            cursor.execute(
                "update instances set last_seen = now() - interval '1 hour' where id = %s",
                [cluster.frontends[0].instance_id],
            )
            began = time.monotonic()
            cursor.execute(SQL["beat"], values)
            took.append(time.monotonic() - began)
            found = cursor.fetchone()
            cursor.execute("rollback")
        if not found[2]:
            raise RuntimeError("the sweep found no tunnel")
        time.sleep(0.2)
    return statistics.median(took)


def _orphaned(cluster: Cluster) -> Row:
    """Kill the first frontend: the time until each of its workers has a tunnel at the other one."""
    owned = "select count(*) from node_connections where owner_instance_id = %s"
    with _connected(cluster) as cursor:

        def homed() -> bool:
            cursor.execute(owned, [cluster.frontends[1].instance_id])
            return bool(cursor.fetchone()[0] == MANY)

        began = time.monotonic()
        cluster.frontends[0].kill()
        until("everybody at the survivor", homed, GROWN_WITHIN, every=0.05)
        took = time.monotonic() - began
    what = f"a frontend killed: all of its {MANY // 2} workers have a tunnel at the other one after"
    return at_most("BR-103", what, took, "s", 90.0)


def _everybody(cluster: Cluster, without: float) -> Row:
    """What the survivor, which holds every tunnel now, has in memory; ``without`` any it had so much (MiB)."""
    time.sleep(SETTLE)
    resident = _resident(cluster.frontends[1].pid)
    if _held(cluster) != MANY:
        raise RuntimeError("tunnels were lost while their frontend was looked at")
    row = at_most("MUX-21", f"a frontend that holds {MANY} idle tunnels: resident", round(resident, 1), "MiB", 300)
    return replace(row, peer=f"without any {without:.0f} MiB")


def _resident(pid: int | None) -> float:
    """Resident memory of a process (MiB)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024


@contextmanager
def _connected(cluster: Cluster) -> Iterator[psycopg2.extensions.cursor]:
    """A cursor that commits by itself."""
    connection = psycopg2.connect(cluster.database.url)
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            yield cursor
    finally:
        connection.close()
