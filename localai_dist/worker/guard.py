"""
The tiny program between a worker and a backend: when the worker is gone, so is the backend.

Run as ``python -I -S guard.py run.sh --addr 127.0.0.1:20000``, with its standard input being a pipe that only the
worker holds the other end of. It imports nothing of this package, so that it stays small.

It leads a process group of its own with the backend in it, so that one ``killpg`` reaches everything:

- the worker's end of the pipe closes (it died, SIGKILL included): the group gets SIGTERM, then SIGKILL 2 s later;
- SIGTERM to the group: the backend gets it too; the guard only waits;
- the backend ends: whatever it left behind in the group is killed, then the guard ends with the same status;
- the guard itself is killed: the kernel kills the backend's first process (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

TERM_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL once the worker is gone; acceptance WALK-11 allows 5 in all."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(command: list[str]) -> int:
    """Run ``command`` in this process's own group; the status to exit with."""
    os.setpgid(0, 0)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda _number, _frame: None)
    child = _start(command)
    status = _wait(child, wake_read)
    _kill_the_rest()
    return status


def _start(command: list[str]) -> int:
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != guard:
            os._exit(127)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"can't run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _wait(child: int, wake_read: int) -> int:
    """Until the child ends; reaps whatever else was left to us; ends everything when the worker's pipe closes."""
    watched, kill_at = [0, wake_read], None
    while True:
        status = _reap(child)
        if status is not None:
            return status
        patience = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        ready, _, _ = select.select(watched, [], [], patience)
        if wake_read in ready:
            os.read(wake_read, 512)
        if 0 in ready and not os.read(0, 512):
            watched.remove(0)
            kill_at = time.monotonic() + TERM_GRACE
            os.killpg(0, signal.SIGTERM)
        if kill_at is not None and time.monotonic() >= kill_at:
            os.killpg(0, signal.SIGKILL)


def _reap(child: int) -> int | None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 127
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _kill_the_rest() -> None:
    """Kill what the backend left in the group, and orphans that left it: a subreaper is their parent."""
    for _round in range(20):
        others = [int(name) for name in os.listdir("/proc") if name.isdigit() and _is_ours(int(name))]
        if not others:
            return
        for pid in others:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)
        _reap(-2)


def _is_ours(pid: int) -> bool:
    """Whether ``pid`` is alive, not us, and in our group or our child."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state, parent, group = stat.read().rpartition(b")")[2].split()[:3]
    except OSError:
        return False
    me = os.getpid()
    return pid != me and state not in (b"Z", b"X") and (int(group) == os.getpgrp() or int(parent) == me)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
