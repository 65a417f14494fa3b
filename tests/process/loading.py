"""A cluster while it loads: ways made slow, a backend that starts when it is let, the rows of loads and replicas."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localai_dist.testing.backend import install
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.faults import FaultProxy, Faults
from localai_dist.testing.members import Frontend
from localai_dist.testing.waiting import until
from localai_dist.testing.web import Reply
from localai_dist.units import MiB
from tests.process.fleet import HOMED_WITHIN
from tests.process.kit import open_folder, quick_plan, rows, run_to_the_end
from tests.process.scripted import add_model, galleries

BIG = 320 * MiB
"""A model whose transfer is caught in the middle (bytes)."""

CAUGHT = 32 * MiB
"""So much of it is there when it is caught, or a little more: at ``SLOW`` the rest takes eighteen seconds."""

SLOW = 16 * MiB
"""What a slowed way carries at most, whatever the machine (bytes per second)."""

IN_FLIGHT = 8 * MiB
"""What a killed frontend's transport had taken and the worker never got is sent again; no more than this (LOAD-11)."""

TAKE_OVER = 60.0
"""A dead frontend's load is another one's within this (s): live window, missed beats, a look; then the load itself."""


class SlowableCluster(Cluster):
    """
    A cluster whose workers reach every frontend by a proxy.

    Attributes:
        ways: the proxies.
    """

    def __init__(self, state: Path, faults: Faults, **more: Any) -> None:
        self.ways: list[FaultProxy] = []

        def way(worker: int, frontend: int, url: str) -> str:
            self.ways.append(faults.proxy(url))
            return self.ways[-1].url

        super().__init__(quick_plan(state, way=way, **more))

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """No way carries more than ``SLOW`` meanwhile, so that a transfer is certainly under way for a while."""
        self._throttle(SLOW)
        try:
            yield
        finally:
            self._throttle(0)

    def _throttle(self, rate: float) -> None:
        for way in self.ways:
            way.throttle(rate)


@contextmanager
def open_slowable(name: str, **more: Any) -> Iterator[SlowableCluster]:
    """A running one with the scriptable backend, and with ``slow-backend``."""
    with open_folder(name) as folder, Faults() as faults:
        plan = {"frontend_env": with_slow_backend(folder), "models": ("tiny-facts",), **more}
        with run_to_the_end(SlowableCluster(folder / "state", faults, **plan)) as cluster:
            yield cluster


def with_slow_backend(folder: Path) -> dict[str, str]:
    """The galleries of ``scripted``, and a backend that does not listen before it is let: the install waits for it."""
    env = galleries(folder)
    slow = folder / "slow-gallery"
    run = install(slow / "slow-backend", name="slow-backend") / "run.sh"
    waits = f'while [ ! -e "{folder / _LET}" ]; do sleep 0.1; done\n'
    run.write_text(run.read_text().replace("exec ", f"{waits}exec "))
    (slow / "index.yaml").write_text("- name: slow-backend\n  uri: slow-backend\n  version: '1'\n")
    named = [*json.loads(env["LOCALAI_BACKEND_GALLERIES"]), {"name": "slow", "url": str(slow / "index.yaml")}]
    return {"LOCALAI_BACKEND_GALLERIES": json.dumps(named)}


_LET = "slow-backend.may-start"


def let_start(cluster: Cluster) -> None:
    """Every process of ``slow-backend`` goes on, from now on."""
    (cluster.state.root.parent / _LET).touch()


def add_big(cluster: Cluster, name: str, *options: str, size: int = BIG) -> Path:
    """A model whose file is big; returns the file its processes report to."""
    events = add_model(cluster, name, *options)
    os.truncate(cluster.state.models / f"{name}.bin", size)
    return events


def again(cluster: Cluster, frontend: Frontend) -> None:
    """Start a frontend again; back when it is ready and every worker's tunnel is up."""
    cluster.restart(frontend)
    until(f"{frontend.name} ready", frontend.is_ready, 60)
    until("every tunnel", lambda: all(worker.is_ready() for worker in cluster.workers), HOMED_WITHIN)


def models_of(cluster: Cluster, frontend: Frontend) -> Path:
    """A frontend's models folder."""
    return Path(frontend.env["LOCALAI_MODELS_PATH"])


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


@contextmanager
def asked(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """A request that runs meanwhile; its reply, or what it failed with, is in the list when the block is left."""
    replies: list[Any] = []

    def run() -> None:
        try:
            replies.append(call())
        except Exception as error:  # noqa: BLE001 - the test compares it with the reply it wants
            replies.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield replies
    thread.join(90)
    assert replies, "the request was never answered"


def said(reply: Reply) -> str:
    """The message of an error."""
    return str((reply.json() or {}).get("error", {}).get("message"))
