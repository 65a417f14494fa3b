"""Every timer between a client and a backend, each made the shortest in turn, is the one the error names."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from localai_dist.testing.waiting import until
from tests.process.fleet import Fleet, fleet_of
from tests.process.load import Trouble, said, whole

ROUTE_WAIT = 0.5
LOAD_WAIT = 1.0
LOAD_BUDGET = 5.0
KEEPALIVE = 1.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """One frontend, one worker, and short timers, each shorter than the one that encloses it."""
    env = {
        "LOCALAI_ROUTE_WAIT": f"{ROUTE_WAIT}s",
        "LOCALAI_MODEL_LOAD_WAIT": f"{LOAD_WAIT}s",
        "LOCALAI_NATS_MODEL_LOAD_TIMEOUT": f"{LOAD_BUDGET}s",
    }
    models = {"slow": (0, "test:tokens=300", "test:delay=0.1"), "late": (0, "test:load_delay=30")}
    with fleet_of("timers", models, env, frontends=1, workers=1) as started:
        until("a loaded model", lambda: started.asked(0, "slow", max_tokens=1)[0] == 200, 60)
        yield started


def refused(fleet: Fleet, model: str, *, timeout: str = "", stream: bool = False) -> tuple[float, str]:
    """How long one request took to be refused (s), and how."""
    cluster = fleet.cluster
    headers = {"X-LocalAI-Timeout": timeout} if timeout else {}
    began = time.monotonic()
    with pytest.raises(Trouble) as caught:
        (said if stream else whole)(cluster.frontends[0].url, cluster.secrets.api_key, model, headers=headers)
    return time.monotonic() - began, str(caught.value)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_callers_deadline(fleet: Fleet, stream: bool) -> None:
    """The caller's own deadline is what is named, at the deadline, while the backend works (BR-081)."""
    took, text = refused(fleet, "slow", timeout="700ms", stream=stream)
    assert 0.7 <= took <= 1.7
    assert "deadline_exceeded" in text and "own deadline of 700ms" in text


def test_the_wait_for_a_load_and_the_loads_own_budget(fleet: Fleet) -> None:
    """A request stops waiting and says that the model loads; the load ends by its own budget and says that (BR-081)."""
    took, text = refused(fleet, "late")
    assert LOAD_WAIT <= took <= LOAD_WAIT + 1
    assert "503" in text and "model_loading" in text

    failure = told_of_the_end(fleet)
    budget = f"{LOAD_BUDGET:g}s"
    assert "500" in failure and budget in failure and "LOCALAI_NATS_MODEL_LOAD_TIMEOUT" in failure, failure


def told_of_the_end(fleet: Fleet) -> str:
    """
    What a request was told of the end of a load.

    Two ask in turn without a pause, each in the middle of the other's wait: who asks again after its wait, just when
    the load ends, begins the next one and hears nothing of this one.
    """
    heard: list[str] = []
    over = threading.Event()

    def ask_on(after: float) -> None:
        over.wait(after)
        while not over.is_set():
            _, text = refused(fleet, "late")
            if "model_loading" not in text:
                heard.append(text)
                over.set()

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask_on, after) for after in (0.0, LOAD_WAIT / 2)]
        try:
            until("the load's end", lambda: heard or any(one.done() for one in asking), LOAD_BUDGET + 10)
        finally:
            over.set()
    for one in asking:
        one.result()
    return heard[0]


def test_keepalive_and_the_wait_for_a_route(fleet: Fleet) -> None:
    """A silent tunnel is named with its silence; a request then waits the route wait and names the grace (BR-081)."""
    worker, claim = fleet.cluster.workers[0], fleet.claims()[0]
    begun = threading.Semaphore(0)
    ends: list[str] = []

    def run() -> None:
        try:
            said(fleet.cluster.frontends[0].url, fleet.cluster.secrets.api_key, "slow", begun)
        except Trouble as trouble:
            ends.append(str(trouble))

    stream = threading.Thread(target=run)
    stream.start()
    assert begun.acquire(timeout=20)
    worker.freeze()
    try:
        stream.join(3 * KEEPALIVE + 2)
        assert ends, "the stream did not end"
        [text] = ends
        assert "worker_unavailable" in text and "nothing was received for" in text
        took, text = refused(fleet, "slow")
        assert ROUTE_WAIT <= took <= ROUTE_WAIT + 1
        assert "worker_reconnecting" in text and "grace" in text
    finally:
        worker.thaw()
    fleet.homed(0, claim)
    assert fleet.asked(0, "slow", max_tokens=2) == (200, "token0 token1")
