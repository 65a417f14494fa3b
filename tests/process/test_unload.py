"""Unloading: done when the process is really gone, whatever it does, and its row with it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Worker
from localai_dist.testing.waiting import until
from tests.process.kit import living, rows
from tests.process.scripted import chat, reported
from tests.process.yard import load, open_yard, operator, place, row_of, server_of, unloaded


@pytest.fixture(scope="module")
def yard() -> Iterator[Cluster]:
    """Two frontends, two workers, the scriptable backend in several forms."""
    with open_yard("unload") as cluster:
        yield cluster


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["test:free=fail"],
        ["test:free=hang"],
        ["test:sigterm=ignore"],
        ["test:free=fail", "test:sigterm=ignore"],
    ],
    ids=lambda options: "-".join(option.partition(":")[2] for option in options) or "good",
)
def test_unload_ends_the_process_whatever_it_does(yard: Cluster, options: list[str]) -> None:
    """Free fails or hangs, SIGTERM is ignored: done when the process is really gone, its row with it (WALK-21)."""
    name = "unload-" + ("-".join(option.partition(":")[2].replace("=", "-") for option in options) or "good")
    events = place(yard, name, *options)
    port, processes = load(yard, name)
    assert unloaded(yard, name, processes, port) == (0, f"{name} is unloaded\n", "")
    assert len(reported(events, "free")) >= 1
    if "test:sigterm=ignore" in options:
        assert reported(events, "sigterm")  # it was asked before it was killed
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))  # nobody holds its port any more
    load(yard, name)


def test_unload_ends_the_whole_group(yard: Cluster) -> None:
    """A second process of the backend that is deaf to SIGTERM is ended too (WALK-21)."""
    place(yard, "pair", of="two-backend")
    port, processes = load(yard, "pair")
    assert len(processes) == 3
    assert unloaded(yard, "pair", processes, port)[0] == 0


def test_unload_ends_a_stopped_process(yard: Cluster) -> None:
    """A backend that was stopped by SIGSTOP, and answers nothing, is ended like any other (WALK-21)."""
    place(yard, "wedged")
    port, processes = load(yard, "wedged")
    os.kill(server_of(processes), signal.SIGSTOP)
    assert unloaded(yard, "wedged", processes, port)[0] == 0


def test_memory_is_free_when_the_process_is_gone(yard: Cluster) -> None:
    """
    A backend that frees nothing and is deaf to SIGTERM: while it is being ended the node's heartbeats go on and tell
    its memory as taken, and it is told as free after the process is really gone (WALK-21).
    """
    worker = yard.workers[1]
    with graphics_card(yard, worker) as holders:
        place(yard, "heavy", "test:free=hang", "test:sigterm=ignore", worker=1)
        _, processes = load(yard, "heavy")
        server = server_of(processes)
        holders.write_text(str(server))
        until("its memory told as taken", lambda: card_of(yard, worker)[0] == CARD - TAKEN, 20)
        command, beats = operator(yard, "models", "unload", "heavy"), set()
        while command.poll() is None:
            free, beat = card_of(yard, worker)
            if living({server}):
                assert free == CARD - TAKEN
                beats.add(beat)
        assert (command.wait(), living(processes), row_of(yard, "heavy")) == (0, set(), None)
        assert len(beats) >= 2, "no heartbeat was sent while it ended"
        until("its memory told as free", lambda: card_of(yard, worker)[0] == CARD, 20)


CARD, TAKEN = 8000, 6000
"""Memory of the card, and of it what a process holds (MiB)."""


@contextmanager
def graphics_card(cluster: Cluster, worker: Worker) -> Iterator[Path]:
    """Give a worker an ``nvidia-smi`` by which the processes named in the file hold memory as long as they live."""
    folder = cluster.state.folder("card")
    holders, program = folder / "holders", folder / "nvidia-smi"
    holders.write_text("")
    program.write_text(
        f"#!/bin/sh\nfree={CARD}\nfor pid in $(cat {holders}); do\n"
        f"  grep -qs '^State:.[^ZX]' /proc/$pid/status && free={CARD - TAKEN}\ndone\necho {CARD}, $free, 9.0\n"
    )
    program.chmod(0o755)
    before = worker.env.get("PATH")
    worker.env["PATH"] = f"{folder}:{before or os.environ['PATH']}"
    cluster.restart(worker)
    cluster.wait_for("the worker's tunnel", worker.is_ready, 40)
    try:
        yield holders
    finally:
        worker.env["PATH"] = before or os.environ["PATH"]
        cluster.restart(worker)
        cluster.wait_for("the worker's tunnel", worker.is_ready, 40)


def card_of(cluster: Cluster, worker: Worker) -> tuple[int, Any]:
    """The free memory of a worker's card as the registry has it (MiB), and of when that is."""
    statement = "select available_vram / 1048576, last_heartbeat from backend_nodes where id = %s"
    [(free, told)] = rows(cluster.database.url, statement, worker.node_id)
    return int(free), told


def test_a_failed_load_leaves_no_process(yard: Cluster) -> None:
    """The backend refuses the model: the cause is told, its process is gone, and there is nothing to unload."""
    events = place(yard, "refused", "test:load=fail")
    reply = chat(yard, yard.frontends[0], "refused")
    assert (reply.status, reply.json()["error"]["code"]) == (500, "model_load_failed")
    started = reported(events, "load")
    assert started and not living({int(one["pid"]) for one in started})
    again = operator(yard, "models", "unload", "refused", "--node", yard.workers[0].node_id)
    _, err = again.communicate()
    assert again.returncode == 4 and "not loaded" in err


def test_unload_of_an_absent_process_succeeds(yard: Cluster) -> None:
    """Its process is gone already, its row is still there: success, and the row goes (WALK-21)."""
    place(yard, "absent")
    port, processes = load(yard, "absent")
    os.kill(server_of(processes), signal.SIGKILL)
    until("its end", lambda: not living(processes), 20)
    assert row_of(yard, "absent")
    assert unloaded(yard, "absent", processes, port) == (0, "absent is unloaded\n", "")
    again = operator(yard, "models", "unload", "absent")
    _, err = again.communicate()
    assert again.returncode == 4 and "not loaded" in err


def test_unload_fails_with_the_cause(yard: Cluster) -> None:
    """A worker that can't be asked: the command fails with the cause, row and process stay (WALK-21)."""
    place(yard, "far", worker=1)
    _, processes = load(yard, "far")
    worker, row = yard.workers[1], row_of(yard, "far")
    worker.freeze()
    try:
        command = operator(yard, "models", "unload", "far")
        out, err = command.communicate(timeout=60)
        # Before it goes on: what it had been asked before its tunnel was given up it may still do then.
        assert row_of(yard, "far") == row and living(processes) == processes
    finally:
        worker.thaw()
    assert (command.returncode, out) == (1, "")
    assert err.count("\n") == 1 and ("worker_reconnecting" in err or "worker_unavailable" in err or "504" in err), err
    yard.wait_for("the worker's tunnel", worker.is_ready, 40)
    until("an unload that works", lambda: operator(yard, "models", "unload", "far").wait() == 0, 20)
    assert not living(processes)
