"""What the operator sees: a table, or the API's own JSON; times as ages, sizes with units."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from localai_dist.units import format_duration, format_size

_COLOURS = {
    "healthy": "green",
    "connected": "green",
    "ready": "green",
    "loaded": "green",
    "ok": "green",
    "pending": "yellow",
    "reconnecting": "yellow",
    "draining": "yellow",
    "registering": "yellow",
    "offline": "red",
    "departed": "red",
    "unhealthy": "red",
    "never_dialled": "red",
    "failed": "red",
}


def json_text(answer: Any) -> None:
    """Print an answer of the API as it came."""
    click.echo(json.dumps(answer, indent=2))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """
    Print rows under their column names; on a terminal in colour, else as plain columns no line of which is cut.

    Args:
        columns: their names.
        rows: one text per column.
        empty: what to say when there is no row.
    """
    if not rows:
        click.echo(empty)
        return
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        _plain(columns, rows)
        return
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        drawn.add_column(column.upper(), overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell, style=_COLOURS.get(cell.split(" ")[0], "")) for cell in row))
    console.print(drawn)


def _plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [[column.upper() for column in columns], *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def fields(pairs: Sequence[tuple[str, str]]) -> None:
    """Print names and values under each other."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        click.echo(f"{name.ljust(width)}  {value}")


def age(stamp: Any, now: datetime.datetime) -> str:
    """How long ago an RFC 3339 time was; a dash when there is none."""
    if not isinstance(stamp, str) or not stamp:
        return "-"
    try:
        moment = datetime.datetime.fromisoformat(stamp)
    except ValueError:
        return stamp
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    seconds = (now - moment).total_seconds()
    return "now" if seconds < 1 else f"{format_duration(seconds)} ago"


def amount(used_of: Mapping[str, Any], available: str, total: str) -> str:
    """Free of total, like ``3.1 GiB of 8.0 GiB``; a dash when the total is not known."""
    whole, left = used_of.get(total), used_of.get(available)
    if not isinstance(whole, int) or whole <= 0:
        return "-"
    return f"{format_size(left if isinstance(left, int) else 0)} of {format_size(whole)}"
