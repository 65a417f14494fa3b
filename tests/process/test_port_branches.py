"""Which port a backend gets, on a real worker whose range other programs hold ports of: all four branches."""

from __future__ import annotations

import time

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.waiting import until
from localai_dist.worker.ports import QUARANTINE
from tests.process.scripted import chat
from tests.process.yard import held, load, open_yard, place, unloaded

OVER = QUARANTINE + 1
"""By our clock a quarantine that began before now is over after this (s)."""


def load_on(cluster: Cluster, name: str) -> int:
    """Load a model, and the port its backend got."""
    return load(cluster, name)[0]


def end(cluster: Cluster, name: str) -> None:
    """Unload a model."""
    port, processes = load(cluster, name)
    assert unloaded(cluster, name, processes, port)[0] == 0


def sit_out_quarantines() -> None:
    """Back when every quarantine that has begun is over."""
    over = time.monotonic() + OVER
    until("the end of every quarantine", lambda: time.monotonic() >= over, OVER + 5)


def test_every_branch_probes() -> None:
    """
    Own, free, grown and taken over, in this order, each with a port that another program holds: it is skipped for
    the next and quarantined, and its claim is dropped (WALK-22).
    """
    with open_yard("ports") as cluster:
        worker = cluster.workers[0]
        first = int(worker.env["LOCALAI_SERVE_ADDR"].rpartition(":")[2])
        worker.env["LOCALAI_GRPC_MAX_PORT"] = str(first + 3)
        cluster.restart(worker)
        cluster.wait_for("the worker's tunnel", worker.is_ready, 40)
        for name in ("one", "two", "three", "four"):
            place(cluster, name)

        # A port stays held for as long as it is passed over: a slow machine's loads may outlast its quarantine.
        with held(first, listen=True):
            assert load_on(cluster, "one") == first + 1  # grown, past the one that is held
            assert load_on(cluster, "two") == first + 2
        for name in ("one", "two"):
            end(cluster, name)
        sit_out_quarantines()

        with held(first + 1, listen=False):
            assert load_on(cluster, "one") == first  # its own is held, so a free one
            assert load_on(cluster, "two") == first + 2  # its own
            assert load_on(cluster, "three") == first + 3  # grown: the free one is the one that is held
        for name in ("two", "three"):
            end(cluster, name)
        sit_out_quarantines()

        with held(first + 1, listen=True), held(first + 2, listen=True):
            assert load_on(cluster, "four") == first + 3  # the free one is held, the one taken over first as well
        reply = chat(cluster, cluster.frontends[1], "two")  # which has lost its claim and finds nothing
        message = reply.json()["error"]["message"]
        assert (reply.status, "2 running" in message, "2 quarantined" in message) == (500, True, True), message
        assert all(chat(cluster, cluster.frontends[1], name).status == 200 for name in ("one", "four"))
