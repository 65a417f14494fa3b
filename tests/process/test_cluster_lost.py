"""Workers that are lost: killed, silent without an end, frozen."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from localai_dist.testing.waiting import until
from tests.process.fleet import HOMED_WITHIN, ROUTE, Fleet, Watch, fleet_of
from tests.process.kit import QUICK_WORKER
from tests.process.load import ANSWER, Trouble, said

GRACE = 4.0
STALE = 6.0
TICK = 1.0
KEEPALIVE = 1.0
NOTICED = 3 * KEEPALIVE + 1
"""Within this a dead tunnel is known to be dead, at both ends."""


@pytest.fixture(scope="module")
def ready() -> Iterator[Fleet]:
    """Two frontends, two workers, a grace and a staleness that a test can sit out, quick and slow models."""
    env = {
        "LOCALAI_WORKER_RECONNECT_GRACE": f"{GRACE}s",
        "LOCALAI_NODE_STALE_AFTER": f"{STALE}s",
        "LOCALAI_HEALTH_INTERVAL": f"{TICK}s",
        "LOCALAI_ROUTE_WAIT": "500ms",
    }
    models = {"on-0": (0,), "on-1": (1,), "slow-0": (0, "test:tokens=200", "test:delay=0.1")}
    with fleet_of("lost", models, env) as fleet:
        yield fleet


@pytest.fixture
def fleet(ready: Fleet) -> Fleet:
    """The same, everything running and each tunnel at its own frontend."""
    ready.settle()
    return ready


def listing(fleet: Fleet, frontend: int, name: str) -> tuple[str, str]:
    """Status and tunnel of a node as a frontend tells it."""
    node = fleet.cluster.nodes(fleet.cluster.frontends[frontend])[name]
    return node["status"], node["tunnel"]["state"]


def test_a_killed_worker_is_offline_and_nothing_else(fleet: Fleet) -> None:
    """
    Killed, it is offline on both frontends within the stale time, a tick and 5 s, and once it was not healthy it is
    never healthy in between; started again it is healthy on both, and killed again it is offline again (CLUS-26).
    """
    cluster = fleet.cluster
    with Watch(lambda: listing(fleet, 0, "worker-1")[0]) as one, Watch(lambda: listing(fleet, 1, "worker-1")[0]) as two:
        cluster.workers[1].kill()
        killed = time.monotonic()
        for frontend in (0, 1):
            until("offline", lambda at=frontend: listing(fleet, at, "worker-1")[0] == "offline", STALE + TICK + 5)
        assert time.monotonic() - killed <= STALE + TICK + 5
        [(since,)] = fleet.rows("select now()")
        later = "select now() > %s::timestamptz + make_interval(secs => %s)"
        until("two more looks", lambda: fleet.rows(later, since, 2 * TICK) == [(True,)], 2 * TICK + 5)
    for seen in (one.seen, two.seen):
        # Departed after the grace, silent for too long a second or two later: one look may see both.
        assert seen in (["healthy", "unhealthy", "offline"], ["healthy", "offline"])
    claim = fleet.claims()[1]
    cluster.workers[1].start()
    for frontend in (0, 1):
        until("healthy again", lambda at=frontend: listing(fleet, at, "worker-1")[0] == "healthy", HOMED_WITHIN)
    fleet.homed(1, claim)  # it is healthy as soon as it has registered, and dials then
    for frontend in (0, 1):
        assert fleet.asked(frontend, "on-1") == (200, ANSWER)
    cluster.workers[1].kill()
    for frontend in (0, 1):
        until("offline again", lambda at=frontend: listing(fleet, at, "worker-1")[0] == "offline", STALE + TICK + 5)


def test_an_agent_worker_departs_by_the_same_rule(fleet: Fleet) -> None:
    """
    An agent worker is admitted by the same door; a tunnel that stays away longer than the grace makes it departed and
    unhealthy on both frontends though it beats, and its return heals that (CLUS-23, BR-001).
    """
    cluster = fleet.cluster
    ways = [fleet.faults.proxy(frontend.url) for frontend in cluster.frontends]
    folder = cluster.state.folder("agent-0", inside=["data"])
    env = {
        **QUICK_WORKER,
        "LOCALAI_REGISTER_TO": ",".join(way.url for way in ways),
        "LOCALAI_REGISTRATION_TOKEN": cluster.secrets.registration_token,
        "LOCALAI_NODE_NAME": "agent-0",
        "LOCALAI_DATA_PATH": str(folder / "data"),
    }
    agent = cluster.another("agent-0", "localai-agent-worker", env)
    agent.start()
    try:
        _agent_departs(fleet, ways)
    finally:
        agent.terminate()
    assert agent.wait_ended(15) == 0
    until("its goodbye", lambda: listing(fleet, 0, "agent-0")[0] == "offline", 10)


def _agent_departs(fleet: Fleet, ways: list) -> None:  # type: ignore[type-arg]
    cluster = fleet.cluster
    for frontend in (0, 1):
        until("a healthy agent", lambda at=frontend: _agent(fleet, at) == ("healthy", "connected"), HOMED_WITHIN)
    assert cluster.nodes()["agent-0"]["node_type"] == "agent"
    for way in ways:
        way.block(ROUTE)
    for way in ways:
        way.cut(ROUTE)
    with Watch(lambda: _agent(fleet, 1)) as seen:
        for frontend in (0, 1):
            until("departed", lambda at=frontend: _agent(fleet, at) == ("unhealthy", "departed"), GRACE + TICK + 5)
    assert seen.seen[0] in [("healthy", "connected"), ("healthy", "reconnecting")]
    assert ("healthy", "reconnecting") in seen.seen and seen.seen[-1] == ("unhealthy", "departed")
    [(now,)] = fleet.rows("select now()")
    beat = "select 1 from backend_nodes where name = 'agent-0' and last_heartbeat > %s"
    until("a heartbeat all the same", lambda: fleet.rows(beat, now), 20)
    for way in ways:
        way.unblock(ROUTE)
    for frontend in (0, 1):
        until("healed", lambda at=frontend: _agent(fleet, at) == ("healthy", "connected"), HOMED_WITHIN)


def _agent(fleet: Fleet, frontend: int) -> tuple[str, str]:
    return listing(fleet, frontend, "agent-0") if "agent-0" in fleet.cluster.nodes() else ("", "")


def test_a_way_that_swallows_everything(fleet: Fleet) -> None:
    """
    Nothing arrives any more and nobody closes: both ends know within three keepalives and a second, streams on both
    paths end with a clear error by then, the worker dials elsewhere and its ownership is superseded (BR-010).
    """
    cluster = fleet.cluster
    assert fleet.spread() == [0, 1]
    assert fleet.asked(0, "slow-0", max_tokens=1)[0] == 200
    assert fleet.asked(0, "on-0") == (200, ANSWER)  # loaded: on a node whose beats are swallowed nothing new is placed
    begun = threading.Semaphore(0)
    [(epoch,)] = fleet.rows("select epoch from node_connections where node_id = %s", cluster.workers[0].node_id)
    with ThreadPoolExecutor(4) as pool:
        streams = [
            pool.submit(_until_cut, frontend.url, cluster.secrets.api_key, begun)
            for frontend in cluster.frontends
            for _ in range(2)
        ]
        for _ in streams:
            assert begun.acquire(timeout=20)
        fleet.ways[0, 0].swallow()
        swallowed = time.monotonic()
        ended = [stream.result(30) for stream in streams]
    for at, trouble in ended:
        assert at - swallowed <= NOTICED, f"{at - swallowed:.1f} s: {trouble}"
        assert "in the stream: worker_unavailable" in trouble or "in the stream: peer_unreachable" in trouble, trouble
    gone = "select 1 from node_connections where node_id = %s and epoch <> %s and owner_instance_id = %s"
    there = (cluster.workers[0].node_id, epoch, cluster.frontends[1].instance_id)
    until("another epoch, elsewhere", lambda: fleet.rows(gone, *there), 10)
    for frontend in (0, 1):
        assert fleet.asked(frontend, "on-0") == (200, ANSWER)


def _until_cut(url: str, key: str, begun: threading.Semaphore) -> tuple[float, str]:
    """When a stream ended that must not end well, and how."""
    try:
        said(url, key, "slow-0", begun)
    except Trouble as trouble:
        return time.monotonic(), str(trouble)
    return time.monotonic(), "it ended well"


def test_a_frozen_worker(fleet: Fleet) -> None:
    """A worker that stands still loses its tunnel within three keepalives and a second; thawed it serves (BR-010)."""
    cluster = fleet.cluster
    assert fleet.asked(0, "on-0") == (200, ANSWER)
    worker = cluster.workers[0]
    worker.freeze()
    lost = "select 1 from node_connections where node_id = %s and owner_instance_id = ''"
    until("its tunnel's end", lambda: fleet.rows(lost, worker.node_id), NOTICED)
    assert fleet.asked(0, "on-0") == (503, "worker_reconnecting")
    claim = fleet.claims()[0]
    worker.thaw()
    fleet.homed(0, claim)
    for frontend in (0, 1):
        assert fleet.asked(frontend, "on-0") == (200, ANSWER)
