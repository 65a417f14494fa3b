"""``localai-dist ops``: what the cluster is working on."""

from __future__ import annotations

import time
from typing import Any

import click

from localai_dist.cli.operator import progress, show
from localai_dist.cli.operator.api import Api, part
from localai_dist.cli.operator.context import Asked, pass_asked

WATCH_EVERY = 0.5
"""Between two looks of ``ops ls --watch`` (s)."""


@click.group()
def ops() -> None:
    """Running operations: installs, staging, loads."""


@ops.command("ls")
@click.option("--watch", "-w", is_flag=True, help="Go on showing them, with a bar each, until nothing is going on.")
@pass_asked
def list_operations(asked: Asked, watch: bool) -> None:
    """List what is being installed, staged or loaded."""
    if watch:
        _watch(asked.api)
        return
    answer = asked.api.get("/api/operations")
    if asked.as_json:
        show.json_text(answer)
        return
    rows = [
        [
            str(operation.get("name") or operation.get("id")),
            str(operation.get("taskType", "")),
            progress.phase_of(operation),
            f"{operation.get('progress', 0):g}%",
            str(operation.get("nodeName") or "-"),
            _file(operation),
            progress.amount_of(operation) or "-",
            progress.rate_of(operation) or "-",
            progress.left_of(operation) or "-",
            str(operation.get("error") or operation.get("message") or "-"),
        ]
        for operation in listed(answer)
    ]
    columns = ["name", "what", "phase", "done", "node", "file", "bytes", "rate", "left", "message"]
    show.table(columns, rows, empty="nothing is going on")


@ops.command("cancel")
@click.argument("operation")
@pass_asked
def cancel(asked: Asked, operation: str) -> None:
    """Cancel OPERATION: its id (staging:MODEL), or the name of the model that is being loaded."""
    job = operation if ":" in operation else f"staging:{operation}"
    answer = asked.api.call("POST", f"/api/operations/{part(job)}/cancel")
    if asked.as_json:
        show.json_text(answer)
    else:
        click.echo(str((answer or {}).get("message") or f"{job} is being cancelled"))


def listed(answer: Any) -> list[dict[str, Any]]:
    """The operations of an answer of ``GET /api/operations``."""
    found: list[dict[str, Any]] = (answer or {}).get("operations") or []
    return found


def _watch(api: Api) -> None:
    with progress.view(err=False) as drawn:
        while operations := listed(api.get("/api/operations")):
            drawn.show(operations)
            time.sleep(WATCH_EVERY)
    click.echo("nothing is going on")


def _file(operation: dict[str, Any]) -> str:
    total = operation.get("totalFiles")
    return f"{operation.get('fileIndex', 0)}/{total}" if isinstance(total, int) and total > 0 else "-"
