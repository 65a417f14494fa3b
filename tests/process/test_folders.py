"""Frontends whose models folders are their own, and not the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from localai_dist.testing.child import checkout
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.waiting import until
from localai_dist.testing.web import Reply
from tests.process.kit import open_folder, quick_plan, rows, running
from tests.process.loading import again, models_of
from tests.process.scripted import chat, galleries, reported, serves

QUESTION, ANSWER = "What is the capital of Kenya?", "The capital of Kenya is Nairobi."
SHARDS = sorted((checkout() / "tests" / "data" / "tiny-facts-shards").glob("*.gguf"))


@pytest.fixture(scope="module")
def apart() -> Iterator[Cluster]:
    """Two frontends with models folders of their own, one worker."""
    with open_folder("folders") as folder:
        plan = quick_plan(folder / "state", frontend_env=galleries(folder), models=("tiny-facts",), workers=1)
        with running(plan) as cluster:
            second = cluster.frontends[1]
            second.env["LOCALAI_MODELS_PATH"] = str(cluster.state.folder("own-models"))
            again(cluster, second)
            yield cluster


def add_shards(cluster: Cluster, name: str, lost: list[set[int]]) -> None:
    """The sharded model on both frontends, without the shards (from 0) that each has lost."""
    sheet = (cluster.state.models / "tiny-facts.yaml").read_text()
    [weights] = cluster.state.models.glob("tiny-facts-1m*.gguf")
    for frontend, missing in zip(cluster.frontends, lost, strict=True):
        folder = models_of(cluster, frontend)
        (folder / name).mkdir()
        for index, shard in enumerate(SHARDS):
            if index not in missing:
                shutil.copyfile(shard, folder / name / shard.name)
        text = sheet.replace("name: tiny-facts", f"name: {name}").replace(weights.name, f"{name}/{SHARDS[0].name}")
        (folder / f"{name}.yaml").write_text(text)
        until(f"{name} served by {frontend.name}", lambda it=frontend: serves(cluster, it, name), 10)


def runner(cluster: Cluster, name: str) -> list[str]:
    """The frontends that began to load a model on a node, each time they did."""
    return [
        child.name for child in cluster.frontends for _ in range(child.log.read_text().count(f"loading {name} on node"))
    ]


def said(reply: Reply) -> str:
    """The message of an error."""
    return str((reply.json() or {}).get("error", {}).get("message"))


def test_any_file_is_looked_for_elsewhere(apart: Cluster) -> None:
    """One of the later shards is missing here: the frontend that has all of them loads the model (LOAD-22)."""
    assert len(SHARDS) == 7
    add_shards(apart, "split", [{4}, set()])
    reply = chat(apart, apart.frontends[0], "split", QUESTION)
    assert reply.status == 200 and reply.json()["choices"][0]["message"]["content"] == ANSWER, reply.text
    assert runner(apart, "split") == ["frontend-1"]


def test_a_missing_companion_is_looked_for_elsewhere(apart: Cluster) -> None:
    """A companion of the model is missing here: it is loaded from where it is, companion and all (LOAD-13, LOAD-22)."""
    events = add_pair(apart, "pair", [False, True])
    assert chat(apart, apart.frontends[0], "pair").status == 200
    assert runner(apart, "pair") == ["frontend-1"]
    assert (apart.workers[0].models_dir / "pair" / "pair.mmproj").exists()
    assert len(reported(events, "load")) == 1


def test_a_companion_that_nobody_has_is_left_out(apart: Cluster) -> None:
    """No frontend has the companion: the model is loaded without it, with a warning (LOAD-13, LOAD-22)."""
    add_pair(apart, "alone", [False, False])
    assert chat(apart, apart.frontends[1], "alone").status == 200
    [name] = runner(apart, "alone")
    log = next(child for child in apart.frontends if child.name == name).log.read_text()
    assert "alone is loaded without alone.mmproj" in log


def test_no_frontend_has_every_shard(apart: Cluster) -> None:
    """No frontend has every shard: the backend's own words, and which are missing where (LOAD-19, LOAD-22)."""
    add_shards(apart, "torn", [{4}, {1, 2}])
    reply = chat(apart, apart.frontends[1], "torn", QUESTION)
    assert reply.status == 500, reply.text
    own_words, _, where = said(reply).partition(" (no frontend has every file of it: ")
    assert "torn on node worker-0" in own_words and SHARDS[4].name in own_words, said(reply)
    for frontend, lost in zip(apart.frontends, ({4}, {1, 2}), strict=True):
        names = ", ".join(f"torn/{SHARDS[index].name}" for index in sorted(lost))
        folder = models_of(apart, frontend)
        assert f"frontend {frontend.instance_id}: {names} not in its models folder" in where
        assert str(folder) not in where, "a client is told a folder"
        assert f"{names} not in this frontend's models folder {folder}" in frontend.log.read_text()
    assert runner(apart, "torn") == ["frontend-0"]  # which lacks less
    assert not rows(apart.database.url, "select 1 from node_models where model_name = 'torn'")
    lost = models_of(apart, apart.frontends[0]) / "torn" / SHARDS[4].name  # positive control
    shutil.copyfile(SHARDS[4], lost)
    assert chat(apart, apart.frontends[1], "torn", QUESTION).status == 200


def test_a_deleted_model_is_stopped(apart: Cluster) -> None:
    """A YAML deleted on one frontend: the replica serves on; on all of them: it is stopped, and only it (LOAD-22)."""
    events, others = (add_pair(apart, name, [True, True]) for name in ("deleted", "kept"))
    for name in ("deleted", "kept"):
        assert chat(apart, apart.frontends[0], name).status == 200
    first, second = apart.frontends
    (models_of(apart, first) / "deleted.yaml").unlink()
    said_so = "select 1 from node_models where model_name = 'deleted' and unserved ->> %s is not null"
    until("its word", lambda: rows(apart.database.url, said_so, first.instance_id), 30)
    assert chat(apart, first, "deleted").status == 404
    assert chat(apart, second, "deleted").status == 200
    (models_of(apart, second) / "deleted.yaml").unlink()
    until("its row gone", lambda: not replicas(apart, "deleted"), 40)
    [load] = reported(events, "load")
    assert [one["pid"] for one in reported(events, "sigterm")] == [load["pid"]]
    assert replicas(apart, "kept") and not reported(others, "sigterm")
    assert chat(apart, second, "kept").status == 200


def replicas(cluster: Cluster, name: str) -> list[tuple[object, ...]]:
    """The rows of a model's replicas, whatever their state."""
    return rows(cluster.database.url, "select node_id from node_models where model_name = %s", name)


def add_pair(cluster: Cluster, name: str, has_companion: list[bool]) -> Path:
    """A model with a companion on both frontends, the companion only where it is said; returns the events' file."""
    events = cluster.state.root / f"{name}.events"
    for frontend, has in zip(cluster.frontends, has_companion, strict=True):
        folder = models_of(cluster, frontend)
        (folder / f"{name}.bin").write_bytes(name.encode() * 100)
        if has:
            (folder / f"{name}.mmproj").write_bytes(b"eyes")
        text = f"name: {name}\nbackend: test-backend\nparameters:\n  model: {name}.bin\nmmproj: {name}.mmproj\n"
        (folder / f"{name}.yaml").write_text(f"{text}options: ['test:events={events}']\n")
        until(f"{name} served by {frontend.name}", lambda it=frontend: serves(cluster, it, name), 10)
    return events
