"""
The processes of a private PostgreSQL, told by the folder of its data.

Each child of the server has a session of its own, so a signal to the server's group misses it; it ends by itself a
moment after the server was killed, and until then a new server refuses the same data.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def running_on(data: Path) -> list[int]:
    """The pids of the PostgreSQL processes on these data, servers and their children; a zombie is none."""
    lock = _first_number(data / "postmaster.pid")  # a server that has just begun does not work in its folder yet
    folder = os.path.realpath(data)
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if (pid == lock or _works_in(pid) == folder) and _lives(pid)]


def end_all(data: Path, within: float) -> None:
    """Kill them, and wait until they are gone, at most ``within`` (s)."""
    end = time.monotonic() + within
    while (found := running_on(data)) and time.monotonic() < end:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def await_end(data: Path, within: float) -> list[int]:
    """Wait until there are none, at most ``within`` (s); those that are left."""
    end = time.monotonic() + within
    while (found := running_on(data)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _first_number(lock: Path) -> int | None:
    try:
        return int(lock.read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return None


def _works_in(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:  # it has ended, or is somebody else's
        return ""


def _lives(pid: int) -> bool:
    """Whether that process runs, is no zombie and is a PostgreSQL (pids are used again after a reboot)."""
    try:
        name, state = Path(f"/proc/{pid}/stat").read_text().split("(", 1)[1].rsplit(")", 1)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return name.startswith(("postgres", "postmaster")) and state.split()[0] not in "ZX"
