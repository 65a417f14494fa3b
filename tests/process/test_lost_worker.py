"""The only worker is gone: what clients are told meanwhile, and that nothing needs a restart afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.web import ask
from tests.process.kit import open_folder, quick_plan, rows, running
from tests.process.scripted import chat, client

ROUTE_WAIT = 1.5
GRACE = 6.0
QUESTION = "What is the capital of Kenya?"
ANSWER = "The capital of Kenya is Nairobi."


@pytest.fixture(scope="module")
def lonely() -> Iterator[Cluster]:
    """Two frontends, one worker, a grace that a test can sit out."""
    with open_folder("lost") as folder:
        env = {"LOCALAI_ROUTE_WAIT": f"{ROUTE_WAIT}s", "LOCALAI_WORKER_RECONNECT_GRACE": f"{GRACE}s"}
        with running(quick_plan(folder / "state", workers=1, models=["tiny-facts"], frontend_env=env)) as cluster:
            yield cluster


def served(cluster: Cluster) -> list[str]:
    """What each frontend answers to the question, once."""
    replies = [chat(cluster, frontend, "tiny-facts", QUESTION) for frontend in cluster.frontends]
    return [r.json()["choices"][0]["message"]["content"] if r.status == 200 else r.text for r in replies]


def until_back(cluster: Cluster) -> None:
    """
    Wait until a frontend knows of the worker's tunnel, which was lost before, and places models there.

    The worker itself is ready as soon as it was admitted; the claim comes after that. One that had departed may be
    found so once more before the claim, and is unhealthy then until the next look.
    """
    told = cluster.frontends[1]

    def node() -> dict[str, Any]:
        return cluster.nodes(told).get("worker-0", {"tunnel": {}})

    cluster.wait_for("the worker's tunnel", lambda: node()["tunnel"].get("state") == "connected", 40)
    cluster.wait_for("a healthy worker", lambda: node().get("status") == "healthy", 40)


def refused(cluster: Cluster, frontend: int) -> openai.APIStatusError:
    """The refusal of one request, which must come within the route wait and a second."""
    asking = client(cluster, cluster.frontends[frontend])
    began = time.monotonic()
    with pytest.raises(openai.APIStatusError) as caught:
        asking.chat.completions.create(model="tiny-facts", messages=[{"role": "user", "content": QUESTION}])
    assert time.monotonic() - began <= ROUTE_WAIT + 1
    error = caught.value
    assert error.status_code == 503
    envelope = error.response.json()["error"]
    assert set(envelope) == {"message", "type", "code", "param"} and envelope["type"] == "server_error"
    assert error.response.headers["x-localai-condition"] == envelope["code"]
    assert error.response.headers["x-request-id"]
    return error


def test_the_only_worker_is_killed_and_comes_back(lonely: Cluster) -> None:
    """Killed: 503 `worker_reconnecting`, later `no_route`, each in time; back: the next is served (WALK-16)."""
    [worker] = lonely.workers
    assert served(lonely) == [ANSWER, ANSWER]
    pids = [frontend.pid for frontend in lonely.frontends]
    worker.kill()
    for frontend in (0, 1):
        error = refused(lonely, frontend)
        assert error.code == "worker_reconnecting", error.message
        assert int(error.response.headers["retry-after"]) > 0
    assert rows(lonely.database.url, "select count(*) from node_models") == [(1,)]  # nothing was reaped meanwhile
    departed = "select 1 from node_connections where disconnected_at < now() - make_interval(secs => %s)"
    lonely.wait_for("the end of the grace", lambda: rows(lonely.database.url, departed, GRACE), GRACE + 2)
    for frontend in (0, 1):
        error = refused(lonely, frontend)
        assert error.code == "no_route" and "no route" in error.message
    worker.start()
    until_back(lonely)
    assert served(lonely) == [ANSWER, ANSWER]
    assert [frontend.pid for frontend in lonely.frontends if frontend.is_alive()] == pids


def test_a_worker_that_comes_back_within_the_grace(lonely: Cluster) -> None:
    """Killed and started at once, asked before any other request: the first request is served (WALK-16)."""
    [worker] = lonely.workers
    assert served(lonely) == [ANSWER, ANSWER]
    lonely.restart(worker)
    lonely.wait_for("the worker's tunnel", worker.is_ready, 40)
    assert served(lonely)[::-1] == [ANSWER, ANSWER]


def test_a_stream_is_refused_the_same_way(lonely: Cluster) -> None:
    """A streamed request to a killed worker is an ordinary 503 in the envelope, not an empty stream (WALK-16)."""
    [worker] = lonely.workers
    worker.kill()
    began = time.monotonic()
    reply = chat(lonely, lonely.frontends[0], "tiny-facts", QUESTION, stream=True)
    assert time.monotonic() - began <= ROUTE_WAIT + 1
    assert (reply.status, reply.json()["error"]["code"]) == (503, "worker_reconnecting")
    worker.start()
    until_back(lonely)
    assert served(lonely) == [ANSWER, ANSWER]


def test_readiness_of_a_worker_follows_its_tunnel(lonely: Cluster) -> None:
    """Without a frontend the worker's /readyz says no and why, /healthz yes; with one, yes again (WALK-16)."""
    [worker] = lonely.workers
    lonely.wait_for("readiness at first", worker.is_ready, 40)
    for frontend in lonely.frontends:
        frontend.kill()
    lonely.wait_for("readiness gone", lambda: ask(worker.probe_url + "/readyz").status == 503, 5)
    told = ask(worker.probe_url + "/readyz").json()["checks"]["tunnel"]
    assert told["ok"] is False and told["reason"]
    assert ask(worker.probe_url + "/healthz").status == 200
    lonely.frontends[1].start()
    lonely.wait_for("readiness again", worker.is_ready, 40)
    until_back(lonely)
    assert ask(worker.probe_url + "/healthz").status == 200
    lonely.frontends[0].start()
    for frontend in lonely.frontends:
        lonely.wait_for(f"{frontend.name} ready", frontend.is_ready, 40)
    assert served(lonely) == [ANSWER, ANSWER]
