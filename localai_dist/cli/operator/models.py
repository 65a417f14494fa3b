"""``localai-dist models``: what can be served, load it, unload it."""

from __future__ import annotations

import time
from typing import Any

import click

from localai_dist.cli.operator import show
from localai_dist.cli.operator.api import Api, StillLoading, part
from localai_dist.cli.operator.context import Asked, pass_asked
from localai_dist.cli.operator.nodes import find
from localai_dist.units import format_duration, format_size

_LOAD_REPLY = 24 * 3600.0
"""A frontend answers a load when it is done or when its own wait is over, so the socket's wait has no shorter end."""


@click.group()
def models() -> None:
    """The models of the cluster."""


@models.command("ls")
@pass_asked
def list_models(asked: Asked) -> None:
    """List the models that can be asked for, and where they are loaded."""
    answer = asked.api.get("/v1/models")
    if asked.as_json:
        show.json_text(answer)
        return
    places = _places(asked.api)
    names = sorted({str(model.get("id")) for model in (answer or {}).get("data", [])} | set(places))
    rows = [[name, "loaded" if name in places else "-", ", ".join(places.get(name, [])) or "-"] for name in names]
    show.table(["model", "state", "on"], rows, empty="no models: put a file and its YAML into the models folder")


def _places(api: Api) -> dict[str, list[str]]:
    """Model name -> the nodes it is loaded on."""
    names = {node.get("id"): str(node.get("name")) for node in api.get("/api/nodes") or []}
    places: dict[str, list[str]] = {}
    for replica in api.get("/api/nodes/models") or []:
        node = names.get(replica.get("node_id"), str(replica.get("node_id")))
        places.setdefault(str(replica.get("model_name")), []).append(node)
    return places


@models.command()
@click.argument("model")
@click.option("--wait/--no-wait", default=True, help="Wait until it is loaded (default), or only start the load.")
@pass_asked
def load(asked: Asked, model: str, wait: bool) -> None:
    """Load MODEL onto a node; says how far it is."""
    while True:
        try:
            answer = asked.api.call("POST", "/backend/load", {"model": model}, timeout=_LOAD_REPLY)
        except StillLoading as going_on:
            click.echo(progress_line(model, going_on.loading), err=wait)
            if not wait:
                return
            time.sleep(min(going_on.retry_after, 5.0))
            continue
        if asked.as_json:
            show.json_text(answer)
        else:
            click.echo(f"{model} is loaded")
        return


def progress_line(model: str, loading: dict[str, Any]) -> str:
    """One line about a load that goes on."""
    parts = [f"{model}: {loading.get('state', 'loading')}"]
    if loading.get("node"):
        parts.append(f"on {loading['node']}")
    total = loading.get("total_bytes")
    if isinstance(total, int) and total > 0:
        parts.append(f"{format_size(int(loading.get('bytes_sent') or 0))} of {format_size(total)}")
    eta = loading.get("eta_seconds")
    if isinstance(eta, int | float):
        parts.append(f"about {format_duration(max(1.0, float(eta)))} left")
    return ", ".join(parts)


@models.command()
@click.argument("model")
@click.option("--node", help="Only from this node (name or id); default: from everywhere.")
@pass_asked
def unload(asked: Asked, model: str, node: str | None) -> None:
    """Unload MODEL; done only when its process is really gone."""
    if node is None:
        answer = asked.api.call("POST", "/backend/shutdown", {"model": model}, timeout=300.0)
    else:
        found = find(asked.api, node)
        path = f"/api/nodes/{part(found['id'])}/models/unload"
        answer = asked.api.call("POST", path, {"model_name": model}, timeout=300.0)
    if asked.as_json:
        show.json_text(answer)
    else:
        click.echo(f"{model} is unloaded" + (f" from {node}" if node else ""))
