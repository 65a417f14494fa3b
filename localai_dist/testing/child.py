"""One daemon as a child process: start, end, kill, freeze, start again; its log is appended, never truncated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from localai_dist.errors import LocalAIDistError
from localai_dist.testing import guard
from localai_dist.testing.waiting import until

_INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_INHERITED_PREFIXES = ("LC_", "PYTHON", "SSL_CERT_", "COVERAGE_")


class ChildFailed(LocalAIDistError):
    """A child could not be started, or ended when it should not have."""


def checkout() -> Path:
    """The folder that holds the package this code runs from; children run that code too."""
    return Path(__file__).resolve().parents[2]


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """
    A child's whole environment: what programs need to run, and ``extra``; no ``LOCALAI_*`` of our own leaks in.

    ``PYTHONPATH`` starts with ``checkout()``, so the children run this code whether it is installed or not.
    """
    kept = {
        name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }
    paths = [str(checkout()), *(part for part in kept.get("PYTHONPATH", "").split(os.pathsep) if part)]
    kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return {**kept, **extra}


def twistd(program: str) -> list[str]:
    """The argv of one of our daemons in the foreground; no secret is ever part of it."""
    script = Path(sys.executable).parent / "twistd"
    runner = [str(script)] if script.exists() else ["-c", "from twisted.scripts.twistd import run; run()"]
    return [sys.executable, *runner, "-n", "--pidfile=", program]


class Child:
    """
    A daemon of the cluster.

    Attributes:
        name: what it is called in reports: ``frontend-0``.
        argv, env, cwd: what starts it; the same by hand.
        log: where its output goes.
    """

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> None:
        self.name = name
        self.argv = list(argv)
        self.env = dict(env)
        self.cwd = cwd
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """
        The process's id; it stays that of the last process after its end.

        Raises:
            ChildFailed: never started.
        """
        if self._process is None:
            raise ChildFailed(f"{self.name} was never started")
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended (negative: by that signal), or None while it runs or was never started."""
        return None if self._process is None else self._process.poll()

    def is_alive(self) -> bool:
        """Whether it runs; a zombie is reaped and counts as dead."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """
        Start it; call from a thread that lives on, because the child ends with that thread.

        Raises:
            ChildFailed: it runs already, or its program can't be started.
        """
        if self.is_alive():
            raise ChildFailed(f"{self.name} runs already (pid {self.pid})")
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), *self.argv]
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log, "ab", opener=_private) as log:
                self._process = subprocess.Popen(
                    command,
                    env=self.env,
                    cwd=self.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a terminal's Ctrl-C is for us alone; we end the children in order
                )
        except OSError as problem:
            raise ChildFailed(f"can't start {self.name}: {problem.strerror}: {problem.filename}") from problem

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def terminate(self) -> None:
        """Ask it to end (SIGTERM); a frozen one is thawed first."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it (SIGKILL) and reap it."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(10)

    def freeze(self) -> None:
        """Stop it (SIGSTOP) and wait until it stands."""
        self.signal(signal.SIGSTOP)
        until(f"{self.name} standing still", lambda: _state(self.pid) == "T", 5)

    def thaw(self) -> None:
        """Let a frozen one go on (SIGCONT)."""
        self.signal(signal.SIGCONT)

    def wait_ended(self, bound: float) -> int:
        """
        Its exit code.

        Raises:
            NeverCame: it still runs after ``bound`` seconds.
        """
        return until(f"the end of {self.name}", self._ended, bound)[0]

    def _ended(self) -> tuple[int] | None:
        return None if self.exit_code is None else (self.exit_code,)

    def tail(self, lines: int = 20) -> list[str]:
        """The last lines of its log."""
        try:
            with open(self.log, "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 64 * 1024))
                return log.read().decode("utf-8", "replace").splitlines()[-lines:]
        except FileNotFoundError:
            return []

    def last_words(self) -> str:
        """The last line of its log that says something, cut to a readable length."""
        words = [line.strip() for line in self.tail() if line.strip()]
        return words[-1][:300] if words else "(its log is empty)"

    def obituary(self) -> str:
        """One line that tells how it ended and where to read more."""
        code = self.exit_code
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return f"{self.name} (pid {self.pid}) ended {how}: {self.last_words()} (log: {self.log})"


def end_all(children: Sequence[Child], *, polite: float, insist: float) -> None:
    """
    End ``children``: SIGTERM, after ``polite`` seconds a second SIGTERM, after ``insist`` more SIGKILL.

    Takes at most ``polite + insist`` seconds and what a SIGKILL takes.
    """
    for child in children:
        child.terminate()
    if not _all_gone(children, polite):
        for child in children:
            child.terminate()
        _all_gone(children, insist)
    for child in children:
        child.kill()


def _all_gone(children: Sequence[Child], bound: float) -> bool:
    ends = time.monotonic() + bound
    while any(child.is_alive() for child in children):
        if time.monotonic() >= ends:
            return False
        time.sleep(0.05)
    return True


def _state(pid: int) -> str:
    """The kernel's letter for a process: R, S, T, Z; empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
