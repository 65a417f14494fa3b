"""Loads that fail, one after the other on one worker: each says why, and none leaves anything behind."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.waiting import until
from localai_dist.units import MiB
from localai_dist.worker.ports import QUARANTINE
from tests.process.kit import descendants, open_folder, quick_plan, rows, running
from tests.process.loading import said
from tests.process.scripted import add_model, admin, chat, galleries
from tests.process.test_staging_depth import memory

QUESTION = "What is the capital of Kenya?"
ANSWER = "The capital of Kenya is Nairobi."

GROWS_BY = 32 * MiB
"""What a worker may have gained after all these loads (bytes)."""

FAILS = {
    "junk": "invalid magic characters",
    "torn": "model is corrupted or incomplete",
    "refused": "the script says: no load",
    "killed": "its backend was lost while it loaded the model",
}
"""Models that can't be loaded, and what each failure says of the reason."""


@pytest.fixture(scope="module")
def yard() -> Iterator[Cluster]:
    """Two frontends, one worker."""
    with open_folder("failed") as folder:
        plan = quick_plan(folder / "state", models=["tiny-facts"], workers=1, frontend_env=galleries(folder))
        with running(plan) as cluster:
            yield cluster


def spoil(cluster: Cluster) -> None:
    """The models of ``FAILS``: no model at all, a part of one, and two scripted ones."""
    models = cluster.state.models
    [good] = models.glob("tiny-facts*.gguf")
    (models / "junk.gguf").write_bytes(bytes(range(256)) * 400)
    (models / "torn.gguf").write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    # None that is really too big: a context the machine has no room for is not refused, it fills the memory first. What
    # the kernel does about one is what happens to the process of "killed".
    for name in ("junk", "torn"):
        text = f"name: {name}\nbackend: llama-cpp\ncontext_size: 256\nthreads: 1\nparameters:\n  model: {name}.gguf\n"
        (models / f"{name}.yaml").write_text(text)
    add_model(cluster, "killed", "test:load=die")
    add_model(cluster, "refused", "test:load=fail")  # the last one: the others are served by then


def good(cluster: Cluster, frontend: int) -> int:
    """The good model is loaded, answers and is unloaded; the port its backend had."""
    reply = chat(cluster, cluster.frontends[frontend], "tiny-facts", QUESTION)
    assert reply.status == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER
    [(address,)] = rows(cluster.database.url, "select address from node_models where model_name = 'tiny-facts'")
    admin(cluster, "/backend/shutdown", "POST", {"model": "tiny-facts"})
    until("no backend of the worker", lambda: not descendants(cluster.workers[0].pid), 30)
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_failed_loads_leave_nothing(yard: Cluster, rounds: int) -> None:
    """
    Corrupt, cut off, refused, killed while it loads as for want of memory: each failure says which, then a good model
    answers on the same worker; no process, row or memory is left. Twenty times over, which needs more ports than there
    are, and then the good model has its own port again, in ``make test-slow`` (LOAD-5, BR-038).
    """
    spoil(yard)
    [worker] = yard.workers
    good(yard, 0)
    before = memory(worker, "VmRSS")
    for number in range(rounds):
        for name, reason in FAILS.items():
            reply = chat(yard, yard.frontends[number % 2], name, stream=False)
            assert reply.status == 500 and reason in said(reply), reply.text
        port = good(yard, number % 2)
    assert memory(worker, "VmRSS") - before < GROWS_BY
    assert rows(yard.database.url, "select model_name from node_models") == []
    if rounds > 1:
        over = time.monotonic() + QUARANTINE + 1
        until("the end of every quarantine", lambda: time.monotonic() > over, QUARANTINE + 5)
        assert good(yard, 0) == port
