"""What is told of a load while it runs, fails, or loses its frontend; and a frontend that wakes up when it has lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Frontend
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from localai_dist.units import MiB
from localai_dist.wire.files import Target
from localai_dist.worker import sums
from tests.process.depot import sha256
from tests.process.kit import open_chat, rows
from tests.process.loading import (
    BIG,
    CAUGHT,
    IN_FLIGHT,
    TAKE_OVER,
    SlowableCluster,
    again,
    asked,
    at,
    let_start,
    open_slowable,
    other,
    owner,
    replicas,
    said,
)
from tests.process.scripted import SERVED_WITHIN, add_model, chat, gate_of, reported, serves, write_model

LOOK = 0.1
"""Between two questions for the operations (s)."""

Told = list[dict[str, Any] | None]
"""One load in the answers of ``GET /api/operations``, one after the other; None where it was not among them."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[SlowableCluster]:
    """Two frontends that share a models folder, one worker, a backend that is slow to start."""
    with open_slowable("takeover", workers=1) as cluster:
        yield cluster


def add(cluster: Cluster, name: str, *options: str, backend: str = "test-backend") -> Path:
    """Serve a model of ``BIG`` bytes, each MiB of another content; the file its processes report to."""
    draft, models = cluster.state.folder("drafts", inside=["models"]), cluster.state.models
    events = write_model(draft, name, *options)
    with (models / f"{name}.bin").open("wb") as file:
        for block in range(BIG // MiB):
            file.seek(block * MiB)
            file.write(f"{name} {block}".encode())
        file.truncate(BIG)
    sheet = (draft / "models" / f"{name}.yaml").read_text()
    (models / f"{name}.yaml").write_text(sheet.replace("backend: test-backend", f"backend: {backend}"))
    for frontend in cluster.frontends:
        until(f"{name} served by {frontend.name}", lambda it=frontend: serves(cluster, it, name), SERVED_WITHIN)
    return events


@contextmanager
def watched(cluster: Cluster, frontend: Frontend, name: str) -> Iterator[Told]:
    """What a frontend tells of a load as long as the block runs; every question must be answered."""
    told: Told = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK):
            reply = ask(f"{frontend.url}/api/operations", key=cluster.secrets.api_key, timeout=30)
            assert reply.status == 200, reply.text
            told.append(next((it for it in reply.json()["operations"] if it["id"] == f"staging:{name}"), None))

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            yield told
        finally:
            over.set()
        looking.result()


def entries(told: Told) -> list[dict[str, Any]]:
    """What was told from the first sight to the last, without a gap between them."""
    seen = [number for number, entry in enumerate(told) if entry]
    assert seen, "it was never told of"
    between = told[seen[0] : seen[-1] + 1]
    found = [entry for entry in between if entry]
    assert len(found) == len(between), "it was left out for a while"
    return found


def test_a_load_is_told_alike_from_its_install_to_its_failure(fleet: SlowableCluster) -> None:
    """
    A load is in every answer of both frontends from its first to its last, through install, staging and load; its bytes
    never go down; that it failed, and of what, both tell alike (LOAD-18, BR-085).
    """
    first, second = fleet.frontends
    add(fleet, "told", f"test:load_gate={gate_of(fleet, 'told')}", "test:load=fail", backend="slow-backend")
    with watched(fleet, first, "told") as here, watched(fleet, second, "told") as there:
        with asked(lambda: chat(fleet, first, "told")) as replies:
            with fleet.slowed():
                tells("installing", here, there)
                let_start(fleet)
                tells("staging", here, there)
            tells("loading", here, there)
            gate_of(fleet, "told").touch()
        tells("failed", here, there)
    for told in (here, there):
        found = entries(told)
        states = list(dict.fromkeys(entry["state"] for entry in found if entry["state"] != "pending"))
        assert states == ["installing", "staging", "loading", "failed"]
        sent = [entry["currentBytes"] for entry in found]
        assert sent == sorted(sent)
        assert {entry["nodeName"] for entry in found if entry["state"] != "pending"} == {"worker-0"}
    assert replies[0].status == 500
    assert entries(here)[-1] == entries(there)[-1]
    assert entries(here)[-1]["error"] == said(replies[0])


def tells(state: str, *told: Told) -> None:
    """Wait until each of ``told`` has come to a state."""
    for one in told:
        until(f"{state} told", lambda it=one: it and it[-1] and it[-1]["state"] == state, TAKE_OVER)


def test_a_load_stays_told_when_its_frontend_dies(fleet: SlowableCluster) -> None:
    """
    From the death of the frontend that stages to the replica the other one tells of the load in every answer, never of
    fewer bytes than had been told of, and never of fewer than before (LOAD-18, BR-125).
    """
    add(fleet, "bereft", f"test:load_gate={gate_of(fleet, 'bereft')}")
    with ExitStack() as slow:
        slow.enter_context(fleet.slowed())
        with open_chat(fleet, fleet.frontends[0], "bereft"):
            row = at(fleet, "bereft", "staging", bytes_sent=CAUGHT)
        victim = owner(fleet, row)
        survivor = other(fleet, victim)
        with watched(fleet, survivor, "bereft") as told:
            victim.kill()
            slow.close()
            tells("loading", told)
            gate_of(fleet, "bereft").touch()
            until("the load taken over", lambda: replicas(fleet, "bereft"), TAKE_OVER)
    again(fleet, victim)
    assert told[0], "not told of right after the death"
    found = entries(told)
    assert all(entry is None for entry in told[len(found) :])
    sent = [entry["currentBytes"] for entry in found]
    assert sent[0] >= row["bytes_sent"]
    assert sent == sorted(sent)
    assert found[-1]["state"] == "loading"


@pytest.mark.parametrize("wakes", ["while the other loads", "after the other loaded"])
def test_a_frozen_frontend_that_wakes_does_nothing(fleet: SlowableCluster, wakes: str) -> None:
    """
    A frontend stands still in the middle of its staging and another one takes the load over: woken up, the first one
    loads nothing, writes nothing and moves nothing, whether the load is over by then or not (LOAD-6).
    """
    name = f"frozen-{wakes[0]}"
    early = wakes == "while the other loads"
    events = add(fleet, name, *([f"test:load_gate={gate_of(fleet, name)}"] if early else []))
    with fleet.slowed(), open_chat(fleet, fleet.frontends[0], name):
        row = at(fleet, name, "staging", bytes_sent=CAUGHT)
        victim = owner(fleet, row)
        victim.freeze()
    survivor = other(fleet, victim)
    try:
        if early:
            until("the other's LoadModel", lambda: reported(events, "load"), TAKE_OVER)
        else:
            until("the load taken over", lambda: replicas(fleet, name), TAKE_OVER)
    finally:
        victim.thaw()
    lost = f"the load of {name} goes on at another frontend"
    until("it knows that it lost", lambda: lost in victim.log.read_text(), 30)
    gate_of(fleet, name).touch()
    loaded = until("the replica", lambda: replicas(fleet, name), TAKE_OVER)
    until("it is ready again", victim.is_ready, 30)
    for frontend in (victim, survivor):  # a control: it serves what the other one loaded
        assert chat(fleet, frontend, name).status == 200
    assert len(reported(events, "load")) == 1
    assert replicas(fleet, name) == loaded
    [there] = fleet.workers[0].models_dir.rglob(f"{name}.bin")
    assert sha256(there) == sha256(fleet.state.models / f"{name}.bin")
    [(moved, outcome)] = rows(
        fleet.database.url, "select moved, outcome from model_load_endings where model_name = %s", name
    )
    assert outcome == "loaded" and moved <= BIG - row["bytes_sent"] + IN_FLIGHT


def test_what_a_failed_load_left_goes_with_its_model(fleet: SlowableCluster) -> None:
    """The YAML of a model whose load failed is deleted: what is unfinished leaves the worker's disk (LOAD-16)."""
    add_model(fleet, "unloved", "test:load=fail")
    assert chat(fleet, fleet.frontends[0], "unloved").status == 500
    there = fleet.workers[0].models_dir / "unloved"
    [whole] = there.rglob("unloved.bin")
    partial = whole.with_name("partial.bin")
    sums.begin(partial, Target("0" * 64, 9))
    (fleet.state.models / "unloved.yaml").unlink()
    until("its unfinished file gone from the worker", lambda: not partial.exists(), 40)
    assert whole.exists()  # another frontend may serve the model


@pytest.mark.slow
def test_a_stream_is_never_silent_for_long(fleet: SlowableCluster) -> None:
    """
    A streamed request of a model that takes 25 s to load: headers at once, never 15 s without a byte, then the answer,
    so that no proxy in between takes it for dead (LOAD-8, BR-020).
    """
    add_model(fleet, "long", "test:load_delay=25", "test:answer=at last")
    got = b""
    with open_chat(fleet, fleet.frontends[0], "long") as connection:
        connection.settimeout(15)  # of each wait for a byte
        while b"data: [DONE]" not in got:
            more = connection.recv(65536)
            assert more, got
            got += more
    assert got.startswith(b"HTTP/1.1 200") and b"text/event-stream" in got
    assert got.count(b": waiting\n\n") >= 2
    assert b'"at"' in got.partition(b": waiting\n\n")[2]
