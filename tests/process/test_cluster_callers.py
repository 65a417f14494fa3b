"""Two hundred callers whose worker is cut off in the middle of an opening."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from localai_dist.testing.child import Child
from localai_dist.testing.waiting import until
from tests.process.fleet import GRACE, ROUTE, Fleet, fleet_of
from tests.process.load import ANSWER, Trouble, said, whole

KEEPALIVE = 5.0
ROUTE_WAIT = 0.5


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """
    Two frontends, one worker with a model.

    Its tunnel dies of silence, and a loss of it becomes a departure, only long after a slow machine has dealt with two
    hundred callers.
    """
    env = {"LOCALAI_TUNNEL_KEEPALIVE": f"{KEEPALIVE}s", GRACE: "60s", "LOCALAI_ROUTE_WAIT": f"{ROUTE_WAIT}s"}
    with fleet_of("callers", {"on-0": (0,)}, env, workers=1) as started:
        started.settle()
        yield started


def test_cut_between_an_opening_and_the_first_byte(fleet: Fleet) -> None:
    """
    200 callers on both paths wait for a worker that stands still when its tunnel is cut: each has a classified error
    within a second and the route wait, nothing stays open or counted, and the next request is served (BR-051).
    """
    cluster = fleet.cluster
    assert fleet.homes() == [0]
    for frontend in (0, 1):
        assert fleet.asked(frontend, "on-0") == (200, ANSWER)
    before = [_descriptors(frontend) for frontend in cluster.frontends]
    streams = "select sum(in_flight) from node_models where model_name = 'on-0'"
    worker = cluster.workers[0]
    with ThreadPoolExecutor(200) as pool:

        def two_hundred() -> list[Future[tuple[float, str]]]:
            ways = [(cluster.frontends[number % 2].url, number % 3 == 0) for number in range(200)]
            return [pool.submit(_refusal, url, cluster.secrets.api_key, streamed) for url, streamed in ways]

        began = time.monotonic()
        answered = [caller.result(60) for caller in two_hundred()]
        assert {code for _, code in answered} == {"it was answered"}
        busy = max(at for at, _ in answered) - began  # what this machine needs for so many callers, whatever they get
        worker.freeze()
        asked = two_hundred()
        until("200 in flight", lambda: fleet.rows(streams) == [(200,)], 3 * KEEPALIVE - 1)
        [claim] = fleet.claims()
        cut = time.monotonic()
        assert fleet.ways[0, 0].cut(ROUTE) == 1
        ended = [caller.result(60) for caller in asked]
    late = [(round(at - cut, 1), code) for at, code in ended if at - cut > 1 + ROUTE_WAIT + busy]
    assert late == []
    assert set(Counter(code for _, code in ended)) <= {"worker_reconnecting", "worker_unavailable", "peer_unreachable"}
    until("nothing in flight", lambda: fleet.rows(streams) == [(0,)], 5)
    for frontend, count in zip(cluster.frontends, before, strict=True):
        until("no descriptor more", lambda it=frontend, most=count + 8: _descriptors(it) <= most, 10)
    worker.thaw()
    fleet.homed(0, claim)
    for frontend in (0, 1):
        assert fleet.asked(frontend, "on-0") == (200, ANSWER)


def _refusal(url: str, key: str, streamed: bool) -> tuple[float, str]:
    """When a request that must fail had its answer, and the error's code."""
    try:
        (said if streamed else whole)(url, key, "on-0")
    except Trouble as trouble:
        text = str(trouble)
        codes = [code for code in ("worker_reconnecting", "worker_unavailable", "peer_unreachable") if code in text]
        return time.monotonic(), codes[0] if codes else text
    return time.monotonic(), "it was answered"


def _descriptors(child: Child) -> int:
    return len(os.listdir(Path(f"/proc/{child.pid}/fd")))
