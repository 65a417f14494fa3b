"""What a whole cluster asks of its database: connections, also right after a restart, and statements while idle."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psycopg2
import pytest

from localai_dist.testing.cluster import Cluster, Plan
from localai_dist.testing.database import DATABASE, Launched
from localai_dist.testing.postgres import PostgresServer
from localai_dist.testing.waiting import until
from tests.process.fleet import HOMED_WITHIN, Watch
from tests.process.kit import open_folder, running

FRONTENDS, WORKERS = 3, 5
POOL = 4
"""Connections of a frontend for statements; one more listens. Source: docs/reference."""
MOST = 20
"""``max_connections``: fifteen of the frontends, PostgreSQL's own reserve, and ours."""
IDLE = 10.0
"""How long the idle cluster is looked at (s)."""
LOOKS = 4
A_SECOND = 2.0
"""Statements of an idle frontend. Source: BR-105."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three frontends, five workers, the default knobs."""
    with open_folder("connections") as folder:
        plan = Plan(state=folder / "state", frontends=FRONTENDS, workers=WORKERS, models=[], durable=False)
        with running(plan) as started:
            yield started


def server_of(cluster: Cluster) -> PostgresServer:
    """The cluster's own PostgreSQL."""
    assert isinstance(cluster.database, Launched)
    return cluster.database.server


def connections(server: PostgresServer) -> tuple[int, int, int]:
    """Connections for statements, those that listen, and how many frontends these are of; zeros while it is down."""
    try:
        [found] = server.run(
            "select count(*) filter (where application_name = 'localai-frontend'),"
            " count(*) filter (where application_name like 'localai_pgbus_%'),"
            " count(distinct application_name) filter (where application_name like 'localai_pgbus_%')"
            f" from pg_stat_activity where datname = '{DATABASE}' and backend_type = 'client backend'"
        )
    except psycopg2.Error:
        return 0, 0, 0
    return int(found[0]), int(found[1]), int(found[2])


def at_work(cluster: Cluster) -> bool:
    """Whether everybody is in order."""
    return all(each.is_ready() for each in cluster.frontends) and all(each.is_ready() for each in cluster.workers)


def test_no_more_connections_than_documented(cluster: Cluster) -> None:
    """
    Three frontends and five workers on a PostgreSQL of twenty connections: four for statements and one that listens
    for each frontend, never more, also in the rush after a restart and a crash; nobody is ever turned away (BR-105).
    """
    server = server_of(cluster)
    server.run(f"alter system set max_connections = {MOST}")
    whole = (POOL * FRONTENDS, FRONTENDS, FRONTENDS)
    until("all connections at first", lambda: connections(server) == whole, 30)
    with Watch(lambda: connections(server), every=0.02) as seen:
        for stop in (server.stop, server.kill):
            stop()
            until("nobody connected", lambda: seen.seen[-1] == (0, 0, 0), 10)
            server.start()
            until("all connections", lambda: seen.seen[-1] == whole, 30)
            until("everybody at work", lambda: at_work(cluster), HOMED_WITHIN)
        assert server.run("show max_connections") == [(str(MOST),)]
    assert max(each[0] for each in seen.seen) == whole[0]
    assert max(each[1] for each in seen.seen) == whole[1]
    assert "too many clients" not in server.log.read_text(errors="replace")


@pytest.mark.slow
def test_an_idle_cluster_asks_little(cluster: Cluster) -> None:
    """Idle, with five workers that beat, a frontend asks at most two statements a second (BR-105)."""
    server = server_of(cluster)
    until("everybody at work", lambda: at_work(cluster), HOMED_WITHIN)
    rates: list[float] = []
    # What a start or a restart asked is counted late: the first look may see it, the last may not.
    while not rates or (rates[-1] > A_SECOND and len(rates) < LOOKS):
        rates.append(asked(server, IDLE) / IDLE / FRONTENDS)
    assert 0 < rates[-1] <= A_SECOND, f"statements a second: {rates}"


def asked(server: PostgresServer, seconds: float) -> float:
    """Statements of so many seconds; outside a registration each is a transaction of its own."""
    statement = f"select xact_commit + xact_rollback from pg_stat_database where datname = '{DATABASE}'"
    [(before,)] = server.run(statement)
    began = time.monotonic()
    until("the end of the look", lambda: time.monotonic() - began >= seconds, seconds + 10, every=0.2)
    [(after,)] = server.run(statement)
    return float(after - before)
