"""A cluster with an object store: model files go by way of it, and the tunnels carry next to nothing."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from localai_dist.objects.bucket import object_key
from localai_dist.testing.waiting import until
from localai_dist.units import MiB
from tests.process.faults import FragileCluster, carried
from tests.process.kit import open_folder, quick_plan, rows, run_to_the_end
from tests.process.outside import backends_of, environment_of
from tests.process.scripted import SERVED_WITHIN, admin, chat, pin, serves
from tests.support.object_server import ACCESS_KEY, SECRET_KEY, ObjectServer, environment

QUESTION, ANSWER = "What is the capital of Kenya?", "The capital of Kenya is Nairobi."
SIZE = 72 * MiB
"""More than one part."""


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectServer]:
    """A real S3-compatible server."""
    server = ObjectServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def depot(store: ObjectServer) -> Iterator[FragileCluster]:
    """Two frontends, two workers, all of them told of the store."""
    env = environment(store.url)
    with open_folder("store") as folder:
        plan = quick_plan(folder / "state", models=["tiny-facts"], frontend_env=env, worker_env=env)
        with run_to_the_end(FragileCluster(plan)) as cluster:
            yield cluster


def add(cluster: FragileCluster, name: str) -> str:
    """Serve a padded tiny-facts as ``name``; its SHA-256."""
    models = cluster.state.models
    [source] = models.glob("tiny-facts-1m*.gguf")
    file = models / f"{name}.gguf"
    shutil.copyfile(source, file)
    with file.open("r+b") as opened:
        for block in range(2, SIZE // MiB):
            opened.seek(block * MiB)
            opened.write(hashlib.sha256(f"{name} {block}".encode()).digest() * 128)
        opened.truncate(SIZE)
    sheet = (models / "tiny-facts.yaml").read_text()
    (models / f"{name}.yaml").write_text(
        sheet.replace("name: tiny-facts", f"name: {name}").replace(source.name, file.name)
    )
    for frontend in cluster.frontends:
        until(f"{name} served by {frontend.name}", lambda it=frontend: serves(cluster, it, name), SERVED_WITHIN)
    return sha256(file)


def sha256(path: Path) -> str:
    """The file's hash."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def answered(cluster: FragileCluster, frontend: int, name: str) -> None:
    """The model answers."""
    reply = chat(cluster, cluster.frontends[frontend], name, QUESTION)
    assert reply.status == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER


def test_a_model_goes_by_way_of_the_store(depot: FragileCluster, store: ObjectServer) -> None:
    """A model is given to the store once and fetched by each node; the tunnels carry questions only (LOAD-20)."""
    name = "stored"
    digest = add(depot, name)
    before = carried(depot.tunnels) + carried(depot.links)
    for index, worker in enumerate(depot.workers):
        pin(depot, name, index)
        answered(depot, 1 - index, name)
        assert sha256(worker.models_dir / name / f"{name}.gguf") == digest
        admin(depot, "/backend/shutdown", "POST", {"model": name})
        node = worker.node_id
        admin(depot, f"/api/nodes/{node}/labels", "PATCH", {f"for-{name}": "no"})
    assert store.keys().count(object_key(digest)) == 1
    assert store.uploads() == []
    assert carried(depot.tunnels) + carried(depot.links) - before < 4 * MiB


def test_no_backend_sees_the_stores_keys(depot: FragileCluster) -> None:
    """The store's keys are in no log and in no backend's environment (LOAD-20)."""
    pin(depot, "tiny-facts", 0)
    answered(depot, 0, "tiny-facts")
    [(address,)] = rows(depot.database.url, "select address from node_models where model_name = 'tiny-facts'")
    pids = backends_of(depot.workers[0], int(address.rpartition(":")[2]))
    assert pids
    for pid in pids:
        assert SECRET_KEY not in environment_of(pid).values()
    for child in depot.children:
        text = child.log.read_text()
        assert SECRET_KEY not in text and ACCESS_KEY not in text
