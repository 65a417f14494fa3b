"""Cold loads of a running cluster: joined, told, taken over, cancelled; the backend is the scriptable one."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from http.client import HTTPConnection
from typing import Any

import openai
import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Frontend
from localai_dist.testing.waiting import until
from localai_dist.testing.web import Reply, ask
from localai_dist.units import MiB
from tests.process.kit import open_chat, rows
from tests.process.loading import (
    BIG,
    CAUGHT,
    IN_FLIGHT,
    TAKE_OVER,
    SlowableCluster,
    add_big,
    again,
    asked,
    at,
    job,
    let_start,
    open_slowable,
    other,
    owner,
    replicas,
    said,
)
from tests.process.scripted import add_model, admin, chat, client, gate_of, pin, reported, serves


@pytest.fixture(scope="module")
def fleet() -> Iterator[SlowableCluster]:
    """Two frontends that share a models folder, two workers with room for one replica of each model."""
    with open_slowable("loading") as cluster:
        yield cluster


def test_fifty_requests_are_one_load(fleet: SlowableCluster) -> None:
    """50 cold requests, half on each frontend: one install, one staging, one LoadModel (LOAD-5, BR-016)."""
    events = add_model(fleet, "crowd", "test:load_delay=2", "test:answer=here we are")
    with ThreadPoolExecutor(50) as pool:
        replies = list(pool.map(lambda n: chat(fleet, fleet.frontends[n % 2], "crowd"), range(50)))
    assert {reply.status for reply in replies} == {200}, {reply.text for reply in replies if reply.status != 200}
    assert len(reported(events, "load")) == 1
    assert len({event["pid"] for event in reported(events, "start")}) == 1
    ended = rows(fleet.database.url, "select moved, total_bytes from model_load_endings where model_name = 'crowd'")
    size = (fleet.state.models / "crowd.bin").stat().st_size
    assert ended == [(size, size)]


def test_a_failure_is_the_same_for_everybody(fleet: SlowableCluster) -> None:
    """When the load fails all 50 read the same real cause, and the next request starts afresh (LOAD-5)."""
    events = add_model(fleet, "broken", f"test:load_gate={gate_of(fleet, 'broken')}", "test:load=fail")
    waiting = [posted(fleet, fleet.frontends[n % 2], "broken") for n in range(50)]
    for number in (0, 1) * 5:  # what is asked later, and answered out of the database, comes after those who then wait
        admin(fleet, "/api/operations", frontend=number)
    gate_of(fleet, "broken").touch()
    replies = [reply_on(connection) for connection in waiting]
    assert {reply.status for reply in replies} == {500}
    assert len({said(reply) for reply in replies}) == 1
    assert "the script says: no load" in said(replies[0])
    assert len(reported(events, "load")) == 1
    assert chat(fleet, fleet.frontends[0], "broken").status == 500
    assert len(reported(events, "load")) == 2


def posted(cluster: Cluster, frontend: Frontend, model: str) -> HTTPConnection:
    """A chat request that is on its way when this returns."""
    connection = HTTPConnection(frontend.url.removeprefix("http://"), timeout=90)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello?"}]})
    headers = {"Authorization": f"Bearer {cluster.secrets.api_key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    return connection


def reply_on(connection: HTTPConnection) -> Reply:
    """What comes back on it."""
    with closing(connection):
        response = connection.getresponse()
        return Reply(response.status, response.read().decode())


def test_the_load_goes_on_without_its_client(fleet: SlowableCluster) -> None:
    """The client that caused the load leaves early: it goes on, and a later client joins it (LOAD-5, BR-004)."""
    add_big(fleet, "left-alone")
    with fleet.slowed():
        with open_chat(fleet, fleet.frontends[0], "left-alone"):
            left_at = at(fleet, "left-alone", "staging", bytes_sent=MiB)["bytes_sent"]
        at(fleet, "left-alone", "staging", bytes_sent=left_at + 2 * IN_FLIGHT)
    assert chat(fleet, fleet.frontends[1], "left-alone").status == 200
    moved = "select moved from model_load_endings where model_name = 'left-alone'"
    assert rows(fleet.database.url, moved) == [(BIG,)]


def test_failed_loads_leave_the_worker_as_it_was(fleet: SlowableCluster) -> None:
    """After each failed load a good model loads on the same worker, again and again (LOAD-5, BR-038)."""
    add_model(fleet, "bad", "test:load=fail")
    add_model(fleet, "good")
    for model in ("bad", "good"):
        pin(fleet, model, 1)
    for number in range(6):
        streamed = number % 3 == 0
        failed = chat(fleet, fleet.frontends[number % 2], "bad", stream=streamed)
        assert failed.status == 500 or (streamed and failed.status == 200)  # one that took long has begun
        assert "the script says: no load" in failed.text
        assert chat(fleet, fleet.frontends[number % 2], "good").status == 200
        admin(fleet, "/backend/shutdown", "POST", {"model": "good"})
    running = admin(fleet, f"/api/nodes/{fleet.workers[1].node_id}/models")
    assert [one for one in running if one["model_name"] in ("bad", "good")] == []


@pytest.mark.parametrize("phase", ["installing", "staging", "loading"])
def test_a_killed_frontends_load_is_taken_over(fleet: SlowableCluster, phase: str) -> None:
    """The frontend that loads is killed in each phase: the other resumes the bytes and loads once (LOAD-6)."""
    name = f"orphan-{phase}"
    events = add_big(fleet, name, f"test:load_gate={gate_of(fleet, name)}")
    if phase == "installing":
        text = (fleet.state.models / f"{name}.yaml").read_text()
        (fleet.state.models / f"{name}.yaml").write_text(text.replace("test-backend", "slow-backend"))
        until("the other backend", lambda: _revision_is_served(fleet, name), 10)
    pin(fleet, name, 0)
    with fleet.slowed() if phase == "staging" else nullcontext():
        with open_chat(fleet, fleet.frontends[0], name):
            row = at(fleet, name, phase, bytes_sent=CAUGHT if phase == "staging" else 0)
            if phase == "loading":  # the row says so before the call is made
                until("the call to load", lambda: reported(events, "load"), 20)
        victim = owner(fleet, row)
        victim.kill()  # each phase lasts until now: by the slow way, or by what opens only below
    survivor = other(fleet, victim)
    let_start(fleet)
    gate_of(fleet, name).touch()
    try:
        if phase == "loading":  # with somebody who waits; in the other phases nobody does
            assert chat(fleet, survivor, name).status == 200
        until("the load taken over", lambda: replicas(fleet, name), TAKE_OVER)
    finally:
        again(fleet, victim)
    assert [node for node, _ in replicas(fleet, name)] == [fleet.workers[0].node_id]
    loads = reported(events, "load")
    assert len({event["pid"] for event in loads}) == 1
    assert len(loads) == (2 if phase == "loading" else 1)  # killed while it loaded: the call itself is made again
    ((moved, total),) = rows(
        fleet.database.url, "select moved, total_bytes from model_load_endings where model_name = %s", name
    )
    assert total == BIG
    sent = {"installing": BIG, "staging": BIG - row["bytes_sent"], "loading": 0}[phase]
    assert moved <= sent + IN_FLIGHT
    assert chat(fleet, victim, name).status == 200


def _revision_is_served(cluster: Cluster, name: str) -> bool:
    """Whether both frontends have read the folder again: whoever serves a marker that came later has."""
    marker = cluster.state.models / f"{name}-marker.yaml"
    if not marker.exists():
        marker.write_text(f"name: {name}-marker\nbackend: test-backend\nparameters:\n  model: {name}.bin\n")
    return all(serves(cluster, frontend, f"{name}-marker") for frontend in cluster.frontends)


def test_a_slow_model_delays_no_other(fleet: SlowableCluster) -> None:
    """While one model loads slowly, a loaded one answers and a cold one is loaded and answered (LOAD-9, BR-034)."""
    slow = add_model(fleet, "slow-a", f"test:load_gate={gate_of(fleet, 'slow-a')}")
    add_model(fleet, "loaded-b")
    add_model(fleet, "cold-c")
    assert chat(fleet, fleet.frontends[0], "loaded-b").status == 200
    with asked(lambda: chat(fleet, fleet.frontends[0], "slow-a")) as replies:
        until("the slow load", lambda: reported(slow, "load"), 20)
        for number in range(10):
            assert chat(fleet, fleet.frontends[number % 2], "loaded-b").status == 200
        for frontend in fleet.frontends:
            assert chat(fleet, frontend, "cold-c").status == 200
        assert not replies and job(fleet, "slow-a"), "the slow load was over before it could delay anything"
        gate_of(fleet, "slow-a").touch()
    assert replies[0].status == 200


def test_a_stream_begins_while_the_model_loads(fleet: SlowableCluster) -> None:
    """A streamed request of a cold model: headers and comments early, tokens when ready (LOAD-8, BR-020)."""
    events = add_model(fleet, "late", f"test:load_gate={gate_of(fleet, 'late')}", "test:answer=better late")
    with asked(lambda: official(fleet, "late")) as told, open_chat(fleet, fleet.frontends[1], "late") as connection:
        early = read_until(connection, b": waiting\n\n")
        assert early.startswith(b"HTTP/1.1 200") and b"text/event-stream" in early
        assert not replicas(fleet, "late")
        gate_of(fleet, "late").touch()
        rest = read_until(connection, b"data: [DONE]\n\n")
        assert b'"better"' in rest
    assert told == ["better late"]
    assert len(reported(events, "load")) == 1


def test_a_stream_whose_load_fails(fleet: SlowableCluster) -> None:
    """A load that fails after the stream began: one error frame, no ``[DONE]``, closed (LOAD-8, BR-018)."""
    add_model(fleet, "never", f"test:load_gate={gate_of(fleet, 'never')}", "test:load=fail")
    with asked(lambda: official(fleet, "never")) as told, open_chat(fleet, fleet.frontends[1], "never") as connection:
        read_until(connection, b": waiting\n\n")
        gate_of(fleet, "never").touch()
        rest = read_until(connection, b"")
        assert b"the script says: no load" in rest and b"[DONE]" not in rest
        assert b'"error"' in rest
    assert "the script says: no load" in told[0]


def official(cluster: Cluster, model: str) -> str:
    """What the official client makes of a streamed answer, or of its failure."""
    try:
        stream = client(cluster, cluster.frontends[0]).chat.completions.create(
            model=model, messages=[{"role": "user", "content": "go"}], stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    except openai.APIError as error:
        return str(error)


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """What comes up to ``end``; up to the end of the connection when that is empty."""
    got = b""
    while not end or end not in got:
        chunk = connection.recv(65536)
        if not chunk:
            assert not end, f"the connection ended before {end!r}: {got!r}"
            break
        got += chunk
    return got


@pytest.mark.parametrize("way", ["cancelled", "model file removed"])
def test_a_cancelled_transfer_stops(fleet: SlowableCluster, way: str) -> None:
    """Cancelled, or its model file removed, in a transfer: stopped, all gone in 2 s, waiters told (LOAD-17, BR-098)."""
    name = f"unwanted-{way[0]}"
    add_big(fleet, name)
    pin(fleet, name, 0)
    partial = fleet.workers[0].models_dir / name
    first, second = (lambda it=one: chat(fleet, it, name) for one in fleet.frontends)
    with fleet.slowed(), asked(first) as mine, asked(second) as others:
        row = at(fleet, name, "staging", bytes_sent=2 * IN_FLIGHT)
        assert list(partial.rglob("*"))
        elsewhere = other(fleet, owner(fleet, row))
        if way == "cancelled":
            path = f"{elsewhere.url}/api/operations/staging:{name}/cancel"
            assert ask(path, key=fleet.secrets.api_key, method="POST").status == 200
        else:
            (fleet.state.models / f"{name}.yaml").unlink()
        began = time.monotonic()
        until("the row gone", lambda: job(fleet, name) is None, 2)
        until("the partial file gone", lambda: not partial.exists(), 2 - (time.monotonic() - began))
    reason = "by an operator" if way == "cancelled" else "model file was removed"
    for reply in (*mine, *others):
        assert reply.status == 500 and reason in said(reply), reply.text
    for frontend in range(2):
        assert name not in json.dumps(admin(fleet, "/api/operations", frontend=frontend))
    assert not replicas(fleet, name)
    if way == "cancelled":  # a control: it can be loaded again, from the start
        assert chat(fleet, fleet.frontends[0], name).status == 200


def test_progress_is_told_alike_everywhere(fleet: SlowableCluster) -> None:
    """Node, file, bytes, rate and phase of a running load, on both frontends; bytes never go down (LOAD-18, BR-085)."""
    name, size = "watched", 3 * CAUGHT  # on its slow way long enough for a rate to be measured, once a second
    add_big(fleet, name, f"test:load_gate={gate_of(fleet, name)}", size=size)
    pin(fleet, name, 1)
    seen: list[dict[str, Any]] = []
    with fleet.slowed(), asked(lambda: chat(fleet, fleet.frontends[0], name)) as replies:
        ends = time.monotonic() + 120
        while not replies:
            assert time.monotonic() < ends, f"the load was not answered within 120 s: {seen[-2:]}"
            for number in range(2):
                found = admin(fleet, "/api/operations", frontend=number)["operations"]
                seen += [one for one in found if one["id"] == f"staging:{name}"]
            if [one["phase"] for one in seen[-2:]] == ["loading", "loading"]:
                gate_of(fleet, name).touch()
            time.sleep(0.2)
    assert replies[0].status == 200
    assert {"sending", "loading"} <= {one["phase"] for one in seen} <= {
        "waiting", "hashing", "sending", "verifying", "loading"
    }  # fmt: skip
    placed = [one for one in seen if one["state"] in ("staging", "loading")]
    assert {one["nodeName"] for one in placed} == {"worker-1"}
    sent = [one["currentBytes"] for one in seen]
    assert sent == sorted(sent)
    sending = [one for one in seen if one["phase"] == "sending" and one.get("bytesPerSecond")]
    assert sending, seen
    assert {(one["fileIndex"], one["totalFiles"], one["totalBytes"], one["fileName"]) for one in sending} == {
        (1, 1, size, f"{name}.bin")
    }
