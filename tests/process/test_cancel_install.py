"""A load that is cancelled while its backend is being copied."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localai_dist.testing.backend import install
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.waiting import until
from localai_dist.testing.web import Reply, ask
from localai_dist.units import GiB
from tests.process.kit import open_folder, quick_plan, rows, running
from tests.process.scripted import add_model, chat, galleries, reported

SIZE = 64 * GiB
"""Of a backend whose copying is caught in the middle, and stopped; a hole, so that the gallery costs nothing."""
WITHIN = 2.0
"""After a cancel nothing of the install goes on (s)."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Cluster]:
    """Two frontends and one worker, and a gallery with a backend that takes long to copy."""
    with open_folder("cancel-install") as folder:
        env = galleries(folder)
        gallery = folder / "heavy"
        gallery.mkdir()
        for name in ("heavy", "shared"):
            install(gallery / name, name=name)
        (gallery / "index.yaml").write_text("- {name: heavy, uri: heavy}\n- {name: shared, uri: shared}\n")
        named = [*json.loads(env["LOCALAI_BACKEND_GALLERIES"]), {"name": "heavy", "url": str(gallery / "index.yaml")}]
        more = {"LOCALAI_BACKEND_GALLERIES": json.dumps(named)}
        plan = quick_plan(folder / "state", frontend_env=more, models=("tiny-facts",), workers=1)
        with running(plan) as cluster:
            yield cluster


def make_heavy(cluster: Cluster, backend: str, size: int) -> None:
    """The backend in the gallery has so many bytes."""
    path = cluster.state.root.parent / "heavy" / backend / "weights.bin"
    path.touch()
    os.truncate(path, size)


def add_heavy(cluster: Cluster, name: str, backend: str) -> Path:
    """A model of that backend, served by both frontends; returns the file its processes report to."""
    events = add_model(cluster, name, "test:answer=installed")
    sheet = cluster.state.models / f"{name}.yaml"
    sheet.write_text(sheet.read_text().replace("test-backend", backend))
    add_model(cluster, f"{name}-marker")  # what was written before it was read before it
    return events


def staged(cluster: Cluster, backend: str) -> Path:
    """Where the worker copies it to."""
    return cluster.workers[0].folder / "backends" / f"{backend}.install-tmp"


def copied(cluster: Cluster, backend: str) -> int:
    """Bytes of it that are there."""
    try:
        return (staged(cluster, backend) / "weights.bin").stat().st_size
    except FileNotFoundError:
        return 0


def cancel(cluster: Cluster, name: str, *, frontend: int) -> None:
    """As an operator, at that frontend."""
    url = f"{cluster.frontends[frontend].url}/api/operations/staging:{name}/cancel"
    assert ask(url, key=cluster.secrets.api_key, method="POST").status == 200


def job(cluster: Cluster, name: str) -> list[tuple[object, ...]]:
    """The row of a load."""
    return rows(cluster.database.url, "select state from model_load_jobs where tracking_key = %s", name)


def test_a_cancel_stops_the_install(fleet: Cluster) -> None:
    """Cancelled while its backend is copied: the copying stops, its bytes and the row are gone in 2 s (LOAD-17)."""
    make_heavy(fleet, "heavy", SIZE)
    events = add_heavy(fleet, "unwanted", "heavy")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(chat, fleet, fleet.frontends[0], "unwanted")
        until("the copying", lambda: copied(fleet, "heavy"), 30, every=0.01)
        cancel(fleet, "unwanted", frontend=1)  # where it does not run
        began = time.monotonic()
        until("the row gone", lambda: not job(fleet, "unwanted"), WITHIN)
        left = WITHIN - (time.monotonic() - began)
        until("the partial install gone", lambda: not staged(fleet, "heavy").exists(), left)
        reply = asked.result()
    assert reply.status == 500 and "by an operator" in said(reply), reply.text
    assert not (staged(fleet, "heavy").parent / "heavy").exists() and not reported(events, "start")
    make_heavy(fleet, "heavy", 0)  # positive control
    assert "installed" in chat(fleet, fleet.frontends[1], "unwanted").text


def test_a_shared_install_goes_on_for_the_other(fleet: Cluster) -> None:
    """Two loads wait for one install and one is cancelled: the same install goes on for the other (LOAD-17)."""
    make_heavy(fleet, "shared", SIZE)
    for name in ("leaves", "stays"):
        add_heavy(fleet, name, "shared")
    weights = staged(fleet, "shared") / "weights.bin"
    with ThreadPoolExecutor(2) as pool:
        leaves = pool.submit(chat, fleet, fleet.frontends[0], "leaves")
        until("the copying", lambda: copied(fleet, "shared"), 30, every=0.01)
        stays = pool.submit(chat, fleet, fleet.frontends[1], "stays")
        until(
            "the other one at it", lambda: "one more waits for backend shared" in fleet.workers[0].log.read_text(), 30
        )
        was = weights.stat()
        cancel(fleet, "leaves", frontend=0)
        assert leaves.result().status == 500
        until("the copying going on", lambda: copied(fleet, "shared") > was.st_size, 20)
        assert not stays.done()
        make_heavy(fleet, "shared", 0)  # what there is of it has been copied: it ends
        assert "installed" in stays.result().text
    whole = (staged(fleet, "shared").parent / "shared" / "weights.bin").stat()
    assert whole.st_ino == was.st_ino and whole.st_size > was.st_size


def said(reply: Reply) -> str:
    """The message of an error."""
    return str((reply.json() or {}).get("error", {}).get("message"))
