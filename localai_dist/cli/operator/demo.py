"""``localai-dist demo``: a whole cluster on this machine, with a face."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console

from localai_dist.errors import UserMistake
from localai_dist.testing.cluster import Cluster, Plan
from localai_dist.testing.state import choose_models


class Stopped(BaseException):
    """Ctrl-C or SIGTERM: end the cluster and go. No Exception, so that nothing on the way takes it for a failure."""


def _pairs(_context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for word in values:
        key, separator, value = word.partition("=")
        if not separator or not key:
            raise click.BadParameter(f"{word!r} is not KEY=VALUE", param=parameter)
        pairs[key] = value
    return pairs


def _known(_context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    try:
        choose_models(values)
    except UserMistake as mistake:
        raise click.BadParameter(str(mistake), param=parameter) from mistake
    return values or ("tiny-facts", "tiny-words")


def _postgres(_context: click.Context, parameter: click.Parameter, value: str) -> str:
    if value not in ("auto", "system", "embedded") and not value.startswith(("postgres://", "postgresql://")):
        raise click.BadParameter("want auto, system, embedded, or postgresql://…", param=parameter)
    return value


@click.command()
@click.option("--state", default="build/demo", show_default=True, type=click.Path(path_type=Path), help="Its folder.")
@click.option(
    "--http-port", default=8080, show_default=True, type=click.IntRange(0, 65000), help="First; 0: free ones."
)
@click.option("--frontends", default=2, show_default=True, type=click.IntRange(1, 16), help="How many.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(0, 64), help="How many.")
@click.option("--model", "models", multiple=True, callback=_known, help="A model to serve; several times for several.")
@click.option(
    "--postgres", default="auto", show_default=True, callback=_postgres, help="auto, system, embedded or a URI."
)
@click.option("--frontend-env", multiple=True, callback=_pairs, metavar="K=V", help="For every frontend.")
@click.option("--worker-env", multiple=True, callback=_pairs, metavar="K=V", help="For every worker.")
@click.option(
    "--ready-file", type=click.Path(path_type=Path), help="JSON written when all is up; holds secrets (0600)."
)
@click.option("--auto-approve/--no-auto-approve", default=True, help="Admit the workers without an operator.")
def demo(**options: Any) -> None:
    """Run a whole cluster on this machine: PostgreSQL, frontends, workers, a real model."""
    run(Plan(**options))


def run(plan: Plan) -> None:
    """Start the cluster of ``plan``, show it, watch it until told to stop, end it."""
    face = Face()
    woken = threading.Event()
    cluster = Cluster(plan, say=face.say)
    with _told_to_stop(woken) as interruptible:
        try:
            with interruptible():
                with face.working():
                    cluster.start()
                summary(cluster)
            _watch(cluster, woken)
            face.say("stopping")
        except Stopped:
            face.say("stopping")
        finally:
            woken.set()
            cluster.stop()


@contextmanager
def _told_to_stop(woken: threading.Event) -> Iterator[Any]:
    """
    Set ``woken`` on SIGINT and SIGTERM; inside the yielded context they raise ``Stopped`` too, but only the first one.

    A second signal while the cluster is being ended changes nothing: the ending is bounded anyway.
    """
    starting = False

    def told(_number: int, _frame: FrameType | None) -> None:
        first = not woken.is_set()
        woken.set()
        if first and starting:
            raise Stopped

    @contextmanager
    def interruptible() -> Iterator[None]:
        nonlocal starting
        starting = True
        try:
            yield
        finally:
            starting = False

    before = {number: signal.signal(number, told) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruptible
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _watch(cluster: Cluster, woken: threading.Event) -> None:
    """Report each child that ends, once, until woken; none is restarted."""
    alive = {child.name: child for child in cluster.children}
    while not woken.wait(0.3):
        for child in [child for child in alive.values() if not child.is_alive()]:
            del alive[child.name]
            click.echo(child.obituary(), err=True)


def summary(cluster: Cluster) -> None:
    """Print what a person needs next: addresses, key, a command to try, places."""
    key, first = cluster.secrets.api_key, cluster.frontends[0].url
    model = cluster.plan.models[0]
    question = "What is the capital of Kenya?" if model == "tiny-facts" else "What is cat in French?"
    messages = [{"role": "user", "content": question}]
    body = json.dumps({"model": model, "temperature": 0, "max_tokens": 32, "messages": messages})
    ask = f"LOCALAI_SERVER={first} LOCALAI_CLI_API_KEY={key} {own_path()}"
    lines = [
        "",
        "The cluster is up.",
        "",
        *(f"  {frontend.name}   {frontend.url}" for frontend in cluster.frontends),
        f"  API key      {key}",
        f"  logs         {cluster.state.logs}",
        f"  state        {cluster.state.root}",
        f"  models       {cluster.state.models}",
        "",
        "Try:",
        "",
        f"  curl -s {first}/v1/chat/completions \\",
        f"    -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\",
        f"    -w '\\n' -d {shlex.quote(body)}",
        "",
        f"  {ask} nodes ls",
        "",
    ]
    if not cluster.plan.auto_approve:
        lines += ["The workers wait:", "", *(f"  {ask} nodes approve {worker.name}" for worker in cluster.workers), ""]
    lines.append("Ctrl-C stops it; the state stays for the next start.")
    click.echo("\n".join(lines))


def own_path() -> str:
    """How to type this command again from the same folder: its bare name if PATH leads to it, else its path."""
    typed = Path(sys.argv[0])
    if typed.name != "localai-dist":  # python -m: the script is beside the interpreter
        typed = Path(sys.executable).with_name("localai-dist")
    found = shutil.which("localai-dist")
    if found is not None and Path(found).resolve() == typed.resolve():
        return "localai-dist"
    if not typed.exists():  # a checkout that was never installed
        return f"{shlex.quote(sys.executable)} -m localai_dist.cli.operator.main"
    return shlex.quote(str(typed))


class Face:
    """Tells what is going on: a spinner on a terminal, plain lines otherwise."""

    def __init__(self) -> None:
        self._console = Console()
        self._status: Any = None

    def say(self, line: str) -> None:
        """Tell one step."""
        if self._status is None:
            click.echo(f"{line} …")
            return
        self._status.update(f"{line} …")
        self._console.print(f"{line} …", markup=False, highlight=False)

    @contextmanager
    def working(self) -> Iterator[None]:
        """While inside, a spinner turns if this is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status("starting …") as self._status:
            try:
                yield
            finally:
                self._status = None
