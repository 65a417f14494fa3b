"""``python -m bench [NAME ...]``: run these measurements, or all, and write ``build/bench/NAME.json`` for each."""

from __future__ import annotations

import importlib
import sys

from bench.rows import shown, write

BENCHES = ("tunnel", "cluster", "fleet", "staging")
"""Modules of this package with a function ``run() -> list[Row]``."""


def main(names: list[str]) -> int:
    """Run them one after the other; a target that was missed is told, and is no failure."""
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        sys.stderr.write(f"no such measurement: {', '.join(unknown)}; there are: {', '.join(BENCHES)}\n")
        return 2
    for name in names or BENCHES:
        sys.stdout.write(f"==> {name}\n")
        rows = importlib.import_module(f"bench.{name}").run()
        path = write(name, rows)
        sys.stdout.write(f"{shown(rows)}\n  written to {path}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
