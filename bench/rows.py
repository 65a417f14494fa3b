"""What a measurement says, and its file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "build" / "bench"


@dataclass(frozen=True, slots=True)
class Row:
    """
    One number.

    Attributes:
        id: the acceptance line it belongs to.
        what: what was measured, in words.
        value, unit: the number.
        target: what it shall be at most or at least, in words; empty: nothing was promised.
        met: whether it is; None without a target.
        peer: the same number of something else in the same run, in words; empty: there was none.
    """

    id: str
    what: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None
    peer: str = ""


def at_most(id: str, what: str, value: float, unit: str, bound: float) -> Row:
    """A row whose number shall not be larger than ``bound``."""
    return Row(id, what, round(value, 3), unit, f"≤ {bound:g}", value <= bound)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them don't exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


def machine() -> str:
    """Where it was measured: processor, cores, load when it ended, kernel, Python."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    load = os.getloadavg()[1]
    return (
        f"{model}, {os.cpu_count()} cores, load {load:.1f}, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def write(name: str, rows: Sequence[Row]) -> Path:
    """Write ``build/bench/NAME.json``; the file."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    told = {
        "name": name,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    return path


def shown(rows: Sequence[Row]) -> str:
    """The rows for a terminal."""
    lines = []
    for row in rows:
        verdict = "" if row.met is None else f" ({row.target}: {'met' if row.met else 'NOT MET'})"
        peer = f"; {row.peer}" if row.peer else ""
        lines.append(f"  {row.id}  {row.what}: {row.value:g} {row.unit}{verdict}{peer}")
    return "\n".join(lines)
