"""A frontend that loses the database while the others keep it: its workers move, and nothing of theirs is reaped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Semaphore

import pytest

from localai_dist.settings.frontend import FrontendSettings
from localai_dist.settings.worker import WorkerSettings
from localai_dist.testing.waiting import until
from tests.process.fleet import GATED, Fleet, Watch, fleet_of
from tests.process.kit import FACTOR
from tests.process.load import ANSWER, said

ROLE = "only_frontend_0"
LIVE_WINDOW = FrontendSettings().instance_live_window / FACTOR
HEARTBEAT = WorkerSettings().heartbeat_interval / FACTOR
MOVED_WITHIN = 1.5 * LIVE_WINDOW + 3 * HEARTBEAT + 15
"""Swept, told twice, dialled elsewhere (s); with room for a busy machine, and still before the tunnel has departed."""
TOKENS = 200


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Two frontends, the first with a database user of its own; two workers, a slow model and a quick one on one."""
    models = {"on-0": (0,), "slow-0": (0, f"test:tokens={TOKENS}", "test:delay=0.1", GATED)}
    with fleet_of("cut-off", models, {"LOCALAI_WORKER_RECONNECT_GRACE": "60s"}) as fleet:
        fleet.rows(f"create role {ROLE} superuser login; select 1")
        first = fleet.cluster.frontends[0]
        url = first.env["LOCALAI_AUTH_DATABASE_URL"]
        first.env["LOCALAI_AUTH_DATABASE_URL"] = re.sub("//[^@/]*@", f"//{ROLE}@", url)
        fleet.cluster.restart(first)
        fleet.settle()
        yield fleet


@contextmanager
def cut_off(fleet: Fleet) -> Iterator[None]:
    """The first frontend's database user is locked out, its connections ended; let in again afterwards."""
    ended = f"select pg_terminate_backend(pid) from pg_stat_activity where usename = '{ROLE}'"
    assert len(fleet.rows(f"alter role {ROLE} nologin; {ended}")) >= 2
    try:
        yield
    finally:
        fleet.rows(f"alter role {ROLE} login; select 1")


def test_its_workers_move_and_nothing_is_cut(fleet: Fleet) -> None:
    """
    The frontend that holds a worker's tunnel loses the database alone: the worker opens its next tunnel at the other
    one long before the grace is over, is never unhealthy, keeps its replicas, and the stream that runs through the old
    tunnel is delivered whole. The frontend serves again once it has the database back.
    """
    cluster = fleet.cluster
    assert fleet.home(0) == 0
    begun, key = Semaphore(0), cluster.secrets.api_key
    with ThreadPoolExecutor(1) as pool, fleet.standing("slow-0") as let_end:
        running = pool.submit(said, cluster.frontends[0].url, key, "slow-0", begun)
        assert begun.acquire(timeout=60)
        assert fleet.asked(1, "on-0") == (200, ANSWER)
        replicas = fleet.replicas()
        with cut_off(fleet), Watch(lambda: fleet.statuses(cluster.frontends[1]), 0.2) as statuses:
            until("the worker's tunnel at the other frontend", lambda: fleet.home(0) == 1, MOVED_WITHIN)
            assert not running.done(), running.result()
            assert fleet.asked(1, "on-0") == (200, ANSWER)
            let_end()
            assert running.result(2 * TOKENS).split() == [f"token{number}" for number in range(TOKENS)]
        assert statuses.seen == [["healthy", "healthy"]]
        assert fleet.replicas() == replicas
    until("the first frontend serving", lambda: fleet.asked(0, "on-0") == (200, ANSWER), 30)
    assert fleet.homes() == [1, 1]
