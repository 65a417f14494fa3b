"""One loss of each kind at the default knobs, which every other suite shortens: ``make test-slow`` runs it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from localai_dist.settings.frontend import FrontendSettings
from localai_dist.settings.option import options_of
from localai_dist.testing.waiting import until
from tests.process.fleet import HOMED_WITHIN, ROUTE, Fleet, Watch, fleet_of
from tests.process.load import ANSWER, Load
from tests.process.scripted import reported

pytestmark = pytest.mark.slow

DEFAULTS: dict[str, Any] = {row.name: row.default for row in options_of(FrontendSettings)}
TICK = DEFAULTS["health_interval"]
STALE = DEFAULTS["node_stale_after"]
LIVE_WINDOW = DEFAULTS["instance_live_window"]
GRACE = DEFAULTS["worker_reconnect_grace"]
DRAIN = DEFAULTS["drain_timeout"]


@pytest.fixture(scope="module")
def ready() -> Iterator[Fleet]:
    """Two frontends, two workers, no knob touched, and a model on each worker."""
    with fleet_of("defaults", {"on-0": (0,), "on-1": (1,)}, quick=False) as fleet:
        yield fleet


@pytest.fixture
def fleet(ready: Fleet) -> Fleet:
    """The same, everything running, each tunnel at its own frontend, both models loaded."""
    ready.settle()
    assert ready.spread() == [0, 1]
    for worker in (0, 1):
        assert ready.asked(1, f"on-{worker}") == (200, ANSWER)
    return ready


def test_the_owner_is_killed(fleet: Fleet) -> None:
    """
    The frontend that holds a tunnel is killed: for two looks after its sweep nothing is demoted, reaped or evicted
    while the worker can't dial, then it serves through the survivor without a load; the other serves on (CLUS-18).
    """
    cluster = fleet.cluster
    loads = reported(cluster.state.root / "on-0.events", "load")
    replicas = fleet.replicas()
    survivor = cluster.frontends[1]
    fleet.ways[0, 1].block(ROUTE)
    cluster.frontends[0].kill()
    served = Watch(lambda: fleet.asked(1, "on-1"), every=0.5)
    with Watch(fleet.replicas, 0.2) as seen, Watch(lambda: fleet.statuses(survivor), 0.2) as statuses, served:
        lost = "select 1 from node_connections where disconnected_at < now() - make_interval(secs => %s)"
        until("two looks after the sweep", lambda: fleet.rows(lost, 2 * TICK + 0.5), LIVE_WINDOW + 2 * TICK + 30)
        assert fleet.asked(1, "on-0") == (503, "worker_reconnecting")
        fleet.ways[0, 1].unblock(ROUTE)
        until("the worker's new home", lambda: fleet.home(0) == 1, HOMED_WITHIN)
        assert fleet.asked(1, "on-0") == (200, ANSWER)
    assert seen.seen == [replicas]
    assert statuses.seen == [["healthy", "healthy"]]
    assert served.seen == [(200, ANSWER)] and served.asked >= 10
    assert reported(cluster.state.root / "on-0.events", "load") == loads


def test_a_worker_is_killed(fleet: Fleet) -> None:
    """
    A killed worker is offline on both frontends within the stale time, a tick and 5 s, and goes there from healthy in
    one step, since its grace is longer; started again it is healthy and serves from both (CLUS-26).
    """
    assert STALE + TICK + 5 <= GRACE
    cluster = fleet.cluster
    one, two = (Watch(lambda at=at: status(fleet, at, "worker-1"), 0.2) for at in (0, 1))
    with one, two:
        killed = time.monotonic()
        cluster.workers[1].kill()
        for at in (0, 1):
            until("offline", lambda at=at: status(fleet, at, "worker-1") == "offline", STALE + TICK + 5)
        assert time.monotonic() - killed <= STALE + TICK + 5
    assert one.seen == two.seen == ["healthy", "offline"]
    cluster.workers[1].start()
    for at in (0, 1):
        until("healthy again", lambda at=at: status(fleet, at, "worker-1") == "healthy", HOMED_WITHIN)
        assert fleet.asked(at, "on-1") == (200, ANSWER)


def test_a_frontend_is_stopped(fleet: Fleet) -> None:
    """
    A frontend that is told to stop hands its worker over before it ends, so no request through the other one fails,
    and is gone within the drain time without an error (CLUS-20).
    """
    cluster = fleet.cluster
    leaving, staying = cluster.frontends
    with Load(staying.url, cluster.secrets.api_key, ["on-0", "on-1"], rate=5.0) as load:
        until("the load", lambda: load.answered >= 10, 30)
        leaving.terminate()
        assert leaving.wait_ended(DRAIN + 2) == 0
        answered = load.answered
        until("more of it", lambda: load.answered >= answered + 10, 30)
    assert (load.troubles, load.texts) == ([], {ANSWER})
    assert fleet.homes() == [1, 1]


def status(fleet: Fleet, frontend: int, name: str) -> str:
    """What a frontend says of a node."""
    return str(fleet.cluster.nodes(fleet.cluster.frontends[frontend])[name]["status"])
