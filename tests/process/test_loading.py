"""Cold loads of a running cluster: joined, told, taken over, cancelled; the backend is the scriptable one."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from localai_dist.testing.backend import install
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Frontend
from localai_dist.testing.waiting import until
from localai_dist.testing.web import Reply, ask
from localai_dist.units import MiB
from tests.process.kit import open_chat, open_folder, quick_plan, rows, running
from tests.process.scripted import add_model, admin, chat, client, galleries, pin, reported, serves

SLOW_START = 4
"""How long a process of backend ``slow-backend`` takes before it listens: the install verb waits for it (s)."""

BIG = 700 * MiB
"""A model whose transfer can be caught in the middle (bytes)."""

IN_FLIGHT = 8 * MiB
"""What a killed frontend's transport had taken and the worker never got is sent again; no more than this (LOAD-11)."""

TAKE_OVER = 60.0
"""A dead frontend's load is another one's within this (s): live window, missed beats, a look; then the load itself."""


def with_slow_backend(folder: Path) -> dict[str, str]:
    """The galleries of ``scripted``, and a backend that is slow to start."""
    env = galleries(folder)
    slow = folder / "slow-gallery"
    run = install(slow / "slow-backend", name="slow-backend") / "run.sh"
    run.write_text(run.read_text().replace("exec ", f"sleep {SLOW_START}\nexec "))
    (slow / "index.yaml").write_text("- name: slow-backend\n  uri: slow-backend\n  version: '1'\n")
    named = [*json.loads(env["LOCALAI_BACKEND_GALLERIES"]), {"name": "slow", "url": str(slow / "index.yaml")}]
    return {"LOCALAI_BACKEND_GALLERIES": json.dumps(named)}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Cluster]:
    """Two frontends that share a models folder, two workers with room for one replica of each model."""
    with open_folder("loading") as folder:
        plan = quick_plan(folder / "state", frontend_env=with_slow_backend(folder), models=("tiny-facts",))
        with running(plan) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def apart() -> Iterator[Cluster]:
    """Two frontends with model folders of their own, which wait a second for a load; one worker."""
    with open_folder("apart") as folder:
        env = {**galleries(folder), "LOCALAI_MODEL_LOAD_WAIT": "1s"}
        plan = quick_plan(folder / "state", frontend_env=env, models=("tiny-facts",), workers=1)
        with running(plan) as cluster:
            second = cluster.frontends[1]
            own = cluster.state.folder("own-models")
            second.env["LOCALAI_MODELS_PATH"] = str(own)
            again(cluster, second)
            yield cluster


def again(cluster: Cluster, frontend: Frontend) -> None:
    """Start a frontend again; back when it is ready and every worker's tunnel is up."""
    cluster.restart(frontend)
    until(f"{frontend.name} ready", frontend.is_ready, 30)
    until("every tunnel", lambda: all(worker.is_ready() for worker in cluster.workers), 30)


def job(cluster: Cluster, model: str) -> dict[str, Any] | None:
    """The row of a load."""
    names = ("state", "owner_replica", "bytes_sent", "total_bytes", "node_id")
    found = rows(cluster.database.url, f"select {', '.join(names)} from model_load_jobs where tracking_key = %s", model)
    return dict(zip(names, found[0], strict=True)) if found else None


def replicas(cluster: Cluster, model: str) -> list[tuple[Any, ...]]:
    """The loaded replicas of a model."""
    query = "select node_id, address from node_models where model_name = %s and state = 'loaded'"
    return rows(cluster.database.url, query, model)


def at(cluster: Cluster, model: str, state: str, *, bytes_sent: int = 0) -> dict[str, Any]:
    """The row of a load once it is in ``state`` and has moved so much."""

    def reached() -> dict[str, Any] | None:
        found = job(cluster, model)
        return found if found and found["state"] == state and found["bytes_sent"] >= bytes_sent else None

    return until(f"{model} {state}", reached, 60, every=0.02)


def owner(cluster: Cluster, row: Mapping[str, Any]) -> Frontend:
    """The frontend that runs a load."""
    return next(one for one in cluster.frontends if one.instance_id == row["owner_replica"])


def other(cluster: Cluster, frontend: Frontend) -> Frontend:
    """The other frontend."""
    return next(one for one in cluster.frontends if one is not frontend)


def add_big(cluster: Cluster, name: str, *options: str, size: int = BIG) -> Path:
    """A model whose file is big; returns the file its processes report to."""
    events = add_model(cluster, name, *options)
    os.truncate(cluster.state.models / f"{name}.bin", size)
    return events


@contextmanager
def asked(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """A request that runs meanwhile; its reply is in the list when the block is left."""
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(call()), daemon=True)
    thread.start()
    yield replies
    thread.join(90)
    assert replies, "the request was never answered"


def said(reply: Reply) -> str:
    """The message of an error."""
    return str((reply.json() or {}).get("error", {}).get("message"))


def test_fifty_requests_are_one_load(fleet: Cluster) -> None:
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


def test_a_failure_is_the_same_for_everybody(fleet: Cluster) -> None:
    """When the load fails all 50 read the same real cause, and the next request starts afresh (LOAD-5)."""
    events = add_model(fleet, "broken", "test:load_delay=2", "test:load=fail")
    with ThreadPoolExecutor(50) as pool:
        replies = list(pool.map(lambda n: chat(fleet, fleet.frontends[n % 2], "broken"), range(50)))
    assert {reply.status for reply in replies} == {500}
    assert len({said(reply) for reply in replies}) == 1
    assert "the script says: no load" in said(replies[0])
    assert len(reported(events, "load")) == 1
    assert chat(fleet, fleet.frontends[0], "broken").status == 500
    assert len(reported(events, "load")) == 2


def test_the_load_goes_on_without_its_client(fleet: Cluster) -> None:
    """The client that caused the load leaves early: it goes on, and a later client joins it (LOAD-5, BR-004)."""
    add_big(fleet, "left-alone")
    with open_chat(fleet, fleet.frontends[0], "left-alone"):
        at(fleet, "left-alone", "staging")
    at(fleet, "left-alone", "staging", bytes_sent=BIG // 10)
    assert chat(fleet, fleet.frontends[1], "left-alone").status == 200
    moved = "select moved from model_load_endings where model_name = 'left-alone'"
    assert rows(fleet.database.url, moved) == [(BIG,)]


def test_failed_loads_leave_the_worker_as_it_was(fleet: Cluster) -> None:
    """After each failed load a good model loads on the same worker, again and again (LOAD-5, BR-038)."""
    add_model(fleet, "bad", "test:load=fail")
    add_model(fleet, "good")
    for model in ("bad", "good"):
        pin(fleet, model, 1)
    for number in range(6):
        failed = chat(fleet, fleet.frontends[number % 2], "bad", stream=number % 3 == 0)
        assert failed.status == 500 and "the script says: no load" in said(failed)
        assert chat(fleet, fleet.frontends[number % 2], "good").status == 200
        admin(fleet, "/backend/shutdown", "POST", {"model": "good"})
    running = admin(fleet, f"/api/nodes/{fleet.workers[1].node_id}/models")
    assert [one for one in running if one["model_name"] in ("bad", "good")] == []


@pytest.mark.parametrize("phase", ["installing", "staging", "loading"])
def test_a_killed_frontends_load_is_taken_over(fleet: Cluster, phase: str) -> None:
    """The frontend that loads is killed in each phase: the other resumes the bytes and loads once (LOAD-6)."""
    name = f"orphan-{phase}"
    events = add_big(fleet, name, "test:load_delay=4")
    if phase == "installing":
        text = (fleet.state.models / f"{name}.yaml").read_text()
        (fleet.state.models / f"{name}.yaml").write_text(text.replace("test-backend", "slow-backend"))
        until("the other backend", lambda: _revision_is_served(fleet, name), 10)
    pin(fleet, name, 0)
    with open_chat(fleet, fleet.frontends[0], name):
        row = at(fleet, name, phase, bytes_sent=100 * MiB if phase == "staging" else 0)
        if phase == "loading":  # the row says so before the call is made
            until("the call to load", lambda: reported(events, "load"), 20)
    victim = owner(fleet, row)
    survivor = other(fleet, victim)
    os.kill(victim.pid or 0, signal.SIGKILL)
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
    """Whether both frontends have read the folder again: one look a second, so a marker that is served is proof."""
    marker = cluster.state.models / f"{name}-marker.yaml"
    if not marker.exists():
        marker.write_text(f"name: {name}-marker\nbackend: test-backend\nparameters:\n  model: {name}.bin\n")
    return all(serves(cluster, frontend, f"{name}-marker") for frontend in cluster.frontends)


def test_a_slow_model_delays_no_other(fleet: Cluster) -> None:
    """While one model loads slowly, a loaded one answers and a cold one is loaded and answered (LOAD-9, BR-034)."""
    slow = add_model(fleet, "slow-a", "test:load_delay=15")
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
    assert replies[0].status == 200


def test_a_stream_begins_while_the_model_loads(fleet: Cluster) -> None:
    """A streamed request of a cold model: headers and comments early, tokens when ready (LOAD-8, BR-020)."""
    events = add_model(fleet, "late", "test:load_delay=13", "test:answer=better late")
    with asked(lambda: official(fleet, "late")) as told, open_chat(fleet, fleet.frontends[1], "late") as connection:
        early = read_until(connection, b": waiting\n\n")
        assert early.startswith(b"HTTP/1.1 200") and b"text/event-stream" in early
        assert not replicas(fleet, "late")
        rest = read_until(connection, b"data: [DONE]\n\n")
        assert b'"better"' in rest
    assert told == ["better late"]
    assert len(reported(events, "load")) == 1


def test_a_stream_whose_load_fails(fleet: Cluster) -> None:
    """A load that fails after the stream began: one error frame, no ``[DONE]``, closed (LOAD-8, BR-018)."""
    add_model(fleet, "never", "test:load_delay=12", "test:load=fail")
    with asked(lambda: official(fleet, "never")) as told, open_chat(fleet, fleet.frontends[1], "never") as connection:
        read_until(connection, b": waiting\n\n")
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
def test_a_cancelled_transfer_stops(fleet: Cluster, way: str) -> None:
    """Cancelled, or its model file removed, in a transfer: stopped, all gone in 2 s, waiters told (LOAD-17, BR-098)."""
    name = f"unwanted-{way[0]}"
    add_big(fleet, name)
    pin(fleet, name, 0)
    partial = fleet.workers[0].models_dir / name
    first, second = (lambda it=one: chat(fleet, it, name) for one in fleet.frontends)
    with asked(first) as mine, asked(second) as others:
        row = at(fleet, name, "staging", bytes_sent=10 * MiB)
        assert list(partial.rglob("*"))
        elsewhere = other(fleet, owner(fleet, row))
        began = time.monotonic()
        if way == "cancelled":
            path = f"{elsewhere.url}/api/operations/staging:{name}/cancel"
            assert ask(path, key=fleet.secrets.api_key, method="POST").status == 200
        else:
            (fleet.state.models / f"{name}.yaml").unlink()
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


def test_progress_is_told_alike_everywhere(fleet: Cluster) -> None:
    """Node, file, bytes, rate and phase of a running load, on both frontends; bytes never go down (LOAD-18, BR-085)."""
    name = "watched"
    size = 3 * BIG  # long enough on its way for a rate to be measured, once a second
    add_big(fleet, name, "test:load_delay=2", size=size)
    pin(fleet, name, 1)
    seen: list[dict[str, Any]] = []
    with asked(lambda: chat(fleet, fleet.frontends[0], name)) as replies:
        while not replies:
            for number in range(2):
                found = admin(fleet, "/api/operations", frontend=number)["operations"]
                seen += [one for one in found if one["id"] == f"staging:{name}"]
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


def test_a_long_load_is_told_instead_of_waited_for(apart: Cluster) -> None:
    """After the load wait: 503 ``model_loading``, Retry-After, the ``loading`` object, alike everywhere (LOAD-7)."""
    first = apart.frontends[0]
    add_here(apart, first, "patience", "test:load_delay=6")
    url = first.url + "/v1/chat/completions"
    body = {"model": "patience", "messages": [{"role": "user", "content": "go"}]}
    began = time.monotonic()
    status, headers, answer = raw(url, apart.secrets.api_key, body)
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (503, "model_loading", "model_loading")
    assert time.monotonic() - began < 5
    assert 5 <= int(headers["retry-after"]) <= 60
    assert set(answer["loading"]) >= {
        "model", "state", "node", "progress", "bytes_sent", "total_bytes", "file_index", "total_files"
    }  # fmt: skip
    until("loading", lambda: (job(apart, "patience") or {}).get("state") == "loading", 20)
    told = until("the same at both", lambda: _told_alike(apart, "patience"), 5)
    assert (told["state"], told["node"], told["progress"]) == ("loading", "worker-0", 100.0)
    until("the replica", lambda: replicas(apart, "patience"), 20)
    assert ask(f"{first.url}/api/models/patience/load-status", key=apart.secrets.api_key).status == 404
    assert chat(apart, first, "patience").status == 200


def _told_alike(cluster: Cluster, model: str) -> dict[str, Any] | None:
    """What both frontends say of a load, once a heartbeat has told its bytes and none fell between the questions."""
    paths = [f"{one.url}/api/models/{model}/load-status" for one in cluster.frontends]
    first, second = (ask(path, key=cluster.secrets.api_key).json() for path in paths)
    return first if first == second and first["progress"] == 100.0 else None


def test_the_load_runs_where_the_files_are(apart: Cluster) -> None:
    """A request at a frontend without the files is served by a load at the one that has them (LOAD-22)."""
    first, second = apart.frontends
    add_here(apart, first, "elsewhere")
    text = (models_of(apart, first) / "elsewhere.yaml").read_text()
    (models_of(apart, second) / "elsewhere.yaml").write_text(text)
    until("the model on both", lambda: serves(apart, second, "elsewhere"), 10)
    until("an answer", lambda: chat(apart, second, "elsewhere").status == 200, 30)
    assert len(replicas(apart, "elsewhere")) == 1


def test_missing_files_are_named(apart: Cluster) -> None:
    """No frontend has the files: the error says which file is missing where (LOAD-22)."""
    for frontend in apart.frontends:
        folder = models_of(apart, frontend)
        (folder / "lost.yaml").write_text("name: lost\nbackend: test-backend\nparameters:\n  model: lost.bin\n")
        until("the model", lambda it=frontend: serves(apart, it, "lost"), 10)
    reply = until("the failure", lambda: _failed(chat(apart, apart.frontends[1], "lost")), 40)
    for frontend in apart.frontends:
        assert frontend.instance_id in said(reply)
        assert str(models_of(apart, frontend)) in said(reply)
    assert said(reply).count("lost.bin") == 2


def _failed(reply: Reply) -> Reply | None:
    return reply if reply.status == 500 else None


def test_a_changed_model_file_retires_the_old_replica(apart: Cluster) -> None:
    """A changed YAML: new requests get the new configuration, the old process is stopped and its row goes (LOAD-22)."""
    first = apart.frontends[0]
    events = add_here(apart, first, "revised", "test:answer=old words")
    until("the old answer", lambda: "old words" in chat(apart, first, "revised").text, 30)
    file = models_of(apart, first) / "revised.yaml"
    file.write_text(file.read_text().replace("old words", "new words"))
    until("the new answer", lambda: "new words" in chat(apart, first, "revised").text, 30)
    assert len(rows(apart.database.url, "select 1 from node_models where model_name = 'revised'")) == 1
    old, new = reported(events, "load")
    assert old["pid"] != new["pid"]
    until("the old process stopped", lambda: [one["pid"] for one in reported(events, "sigterm")] == [old["pid"]], 10)
    assert "old words" not in chat(apart, first, "revised").text


def models_of(cluster: Cluster, frontend: Frontend) -> Path:
    """A frontend's models folder."""
    return Path(frontend.env["LOCALAI_MODELS_PATH"])


def add_here(cluster: Cluster, frontend: Frontend, name: str, *options: str) -> Path:
    """Serve a model by the scriptable backend from one frontend's folder; the file its processes report to."""
    events = cluster.state.root / f"{name}.events"
    folder = models_of(cluster, frontend)
    (folder / f"{name}.bin").write_bytes(name.encode() * 100)
    lines = "\n".join(f"  - {option}" for option in [*options, f"test:events={events}"])
    text = f"name: {name}\nbackend: test-backend\nparameters:\n  model: {name}.bin\noptions:\n{lines}\n"
    (folder / f"{name}.yaml").write_text(text)
    until(f"{name} served", lambda: serves(cluster, frontend, name), 10)
    return events


def raw(url: str, key: str, body: Any) -> tuple[int, Mapping[str, str], Any]:
    """Status, headers and body of one request."""
    import http.client

    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", where.path, json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, answer
