"""A cluster on wires that break, padded models that answer, and what a frontend logged of their staging."""

from __future__ import annotations

import hashlib
import itertools
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localai_dist.testing.child import Child
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Frontend, Worker
from localai_dist.testing.waiting import until
from localai_dist.testing.web import Reply, ask
from localai_dist.units import MiB
from tests.process.faults import FragileCluster
from tests.process.kit import open_folder, quick_plan, run_to_the_end
from tests.process.scripted import SERVED_WITHIN, admin, galleries, owners, serves

QUESTION = "What is the capital of Kenya?"
ANSWER = "The capital of Kenya is Nairobi."
PATIENT = {"LOCALAI_MODEL_LOAD_WAIT": "0", "LOCALAI_WORKER_RECONNECT_GRACE": "90s"}
"""Requests wait for the load; a worker cut often waits up to half a minute before it dials again."""

_names = itertools.count(1)


@contextmanager
def fragile(**more: Any) -> Iterator[FragileCluster]:
    """A started cluster on wires that break."""
    with open_folder("depth") as folder:
        (folder / "tmp").mkdir()
        spool = {"TMPDIR": str(folder / "tmp")}
        more["frontend_env"] = {**galleries(folder), **PATIENT, **spool, **more.get("frontend_env", {})}
        more["worker_env"] = {**spool, **more.get("worker_env", {})}
        with run_to_the_end(FragileCluster(quick_plan(folder / "state", models=["tiny-facts"], **more))) as cluster:
            yield cluster


def fresh(what: str) -> str:
    """A model's name nobody had."""
    return f"{what}-{next(_names)}"


def padded(source: Path, target: Path, size: int) -> str:
    """
    A copy of ``source`` filled up to ``size`` bytes, one page in each MiB salted; its SHA-256.

    llama.cpp ignores what follows the tensors; pages lost, doubled or in another order have another hash.
    """
    shutil.copyfile(source, target)
    with target.open("r+b") as file:
        for block in range(source.stat().st_size // MiB + 1, size // MiB):
            file.seek(block * MiB)
            file.write(salt(target.name, block) * 128)
        file.truncate(size)
    return sha256(target)


def salt(file: str, block: int) -> bytes:
    """What the first page of a MiB of a padded file repeats."""
    return hashlib.sha256(f"{file} {block}".encode()).digest()


def sha256(path: Path) -> str:
    """The file's hash."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def serve(cluster: Cluster, name: str, file: str, more: str = "") -> None:
    """Serve a file of the models folder as ``name`` by the engine."""
    text = f"name: {name}\nbackend: llama-cpp\ncontext_size: 256\nthreads: 1\nparameters:\n  model: {file}\n{more}"
    (cluster.state.models / f"{name}.yaml").write_text(text)
    for frontend in cluster.frontends:
        if frontend.is_alive():
            until(f"{name} served by {frontend.name}", lambda it=frontend: serves(cluster, it, name), SERVED_WITHIN)


def add(cluster: Cluster, name: str, size: int) -> str:
    """Serve a padded tiny-facts as ``name``, which is also its file's name; its SHA-256."""
    [source] = cluster.state.models.glob("tiny-facts-1m*.gguf")
    digest = padded(source, cluster.state.models / f"{name}.gguf", size)
    serve(cluster, name, f"{name}.gguf")
    return digest


def remote(worker: Worker, name: str, file: str = "") -> Path:
    """Where a worker keeps a model's file, or will."""
    return worker.models_dir / name / (file or f"{name}.gguf")


def holder(cluster: Cluster, worker: Worker) -> Frontend:
    """The frontend that holds a worker's tunnel, by the database."""
    names = {frontend.name: frontend for frontend in cluster.frontends}
    return until(f"an owner of {worker.name}", lambda: names.get(owners(cluster).get(worker.name, "")), 40)


def other(cluster: Cluster, frontend: Frontend) -> Frontend:
    """The other frontend."""
    return next(it for it in cluster.frontends if it is not frontend)


def ask_it(cluster: Cluster, frontend: Frontend, name: str, timeout: float = 60) -> Reply:
    """The question, as long as it takes."""
    body = {"model": name, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 32}
    url = frontend.url + "/v1/chat/completions"
    return ask(url, key=cluster.secrets.api_key, method="POST", body=body, timeout=timeout)


def answered(reply: Reply) -> None:
    """The model answered."""
    assert reply.status == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER


@contextmanager
def asking(cluster: Cluster, frontend: Frontend, name: str) -> Iterator[Future[Reply]]:
    """A question under way, in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(ask_it, cluster, frontend, name, 300)


def told(child: Child, name: str) -> list[tuple[str, int]]:
    """What a frontend logged of a file's staging: ("interrupted" or "goes on", at which byte)."""
    found = re.findall(rf"staging {name}\.gguf on node \S+ (interrupted|goes on) at (\d+) of", child.log.read_text())
    return [(what, int(at)) for what, at in found]


def resent(child: Child, name: str) -> list[int]:
    """For each interruption: how many bytes of what the transport had taken had to be sent again."""
    costs = []
    events = told(child, name)
    for (what, at), (then, offset) in itertools.pairwise(events):
        if (what, then) == ("interrupted", "goes on"):
            costs.append(at - offset)
    return costs


def unload(cluster: Cluster, name: str) -> None:
    """The model is loaded nowhere."""
    admin(cluster, "/backend/shutdown", "POST", {"model": name})
