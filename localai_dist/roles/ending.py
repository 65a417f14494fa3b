"""How a daemon ends: in order on SIGTERM, at once on a second one, with exit code 1 when it can't do its work."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from typing import Any

from twisted.logger import Logger

log = Logger()


def sigterm_ends_well(reactor: Any) -> None:
    """
    SIGTERM asks for an end in order, and after one the exit code is 0.

    Twisted's own handling of it would end the process by the same signal once everything is stopped, which a
    supervisor can't tell from a process that was cut short.
    """
    if threading.current_thread() is threading.main_thread():
        # After the reactor's start, which sets its own handlers.
        reactor.callWhenRunning(
            signal.signal, signal.SIGTERM, lambda number, frame: reactor.callFromThread(reactor.stop)
        )


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
