"""``localai-dist models``: what can be served, load it, unload it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import click

from localai_dist.cli.operator import progress, show
from localai_dist.cli.operator.api import Api, ApiFailure, StillLoading, model_problems, part
from localai_dist.cli.operator.context import Asked, pass_asked
from localai_dist.cli.operator.nodes import find
from localai_dist.cli.operator.ops import listed

_LOAD_REPLY = 24 * 3600.0
"""A frontend answers a load when it is done or when its own wait is over, so the socket's wait has no shorter end."""

SHOW_EVERY = 0.5
"""Between two looks at a running load (s)."""

START_WAIT = 1.0
"""How long ``--no-wait`` waits for the load to be refused at once (s)."""


@click.group()
def models() -> None:
    """The models of the cluster."""


@models.command("ls")
@pass_asked
def list_models(asked: Asked) -> None:
    """List the models that can be asked for, and where they are loaded; and model files that are broken."""
    answer = asked.api.get("/v1/models")
    if asked.as_json:
        show.json_text(answer)
        return
    places = _places(asked.api)
    names = sorted({str(model.get("id")) for model in (answer or {}).get("data", [])} | set(places))
    rows = [[name, "loaded" if name in places else "-", ", ".join(places.get(name, [])) or "-"] for name in names]
    wrong = [one for one in model_problems(asked.api) if not one.get("served")]
    rows += [[str(one.get("model") or "-"), "broken", f"{one.get('file')}: {one.get('reason')}"] for one in wrong]
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
    """Load MODEL onto a node; shows how far it is. Ctrl-C ends the showing, not the load."""
    if not wait:
        _start(asked, model)
        return
    with progress.view() as drawn:
        answer = _load(asked.api, model, drawn)
    if asked.as_json:
        show.json_text(answer)
    else:
        click.echo(f"{model} is loaded")


def _start(asked: Asked, model: str) -> None:
    """Begin the load and say where it stands a moment later."""
    asking = Asking(lambda: asked.api.call("POST", "/backend/load", {"model": model}, timeout=_LOAD_REPLY))
    if not asking.wait(START_WAIT):
        known = running(asked.api, model)
        click.echo(progress.line(known) if known is not None else f"{model}: loading")
        return
    try:
        answer = asking.result()
    except StillLoading as going_on:
        click.echo(progress_line(model, going_on.loading))
        return
    if asked.as_json:
        show.json_text(answer)
    else:
        click.echo(f"{model} is loaded")


def _load(api: Api, model: str, drawn: progress.View) -> Any:
    """Ask until it is loaded: a frontend answers 503 when its own wait is over, the load goes on."""
    while True:
        asking = Asking(lambda: api.call("POST", "/backend/load", {"model": model}, timeout=_LOAD_REPLY))
        while not asking.wait(SHOW_EVERY):
            known = running(api, model)
            drawn.show([] if known is None else [known])
        try:
            return asking.result()
        except StillLoading as going_on:
            drawn.show([operation_of(model, going_on.loading)])
            time.sleep(min(going_on.retry_after, 5.0))


def running(api: Api, model: str) -> dict[str, Any] | None:
    """The model's load among the running operations; None when it is not there, or nobody says."""
    try:
        answer = api.get("/api/operations")
    except ApiFailure:
        return None
    return next((one for one in listed(answer) if one.get("id") == f"staging:{model}"), None)


def operation_of(model: str, loading: dict[str, Any]) -> dict[str, Any]:
    """A ``loading`` object in the words of an operation."""
    return {
        "id": f"staging:{model}",
        "name": model,
        "state": loading.get("state", "loading"),
        "phase": "",
        "nodeName": loading.get("node"),
        "currentBytes": loading.get("bytes_sent"),
        "totalBytes": loading.get("total_bytes"),
        "fileIndex": loading.get("file_index"),
        "totalFiles": loading.get("total_files"),
        "etaSeconds": loading.get("eta_seconds"),
        "etaRange": loading.get("eta_range"),
        "waits": loading.get("waits"),
    }


class Asking:
    """One question that may take long, in a thread of its own, so that progress can be shown meanwhile."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._answer: Any = None
        self._problem: ApiFailure | None = None
        self._over = threading.Event()
        threading.Thread(target=self._run, args=(ask,), daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether the answer is here, waiting at most so long."""
        return self._over.wait(seconds)

    def result(self) -> Any:
        """The answer; raises what the question raised."""
        if self._problem is not None:
            raise self._problem
        return self._answer

    def _run(self, ask: Callable[[], Any]) -> None:
        try:
            self._answer = ask()
        except ApiFailure as problem:
            self._problem = problem
        finally:
            self._over.set()


def progress_line(model: str, loading: dict[str, Any]) -> str:
    """One line about a load that goes on."""
    return progress.line(operation_of(model, loading))


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
