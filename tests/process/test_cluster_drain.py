"""A frontend that is told to end, under load: nobody notices. Rolling restarts under a steady load: neither."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from localai_dist.testing.balancer import Balancer
from localai_dist.testing.members import Frontend
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from tests.process.fleet import GATED, ROUTE, Fleet, Watch, asking, fleet_of
from tests.process.load import ANSWER, Load, said
from tests.process.outside import knock

LAME_DUCK = 3.0
"""Long enough for what is asked of a frontend that was told to end, before it listens no more (s)."""
DRAIN = 12.0
SLOW = " ".join(f"token{number}" for number in range(30))


@pytest.fixture(scope="module")
def ready() -> Iterator[Fleet]:
    """Two frontends, two workers; on each worker a quick model, and a slow one whose end can be held up."""
    slow = ("test:tokens=30", "test:delay=0.1", GATED)
    models = {"on-0": (0,), "on-1": (1,), "slow-0": (0, *slow), "slow-1": (1, *slow)}
    env = {"LOCALAI_LAME_DUCK": f"{LAME_DUCK}s", "LOCALAI_DRAIN_TIMEOUT": f"{DRAIN}s"}
    with fleet_of("drain", models, env) as fleet:
        for model in ("on-0", "on-1", "slow-0", "slow-1"):
            assert fleet.asked(0, model)[0] == 200
        yield fleet


@pytest.fixture
def fleet(ready: Fleet) -> Fleet:
    """The same, everything running and each tunnel at its own frontend."""
    ready.settle()
    return ready


def test_sigterm_with_twenty_running_streams(fleet: Fleet) -> None:
    """
    Not ready at once, new tunnels refused, the worker's next tunnel opened before the old one closes, twenty streams on
    both paths whole, no error through the balancer, exit code 0 within the drain time (CLUS-20, BR-121).
    """
    cluster = fleet.cluster
    going, staying = cluster.frontends
    assert fleet.spread() == [0, 1]
    node = cluster.workers[1]
    identity = json.loads((node.data_dir / "node.json").read_text())
    door = f"{ROUTE}?id={identity['node_id']}"
    credential = [("Authorization", f"Bearer {identity['node_token']}")]
    urls = [frontend.url for frontend in cluster.frontends]
    with (
        Balancer(urls) as balancer,
        ThreadPoolExecutor(20) as pool,
        fleet.standing("slow-0", "slow-1") as let_end,
        asking(cluster.database.url) as database,
    ):
        # Ten at the frontend that goes, on its own tunnel and by relay; ten at the other, five of them relayed by it.
        begun = threading.Semaphore(0)
        streams = [
            pool.submit(
                said, (going, staying)[number % 2].url, cluster.secrets.api_key, f"slow-{number // 2 % 2}", begun
            )
            for number in range(20)
        ]
        for _ in streams:
            assert begun.acquire(timeout=20)
        connected = "select owner_instance_id, disconnected_at from node_connections where node_id = %s"
        mine = cluster.workers[0].node_id
        old, new = fleet.ways[0, 0], fleet.ways[0, 1]
        load = Load(balancer.url, cluster.secrets.api_key, ["on-0", "on-1"], rate=10)
        with load, Watch(lambda: database(connected, mine), every=0.01) as row:
            with Watch(lambda: (old.open(ROUTE), new.open(ROUTE)), every=0.02) as tunnels:
                told = time.monotonic()
                going.terminate()
                until("not ready", lambda: ask(going.url + "/readyz").status == 503, 2)
                assert knock(going.url, door, credential).status == 503
                assert ask(going.url + "/readyz").json()["status"] == "draining"
                until("its next tunnel beside the old one", lambda: (1, 1) in tunnels.seen, DRAIN)
                let_end()
                assert going.wait_ended(DRAIN + 2) == 0
                assert time.monotonic() - told <= DRAIN + 1
            ended = [stream.result(30) for stream in streams]
        assert load.troubles == [] and load.steady
    assert Counter(ended) == {SLOW: 20}
    assert (0, 0) not in tunnels.seen, tunnels.seen
    # Each moment had an owner: first the one that goes, then the one that stays.
    owners = [(found[0][0], found[0][1]) for found in row.seen]
    assert owners == [(going.instance_id, None), (staying.instance_id, None)]
    assert fleet.homes() == [1, 1]


def test_rolling_restart_under_load(fleet: Fleet) -> None:
    """Both frontends restarted in turn under 20 requests a second, half of them streamed: 0 failed, 0 cut (CLUS-22)."""
    cluster = fleet.cluster
    fleet.spread()
    models = ["on-0", "on-1", "slow-0", "slow-1"]
    with Balancer([frontend.url for frontend in cluster.frontends]) as balancer:
        with Load(balancer.url, cluster.secrets.api_key, models, rate=20) as load:
            for frontend in cluster.frontends:
                _restarted(fleet, frontend)
                until(f"{frontend.name} in the balancer again", lambda it=frontend: balancer.takes(it.url), 10)
        assert load.troubles == [], "\n".join(load.troubles)
        assert load.steady, f"{load.answered} of {load.asked} requests answered in {load.lasted:.1f} s"
        assert load.lasted > 2 * LAME_DUCK and abs(2 * load.streamed - load.answered) <= 1
        assert set(load.texts) == {ANSWER, SLOW}


def _restarted(fleet: Fleet, frontend: Frontend) -> None:
    """Ended in peace, started again, every worker with a tunnel."""
    frontend.terminate()
    assert frontend.wait_ended(DRAIN + 2) == 0
    frontend.start()
    until(f"{frontend.name} ready", frontend.is_ready, 40)
    for index in range(len(fleet.cluster.workers)):
        fleet.homed(index)
