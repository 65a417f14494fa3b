"""A bash that types a page's commands, and keeps what the shell keeps: its folder, its variables."""

from __future__ import annotations

import fnmatch
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from localai_dist.testing.waiting import NeverCame, until
from tests.support.pages import Command, matches

COMMAND_BOUND = 120.0
"""How long one command may take (s)."""


class Machine:
    """
    One machine of a page: a folder that is its home, and one bash in it.

    Args:
        home: its ``HOME``, and where the shell begins unless ``cwd`` says another place.
        env: the shell's whole environment but ``HOME``.
        bound: how long one command may take (s).
    """

    def __init__(
        self, home: Path, env: Mapping[str, str], cwd: Path | None = None, *, bound: float = COMMAND_BOUND
    ) -> None:
        self.home = home
        self._cwd = cwd or home
        self._bound = bound
        self._env = {**env, "HOME": str(home)}
        self._typed = home / ".typed"
        self._mark = f"--- {os.urandom(8).hex()}"
        self._shell = self._popen(["bash", "--noprofile", "--norc"], stdin=subprocess.PIPE)
        self._staying: list[tuple[subprocess.Popen[bytes], Path]] = []

    def type(self, command: Command) -> None:
        """
        Run it and compare.

        Raises:
            AssertionError: it prints something else, or nothing and fails.
        """
        if command.foreground:
            self._stay(command)
            return
        status, printed = self._run(command.text)
        said = f"line {command.number}: $ {command.text}\nended with {status}, printed:\n{printed}"
        assert matches(command.expected, printed), said + "\nthe page shows:\n" + "\n".join(command.expected)
        # A command that is shown to fail prints why; one that prints nothing has no business failing.
        assert status == 0 or command.expected, said

    def interrupt(self) -> None:
        """Ctrl-C for what stays in the foreground; each must end."""
        while self._staying:
            process, log = self._staying.pop()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise AssertionError(f"still there 20 s after Ctrl-C; it had printed:\n{log.read_text()}") from None

    def close(self) -> None:
        """End the shell, what stays in the foreground, and every daemon that left a pid file."""
        try:
            self.interrupt()
        finally:
            self._shell.kill()
            self._shell.communicate()
            # Not rglob, which fails at a folder that goes meanwhile: of a cluster that runs in this home, for one.
            for folder, _, names in os.walk(self.home):
                for pidfile in fnmatch.filter(names, "*.pid"):
                    _kill(Path(folder, pidfile))

    def _run(self, text: str) -> tuple[int, str]:
        # Read from a file and not from the shell's own input, which a command could swallow.
        self._typed.write_text(text + "\n")
        assert self._shell.stdin is not None
        self._shell.stdin.write(f". '{self._typed}' </dev/null; printf '\\n{self._mark} %s\\n' $?\n".encode())
        self._shell.stdin.flush()
        return self._read_reply(text)

    def _read_reply(self, text: str) -> tuple[int, str]:
        assert self._shell.stdout is not None
        output, ends = b"", time.monotonic() + self._bound
        mark = f"\n{self._mark} ".encode()
        while not (mark in output and output.endswith(b"\n")):
            ready, _, _ = select.select([self._shell.stdout], [], [], max(0.0, ends - time.monotonic()))
            part = os.read(self._shell.stdout.fileno(), 65536) if ready else b""
            assert part, (
                f"no end within {self._bound:g} s of: {text}\nprinted so far:\n{output.decode(errors='replace')}"
            )
            output += part
        printed, _, status = output.decode(errors="replace").rpartition(mark.decode())
        return int(status), printed

    def _stay(self, command: Command) -> None:
        log = self.home / f".foreground-{command.number}"
        with log.open("wb") as printed:
            process = self._popen(["bash", "-c", command.text], stdout=printed, stdin=subprocess.DEVNULL)
        self._staying.append((process, log))

        def shown() -> bool:
            return matches(command.expected, log.read_text(errors="replace")) or process.poll() is not None

        try:
            until(f"what line {command.number} shows", shown, self._bound)
        except NeverCame as late:
            raise AssertionError(f"{late}; it printed:\n{log.read_text(errors='replace')}") from None
        assert process.poll() is None, f"line {command.number} ended: {log.read_text(errors='replace')}"

    def _popen(self, argv: list[str], **more: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            argv,
            cwd=self._cwd,
            env=self._env,
            start_new_session=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **more},
        )


def _kill(pidfile: Path) -> None:
    try:
        os.kill(int(pidfile.read_text()), signal.SIGKILL)
    except (OSError, ValueError):
        pass
