"""Backend processes on a worker: installed, started, ended with it, loaded again, on free ports."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import openai
import pytest

from localai_dist.testing import backend
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.waiting import until
from tests.process.kit import command_line, living
from tests.process.outside import backends_of, sockets_of
from tests.process.scripted import admin, chat, client, pin, reported
from tests.process.yard import LATE, held, load, open_yard, place, port_of, server_of, unloaded

QUESTION = "What is the capital of Kenya?"
ANSWER = "The capital of Kenya is Nairobi."


@pytest.fixture(scope="module")
def yard() -> Iterator[Cluster]:
    """Two frontends and two workers."""
    with open_yard("backends") as cluster:
        yield cluster


def test_a_backend_is_installed_and_started_as_a_child(yard: Cluster) -> None:
    """llama-cpp: a directory with run.sh and metadata.json by a verb, a child on 127.0.0.1 (WALK-11)."""
    worker = yard.workers[0]
    home = worker.folder / "backends"
    assert list(home.iterdir()) == [] and admin(yard, f"/api/nodes/{worker.node_id}/backends") == []
    pin(yard, "tiny-facts", 0)
    reply = chat(yard, yard.frontends[0], "tiny-facts", QUESTION)
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER, reply.text
    assert [entry["name"] for entry in admin(yard, f"/api/nodes/{worker.node_id}/backends")] == ["llama-cpp"]
    folder = home / "llama-cpp"
    assert os.access(folder / "run.sh", os.X_OK)
    assert json.loads((folder / "metadata.json").read_text())["name"] == "llama-cpp"
    port = port_of(yard, "tiny-facts")
    processes = backends_of(worker, port)
    assert processes and any(str(folder) in command_line(pid) for pid in processes)
    listening = [it for pid in processes for it in sockets_of(pid) if it.listening]
    assert port in {it.port for it in listening}
    assert {it.address for it in listening} == {"127.0.0.1"}
    first = int(worker.env["LOCALAI_SERVE_ADDR"].rpartition(":")[2])
    assert first <= port <= int(worker.env["LOCALAI_GRPC_MAX_PORT"])
    # Where nothing was asked for, nothing was installed.
    assert list((yard.workers[1].folder / "backends").iterdir()) == []


def test_health_is_awaited(yard: Cluster) -> None:
    """A backend that listens only after a while is waited for: its first request is answered (WALK-11)."""
    place(yard, "late", of="late-backend")
    began = time.monotonic()
    load(yard, "late")
    assert time.monotonic() - began >= LATE


def test_a_killed_backend_is_loaded_again(yard: Cluster) -> None:
    """Its process killed, the next request is answered by a new one; nobody was told in between (WALK-11)."""
    place(yard, "mortal")
    _, processes = load(yard, "mortal")
    for frontend in yard.frontends:
        server = server_of(processes)
        os.kill(server, signal.SIGKILL)
        until("its end", lambda: not living({server}), 5)  # noqa: B023
        reply = chat(yard, frontend, "mortal")
        assert reply.status == 200, reply.text
        processes = backends_of(yard.workers[0], port_of(yard, "mortal"))
        assert server_of(processes) != server


def test_a_backend_that_dies_while_it_answers(yard: Cluster) -> None:
    """Killed in the middle of a stream: that one ends with an error, the next request is served (WALK-11)."""
    events = place(yard, "brittle", "test:delay=0.1", "test:tokens=3000")
    assert chat(yard, yard.frontends[0], "brittle", max_tokens=1).status == 200
    processes = backends_of(yard.workers[0], port_of(yard, "brittle"))
    said = [{"role": "user", "content": "go"}]
    stream = client(yard, yard.frontends[1]).chat.completions.create(model="brittle", messages=said, stream=True)
    chunks = iter(stream)
    while not next(chunks).choices[0].delta.content:
        pass
    os.kill(server_of(processes), signal.SIGKILL)
    with pytest.raises(openai.APIError) as caught:  # an error frame: the client has no other way to say so
        list(chunks)
    assert caught.value.message and not isinstance(caught.value, openai.APIConnectionError)
    assert len(reported(events, "done")) == 1  # that of the load
    assert chat(yard, yard.frontends[1], "brittle", max_tokens=1).status == 200


@pytest.mark.parametrize("kind", [backend.NAME, "two-backend"])
def test_backends_end_with_their_worker(yard: Cluster, kind: str) -> None:
    """The worker SIGKILLed: every process of its backends is gone within 5 s, deaf ones too (WALK-11)."""
    worker = yard.workers[0]
    name = f"orphan-{kind}"
    place(yard, name, "test:sigterm=ignore", of=kind)
    _, mine = load(yard, name)
    everything = backends_of(worker)
    assert mine and mine <= everything and len(mine) == (2 if kind == backend.NAME else 3)
    began = time.monotonic()
    worker.kill()
    until("the end of its backends", lambda: not living(everything), 5)
    assert time.monotonic() - began <= 5
    worker.start()
    yard.wait_for("the worker's tunnel", worker.is_ready, 40)
    load(yard, name)  # and it is served again


def test_ports_held_by_others_are_skipped(yard: Cluster) -> None:
    """A port of the range that another program listens on, or has only bound, is skipped for the next (WALK-22)."""
    worker = yard.workers[1]
    first = int(worker.env["LOCALAI_SERVE_ADDR"].rpartition(":")[2])
    # Two that don't stand in the way of a check that reuses addresses, one that is bound and never listens.
    with held(first, listen=True), held(first + 1, listen=True, shared=True), held(first + 2, listen=False):
        yard.restart(worker)
        yard.wait_for("the worker's tunnel", worker.is_ready, 40)
        place(yard, "squeezed", worker=1)
        port, processes = load(yard, "squeezed")
        assert port == first + 3
        assert unloaded(yard, "squeezed", processes, port)[0] == 0
        place(yard, "next", worker=1)
        assert load(yard, "next")[0] == first + 4  # and the fourth is kept for who had it last


def test_exhausted_ports_are_told(yard: Cluster) -> None:
    """No port left: the error names range, running, quarantined, skipped and the knob (WALK-22)."""
    worker = yard.workers[1]
    first = int(worker.env["LOCALAI_SERVE_ADDR"].rpartition(":")[2])
    worker.env["LOCALAI_GRPC_MAX_PORT"] = str(first + 2)
    yard.restart(worker)
    yard.wait_for("the worker's tunnel", worker.is_ready, 40)
    place(yard, "only", worker=1)
    place(yard, "ended", worker=1)
    place(yard, "late-comer", worker=1)
    assert load(yard, "only")[0] == first
    assert load(yard, "ended")[0] == first + 1
    with held(first + 2, listen=True):
        admin(yard, "/backend/shutdown", "POST", {"model": "ended"})  # from here on its port is quarantined for a while
        reply = chat(yard, yard.frontends[1], "late-comer")
    assert reply.status == 500
    message = reply.json()["error"]["message"]
    for part in (f"{first}-{first + 2}", "1 running", "1 quarantined", "1 skipped", "LOCALAI_GRPC_MAX_PORT"):
        assert part in message
    assert chat(yard, yard.frontends[0], "only").status == 200
