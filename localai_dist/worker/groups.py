"""Process groups as the kernel has them: who is still in one, and signals to all of it."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def members(group: int) -> list[int]:
    """The processes of ``group`` that are alive; zombies don't count."""
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit() and _group_of(entry) == group]


def signal_group(leader: int, number: int) -> None:
    """
    Send signal ``number`` to every process of the group ``leader`` leads; none left is fine.

    A leader that was just started has no group yet; then the signal goes to it alone.
    """
    for send in (os.killpg, os.kill):
        try:
            return send(leader, number)
        except ProcessLookupError:
            pass


def _group_of(entry: Path) -> int | None:
    try:
        fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[2])
