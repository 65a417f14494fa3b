"""Running operations as they go on: a live bar each on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from localai_dist.units import format_duration, format_size

LINE_EVERY = 5.0
"""Without a terminal an operation gets a new line at most this often (s)."""


class View(Protocol):
    """What shows running operations; a context manager."""

    def __enter__(self) -> View: ...
    def __exit__(self, *error: object) -> None:
        """Stop drawing."""

    def show(self, operations: Sequence[dict[str, Any]]) -> None:
        """Show how far they are now; one that is not among them any more is over."""


def view(console: Console | None = None, *, err: bool = True) -> View:
    """Bars on a terminal, else lines on stderr (``err``) or stdout."""
    drawn = console or Console(stderr=err)
    return Bars(drawn) if drawn.is_terminal else Lines(lambda line: click.echo(line, err=err))


class Lines:
    """A line per operation when it moved on, not too often."""

    def __init__(self, say: Callable[[str], None], *, now: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._now = now
        self._said: dict[str, tuple[str, float]] = {}

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to stop."""

    def show(self, operations: Sequence[dict[str, Any]]) -> None:
        """Say what changed."""
        for operation in operations:
            name, text = str(operation.get("id")), line(operation)
            phase = (
                f"{operation.get('state')} {operation.get('phase')} {operation.get('error')} {operation.get('waits')}"
            )
            said, at = self._said.get(name, ("", 0.0))
            if not said or phase != said or self._now() - at >= LINE_EVERY:
                self._said[name] = (phase, self._now())
                self._say(text)


class Bars:
    """A live bar per operation."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.fields[name]}"),
            TextColumn("{task.fields[phase]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[more]}"),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()

    def show(self, operations: Sequence[dict[str, Any]]) -> None:
        """Draw them."""
        names = {str(operation.get("id")) for operation in operations}
        for gone in set(self._tasks) - names:
            self._progress.remove_task(self._tasks.pop(gone))
        for operation in operations:
            self._draw(str(operation.get("id")), operation)

    def _draw(self, name: str, operation: dict[str, Any]) -> None:
        total = operation.get("totalBytes") or None
        seen: dict[str, Any] = {
            "name": str(operation.get("name") or name),
            "phase": phase_of(operation),
            "more": "  ".join(details(operation)),
        }
        done = int(operation.get("currentBytes") or 0)
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task("", total=total, completed=done, **seen)
        else:
            self._progress.update(self._tasks[name], total=total, completed=done, **seen)


def phase_of(operation: dict[str, Any]) -> str:
    """What it is doing: its phase, or its state where that says more."""
    state, phase = str(operation.get("state") or ""), str(operation.get("phase") or "")
    if operation.get("cancelled"):
        return "cancelling"
    if state and (not phase or (phase == "waiting" and state != "staging")):
        return state
    return phase or ("queued" if operation.get("isQueued") else "-")


def details(operation: dict[str, Any]) -> list[str]:
    """Node, file, bytes, rate, what is left and what is waited for, as far as they are known."""
    parts = [f"on {operation['nodeName']}"] if operation.get("nodeName") else []
    files = operation.get("totalFiles")
    if isinstance(files, int) and files > 1 and operation.get("fileIndex"):
        parts.append(f"file {operation['fileIndex']} of {files}")
    if amount := amount_of(operation):
        parts.append(amount)
    if rate := rate_of(operation):
        parts.append(rate)
    if left := left_of(operation):
        parts.append(left)
    if waits := operation.get("waits"):
        parts.append(f"waits: {waits}")
    return parts


def amount_of(operation: dict[str, Any]) -> str:
    """``1.0 MiB of 4.0 MiB``; empty while the total is not known."""
    total = operation.get("totalBytes")
    if not isinstance(total, int) or total <= 0:
        return ""
    return f"{format_size(int(operation.get('currentBytes') or 0))} of {format_size(total)}"


def rate_of(operation: dict[str, Any]) -> str:
    """``12.0 MiB/s``; empty while nothing was measured."""
    rate = operation.get("bytesPerSecond")
    return f"{format_size(int(rate))}/s" if isinstance(rate, int | float) and rate > 0 else ""


def left_of(operation: dict[str, Any]) -> str:
    """How long it takes, as far as it was measured."""
    span = operation.get("etaRange")
    if isinstance(span, list) and len(span) == 2:
        low, high = (format_duration(max(1.0, float(end))) for end in span)
        return f"{low} left" if low == high else f"{low} to {high} left"
    eta = operation.get("etaSeconds")
    return f"about {format_duration(max(1.0, float(eta)))} left" if isinstance(eta, int | float) else ""


def line(operation: dict[str, Any]) -> str:
    """One operation as one line."""
    parts = [f"{operation.get('name') or operation.get('id')}: {phase_of(operation)}", *details(operation)]
    if operation.get("error"):
        parts.append(str(operation["error"]))
    return ", ".join(parts)
