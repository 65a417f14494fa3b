"""A load that is cancelled while a worker fetches its file from an object store."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.faults import FaultProxy, Faults
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from localai_dist.units import MiB
from tests.process.kit import open_folder, quick_plan, rows, running
from tests.process.outside import sockets_of
from tests.process.scripted import add_model, chat, galleries
from tests.support.object_server import ObjectServer, environment

SIZE = 64 * MiB
RATE = 8 * MiB
"""The worker gets no more of it than so many bytes in a second: its fetch is caught in the middle."""
WITHIN = 2.0
"""After a cancel nothing of the fetch goes on (s)."""


@pytest.fixture
def store() -> Iterator[ObjectServer]:
    """A real S3-compatible server."""
    server = ObjectServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def way(store: ObjectServer) -> Iterator[FaultProxy]:
    """The worker's way to it, a slow one."""
    with Faults() as faults:
        proxy = faults.proxy(store.url)
        proxy.throttle(RATE)
        yield proxy


@pytest.fixture
def depot(store: ObjectServer, way: FaultProxy) -> Iterator[Cluster]:
    """Two frontends and a worker, told of the store."""
    with open_folder("cancel-store") as folder:
        env = {**environment(store.url), **galleries(folder)}
        more = {"frontend_env": env, "worker_env": environment(way.url)}
        with running(quick_plan(folder / "state", models=("tiny-facts",), workers=1, **more)) as cluster:
            yield cluster


@pytest.mark.parametrize("is_silent", [False, True], ids=["slow", "silent"])
def test_a_cancel_stops_the_fetch(depot: Cluster, way: FaultProxy, is_silent: bool) -> None:
    """Cancelled while the worker fetches from a slow or a silent store: the worker lets go of the store, and the
    partial file and the row are gone, in 2 s (LOAD-17, LOAD-20)."""
    name = "stored"
    add_model(depot, name, "test:answer=fetched")
    os.truncate(depot.state.models / f"{name}.bin", SIZE)
    worker = depot.workers[0]
    folder = worker.models_dir / name
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(chat, depot, depot.frontends[0], name)
        until("the first bytes", lambda: held(depot, name) >= MiB, 60, every=0.01)
        until("the worker at the store", lambda: at_store(depot, way), 10, every=0.01)
        if is_silent:
            way.swallow()
        url = f"{depot.frontends[1].url}/api/operations/staging:{name}/cancel"
        assert ask(url, key=depot.secrets.api_key, method="POST").status == 200
        began = time.monotonic()
        until("the row gone", lambda: not job(depot, name), WITHIN)
        until("the partial file gone", lambda: not folder.exists(), WITHIN - (time.monotonic() - began))
        until("no connection to the store", lambda: not at_store(depot, way), WITHIN - (time.monotonic() - began))
        reply = asked.result()
    assert reply.status == 500 and "by an operator" in reply.text
    way.heal()  # positive control
    assert "fetched" in chat(depot, depot.frontends[1], name).text
    assert held(depot, name) == SIZE


def at_store(cluster: Cluster, way: FaultProxy) -> bool:
    """Whether the worker has a connection to the store."""
    port = urlsplit(way.url).port
    return any(one.remote_port == port for one in sockets_of(cluster.workers[0].pid))


def held(cluster: Cluster, name: str) -> int:
    """Bytes of the model that are on the worker."""
    path = cluster.workers[0].models_dir / name / f"{name}.bin"
    return path.stat().st_size if path.exists() else 0


def job(cluster: Cluster, name: str) -> list[tuple[object, ...]]:
    """The row of a load."""
    return rows(cluster.database.url, "select state from model_load_jobs where tracking_key = %s", name)
