"""Models served by the scriptable test backend, and what its processes report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai

from localai_dist.testing.backend import write_gallery
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Frontend
from localai_dist.testing.waiting import until
from localai_dist.testing.web import Reply, ask
from localai_dist.worker.install import BOXED_INDEX

SERVED_WITHIN = 10.0
"""A model file dropped into the models folder is served within this (s); the promise is five."""


def galleries(folder: Path) -> dict[str, str]:
    """The frontends' environment with the box's gallery and one with the scriptable backend in ``folder``."""
    named = [
        {"name": "box", "url": str(BOXED_INDEX)},
        {"name": "test", "url": str(write_gallery(folder / "gallery"))},
    ]
    return {"LOCALAI_BACKEND_GALLERIES": json.dumps(named)}


def add_model(cluster: Cluster, name: str, *options: str) -> Path:
    """
    Serve a model ``name`` by the scriptable backend; returns the file its processes report to.

    The YAML lands in the models folder of the running cluster; every frontend serves it before this returns.
    """
    events = write_model(cluster.state.root, name, *options)
    for frontend in cluster.frontends:
        until(f"{name} served by {frontend.name}", lambda it=frontend: serves(cluster, it, name), SERVED_WITHIN)
    return events


def write_model(state: Path, name: str, *options: str) -> Path:
    """The same in a state folder, whose cluster may run or not; returns the file its processes report to."""
    events, models = state / f"{name}.events", state / "models"
    (models / f"{name}.bin").write_bytes(name.encode() * 100)
    lines = "\n".join(f"  - {option}" for option in [*options, f"test:events={events}"])
    text = f"name: {name}\nbackend: test-backend\nparameters:\n  model: {name}.bin\noptions:\n{lines}\n"
    (models / f"{name}.yaml").write_text(text)
    return events


def gate_of(cluster: Cluster, name: str) -> Path:
    """The file that lets a model's load go on once it is there, if option ``test:load_gate`` names it."""
    return cluster.state.root / f"{name}.gate"


def serves(cluster: Cluster, frontend: Frontend, name: str) -> bool:
    """Whether ``GET /v1/models`` of a frontend lists ``name``."""
    listed = ask(frontend.url + "/v1/models", key=cluster.secrets.api_key).json() or {}
    return name in [model["id"] for model in listed.get("data", [])]


def reported(events: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind that the backend's processes reported so far."""
    if not events.exists():
        return []
    lines = events.read_text().split("\n")[:-1]  # what follows the last newline is still being written
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def client(cluster: Cluster, frontend: Frontend, **more: Any) -> openai.OpenAI:
    """The official client, without retries: what a test sees is what the frontend answered."""
    return openai.OpenAI(
        base_url=frontend.url + "/v1", api_key=cluster.secrets.api_key, max_retries=0, **{"timeout": 60, **more}
    )


def chat(cluster: Cluster, frontend: Frontend, model: str, question: str = "Hello?", **more: Any) -> Reply:
    """One chat request, its reply as it came."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 32,
        **more,
    }
    return ask(frontend.url + "/v1/chat/completions", key=cluster.secrets.api_key, method="POST", body=body, timeout=60)


def admin(cluster: Cluster, path: str, method: str = "GET", body: Any = None, frontend: int = 0) -> Any:
    """The JSON of one admin request that must succeed."""
    reply = ask(
        cluster.frontends[frontend].url + path, key=cluster.secrets.api_key, method=method, body=body, timeout=60
    )
    assert 200 <= reply.status < 300, f"{method} {path}: {reply.status} {reply.text}"
    return reply.json()


def pin(cluster: Cluster, model: str, worker: int) -> None:
    """Let ``model`` be placed on one worker only."""
    node = cluster.workers[worker].node_id
    admin(cluster, f"/api/nodes/{node}/labels", "PATCH", {f"for-{model}": "yes"})
    admin(cluster, "/api/nodes/scheduling", "POST", {"model_name": model, "node_selector": {f"for-{model}": "yes"}})


def owners(cluster: Cluster) -> dict[str, str]:
    """Node name -> name of the frontend whose instance holds its tunnel, as the database has it."""
    from tests.process.kit import rows

    by_instance = {frontend.instance_id: frontend.name for frontend in cluster.frontends}
    found = rows(
        cluster.database.url,
        "select n.name, c.owner_instance_id from backend_nodes n join node_connections c on c.node_id = n.id",
    )
    return {name: by_instance.get(owner, owner) for name, owner in found}
