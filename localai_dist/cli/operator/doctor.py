"""``localai-dist doctor``: ask everything that can be asked and say what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from localai_dist.cli.operator import show
from localai_dist.cli.operator.api import Api, ApiFailure, model_problems
from localai_dist.cli.operator.context import Asked, pass_asked
from localai_dist.ids import approval_of


@dataclass(frozen=True, slots=True)
class Finding:
    """
    The result of one check.

    Attributes:
        ok: whether all is well.
        what: the thing looked at.
        text: what was found and, if it is not well, what to do.
    """

    ok: bool
    what: str
    text: str


@click.command()
@pass_asked
@click.pass_context
def doctor(context: click.Context, asked: Asked) -> None:
    """Check a frontend and its nodes; exit code 1 when something is wrong."""
    findings = list(examine(asked.api))
    if asked.as_json:
        show.json_text([{"ok": it.ok, "what": it.what, "text": it.text} for it in findings])
    else:
        rows = [["ok" if it.ok else "failed", it.what, it.text] for it in findings]
        show.table(["result", "what", "found"], rows, empty="nothing to check")
    if not all(it.ok for it in findings):
        context.exit(1)


def examine(api: Api) -> Iterator[Finding]:
    """Check after check; a check that can't be made is a finding too."""
    try:
        api.ask("GET", "/healthz")
    except ApiFailure as failure:
        yield Finding(False, "frontend", f"{failure}; check LOCALAI_SERVER and that the frontend runs")
        return
    yield Finding(True, "frontend", f"{api.server} answers")
    yield _readiness(api)
    try:
        listed: list[dict[str, Any]] = api.get("/api/nodes") or []
    except ApiFailure as failure:
        yield Finding(False, "nodes", str(failure))
        return
    if not listed:
        yield Finding(False, "nodes", "none: start a worker with LOCALAI_REGISTER_TO set to this frontend")
    for node in listed:
        yield node_finding(node)
    for problem in model_problems(api):
        served = bool(problem.get("served"))
        found = f"{'served, but' if served else 'not served:'} {problem.get('reason')}"
        yield Finding(served, f"model file {problem.get('file')}", found)


def _readiness(api: Api) -> Finding:
    answer = api.ask("GET", "/readyz")
    body = answer.json()
    checks = body.get("checks") if isinstance(body, dict) else None
    bad = [
        f"{name}: {check.get('reason') or 'not ok'}"
        for name, check in (checks or {}).items()
        if isinstance(check, dict) and not check.get("ok")
    ]
    said = str(body.get("status")) if isinstance(body, dict) else str(answer.status)
    return Finding(answer.status == 200 and not bad, "readiness", "; ".join([said, *bad]))


def node_finding(node: dict[str, Any]) -> Finding:
    """What one node's entry says, with the remedy."""
    name = f"node {node.get('name')}"
    status, tunnel = str(node.get("status")), str((node.get("tunnel") or {}).get("state") or "")
    if status == "pending" or not node.get("approved", True):
        waits = f"waits for approval: {approval_of(str(node.get('name')))}"
        return Finding(False, name, "; ".join(filter(None, (waits, node.get("newcomer")))))
    if node.get("newcomer_waiting"):
        told = node.get("newcomer") or "another worker registered under its name and waits"
        return Finding(False, name, f"{told}; if it is to take over: {approval_of(str(node.get('name')))}")
    if node.get("left_at") and status == "offline":
        return Finding(True, name, "left on purpose: its worker was stopped")
    remedies = {
        "reconnecting": "its tunnel was lost a moment ago; it is expected back by itself",
        "departed": "its tunnel is lost for longer than the grace: check that its worker runs and reaches a frontend",
        "never_dialled": "it registered and never opened a tunnel: see its worker's log",
        "registry_unavailable": "the database did not answer, so its tunnel is not known",
    }
    if tunnel in remedies:
        return Finding(False, name, f"{status}, tunnel {tunnel}: {remedies[tunnel]}")
    if status in ("offline", "unhealthy"):
        return Finding(False, name, f"{status}: no heartbeat; check that its worker runs")
    return Finding(True, name, f"{status}, tunnel {tunnel or 'unknown'}")
