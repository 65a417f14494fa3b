"""``localai-dist ops``: what the cluster is working on."""

from __future__ import annotations

from typing import Any

import click

from localai_dist.cli.operator import show
from localai_dist.cli.operator.context import Asked, pass_asked
from localai_dist.units import format_size


@click.group()
def ops() -> None:
    """Running operations: installs, staging, loads."""


@ops.command("ls")
@pass_asked
def list_operations(asked: Asked) -> None:
    """List what is being installed, staged or loaded."""
    answer = asked.api.get("/api/operations")
    if asked.as_json:
        show.json_text(answer)
        return
    listed: list[dict[str, Any]] = (answer or {}).get("operations") or []
    rows = [
        [
            str(operation.get("name") or operation.get("id")),
            str(operation.get("taskType", "")),
            str(operation.get("phase") or ("queued" if operation.get("isQueued") else "-")),
            f"{operation.get('progress', 0):g}%",
            str(operation.get("nodeName") or "-"),
            _bytes(operation),
            str(operation.get("error") or operation.get("message") or "-"),
        ]
        for operation in listed
    ]
    columns = ["name", "what", "phase", "done", "node", "bytes", "message"]
    show.table(columns, rows, empty="nothing is going on")


def _bytes(operation: dict[str, Any]) -> str:
    total = operation.get("totalBytes")
    if not isinstance(total, int) or total <= 0:
        return "-"
    return f"{format_size(int(operation.get('currentBytes') or 0))} of {format_size(total)}"
