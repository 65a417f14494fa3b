"""How a daemon ends: at once on a second SIGTERM, with exit code 1 when it can't do its work."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from typing import Any

from twisted.logger import Logger

log = Logger()


def next_sigterm_kills() -> None:
    """Whoever sends SIGTERM again does not want to wait: the kernel's own answer ends the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_with(reactor: Any, program: str, text: str) -> None:
    """
    Stop the daemon with one clear line and exit code 1.

    twistd ends a stopped reactor with exit code 0, whatever the reason; the exit code is set when Python itself ends,
    after twistd has removed its pidfile.
    """
    log.critical("{program} can't go on: {text}", program=program, text=text)
    sys.stderr.write(f"{program}: {' '.join(text.split())}\n")
    atexit.register(os._exit, 1)
    if reactor.running:
        reactor.stop()
    else:
        reactor.callWhenRunning(reactor.stop)
