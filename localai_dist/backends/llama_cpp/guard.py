"""A backend ends with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_INTERVAL = 1.0


def end_with_parent() -> None:
    """
    From now on this process is killed when its parent ends.

    Twice, because the kernel's signal fires when the *thread* that started us ends and is lost on a change of uid: the
    kernel's (at once), and a look at the parent's pid every second. ``LOCALAI_BACKEND_PARENT_WATCH=false`` switches
    both off, for a backend started by hand.
    """
    if os.environ.get("LOCALAI_BACKEND_PARENT_WATCH", "true").lower() in ("false", "0", "no"):
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True, name="parent-watch").start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_INTERVAL)
    os.kill(os.getpid(), signal.SIGKILL)
