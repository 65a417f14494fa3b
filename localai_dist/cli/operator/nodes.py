"""``localai-dist nodes``: see, approve, drain, resume and remove nodes."""

from __future__ import annotations

import datetime
from typing import Any

import click

from localai_dist.cli.operator import show
from localai_dist.cli.operator.api import Api, NotFound, part
from localai_dist.cli.operator.context import Asked, pass_asked


@click.group()
def nodes() -> None:
    """The workers and agent workers of the cluster."""


@nodes.command("ls")
@pass_asked
def list_nodes(asked: Asked) -> None:
    """List the nodes: which is up, which waits for approval, which is lost."""
    answer = asked.api.get("/api/nodes")
    if asked.as_json:
        show.json_text(answer)
        return
    now = datetime.datetime.now(datetime.UTC)
    rows = [
        [
            str(node.get("name", "")),
            str(node.get("node_type", "")),
            status_of(node),
            tunnel_of(node),
            show.age(node.get("last_heartbeat"), now),
            str(node.get("model_count", 0)),
            str(node.get("in_flight_count", 0)),
            show.amount(node, "available_vram", "total_vram"),
        ]
        for node in answer or []
    ]
    columns = ["name", "type", "status", "tunnel", "heartbeat", "models", "in flight", "vram free"]
    show.table(columns, rows, empty="no nodes: start a worker with LOCALAI_REGISTER_TO set to this frontend")
    for node in answer or []:
        if node.get("newcomer"):
            click.echo(f"\n{node.get('name')}: {node['newcomer']}")


@nodes.command("show")
@click.argument("node")
@pass_asked
def show_node(asked: Asked, node: str) -> None:
    """Show one node (by NAME or id) and the models on it."""
    found = find(asked.api, node)
    if asked.as_json:
        show.json_text(asked.api.get(f"/api/nodes/{part(found['id'])}"))
        return
    now = datetime.datetime.now(datetime.UTC)
    labels = found.get("labels") or {}
    show.fields(
        [
            ("name", str(found.get("name"))),
            ("id", str(found.get("id"))),
            ("type", str(found.get("node_type"))),
            ("status", status_of(found)),
            ("tunnel", tunnel_of(found)),
            ("heartbeat", show.age(found.get("last_heartbeat"), now)),
            ("registered from", str(found.get("registered_from") or "-")),
            *([("newcomer", str(found["newcomer"]))] if found.get("newcomer") else []),
            ("vram free", show.amount(found, "available_vram", "total_vram")),
            ("ram free", show.amount(found, "available_ram", "total_ram")),
            ("disk free", show.amount(found, "available_disk", "total_disk")),
            ("labels", ", ".join(f"{key}={value}" for key, value in sorted(labels.items())) or "-"),
        ]
    )
    models = asked.api.get(f"/api/nodes/{part(found['id'])}/models") or []
    rows = [
        [
            f"{model.get('model_name')}#{model.get('replica_index', 0)}",
            str(model.get("state")),
            str(model.get("in_flight", 0)),
            show.age(model.get("last_used"), now),
        ]
        for model in models
    ]
    show.table(["model", "state", "in flight", "last used"], rows, empty="no models on it")


def _act(asked: Asked, node: str, method: str, verb: str, done: str) -> None:
    found = find(asked.api, node)
    answer = asked.api.call(method, f"/api/nodes/{part(found['id'])}{verb}")
    if asked.as_json:
        show.json_text(answer)
    else:
        notice = answer.get("notice") if isinstance(answer, dict) else None
        click.echo(f"{found['name']} {done}")
        if notice:
            click.echo(f"{found['name']}: {notice}")


@nodes.command()
@click.argument("node")
@pass_asked
def approve(asked: Asked, node: str) -> None:
    """Admit a pending node (by NAME or id), or replace a node by the newcomer that waits under its name."""
    _act(asked, node, "POST", "/approve", "approved")


@nodes.command()
@click.argument("node")
@pass_asked
def drain(asked: Asked, node: str) -> None:
    """Give a node (by NAME or id) no new work."""
    _act(asked, node, "POST", "/drain", "is draining")


@nodes.command()
@click.argument("node")
@pass_asked
def resume(asked: Asked, node: str) -> None:
    """Give a drained node (by NAME or id) work again."""
    _act(asked, node, "POST", "/resume", "resumed")


@nodes.command()
@click.argument("node")
@pass_asked
def rm(asked: Asked, node: str) -> None:
    """Remove a node (by NAME or id); its worker must be approved anew to come back."""
    _act(asked, node, "DELETE", "", "removed")


def find(api: Api, node: str) -> dict[str, Any]:
    """
    The node with the id ``node``, or called that: an id is nobody's choice, and a name may look like another's id.

    Raises:
        NotFound: there is none.
    """
    listed: list[dict[str, Any]] = api.get("/api/nodes") or []
    for key in ("id", "name"):
        for found in listed:
            if found.get(key) == node:
                return found
    names = ", ".join(sorted(str(found.get("name")) for found in listed)) or "none at all"
    raise NotFound(f"no node {node!r}; the cluster has: {names}")


def status_of(node: dict[str, Any]) -> str:
    """A node's status, and what waits for an operator there."""
    status = str(node.get("status", ""))
    if node.get("newcomer_waiting"):
        return f"{status} (a newcomer of this name waits)"
    return status if node.get("approved", True) or status == "pending" else f"{status} (not approved)"


def tunnel_of(node: dict[str, Any]) -> str:
    """The state of a node's tunnel and the frontend that holds it."""
    tunnel = node.get("tunnel") or {}
    state, owner = str(tunnel.get("state") or "-"), tunnel.get("owner")
    return f"{state} at {owner}" if owner else state
