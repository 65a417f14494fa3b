"""What a daemon checks before the reactor runs, each failure one clear line and exit code 1."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from twisted.internet.protocol import Factory
from twisted.logger import Logger

from localai_dist.cli.options import CONFIG, CONFIG_ENV, DaemonOptions
from localai_dist.errors import LocalAIDistError, UserMistake
from localai_dist.settings.kinds import HostPort
from localai_dist.settings.known import unknown_variables
from localai_dist.settings.resolve import SettingsClass, resolve

S = TypeVar("S", bound=SettingsClass)

_log = Logger()


@contextmanager
def one_clear_line(program: str) -> Iterator[None]:
    """
    Turn an expected failure inside the block into one line on stderr and exit code 1.

    Raises:
        SystemExit: with the line; twistd prints it before it daemonises.
    """
    try:
        yield
    except LocalAIDistError as problem:
        raise SystemExit(f"{program}: {' '.join(str(problem).split())}") from None


def quiet_factories() -> None:
    """Let no factory log its starting and stopping: one line per stream would bury what matters."""
    Factory.noisy = False


def prepared(options: DaemonOptions, settings_type: type[S]) -> S:
    """
    The settings of this start: flags over environment over YAML; warnings go to the log, of variables to stderr too.

    Raises:
        UserMistake: something can't be used; the text names it and the remedy.
    """
    quiet_factories()
    resolved = resolve(
        settings_type,
        options.flags(),
        os.environ,
        _configuration(options[CONFIG] or os.environ.get(CONFIG_ENV)),
        read_file=lambda path: Path(path).read_text(encoding="utf-8"),
        cwd=os.path.join(os.getcwd(), options.rundir()),
    )
    for warning in resolved.warnings:
        _log.warn("{program}: {text}", program=settings_type.program, text=warning)
    for warning in unknown_variables(os.environ):
        # On stderr too: the log may be a file, and whoever mistyped a variable is looking here.
        _log.warn("{program}: {text}", program=settings_type.program, text=warning)
        sys.stderr.write(f"{settings_type.program}: {warning}\n")
    return resolved.settings


def _configuration(path: str | None) -> str | None:
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as problem:
        raise UserMistake(f"can't read the configuration file {path}: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        raise UserMistake(f"the configuration file {path} is not text") from problem


def make_folder(path: str, what: str) -> None:
    """
    Make a folder of the daemon's own, readable by its user alone, if it is not there yet.

    Raises:
        UserMistake: it can't be made, or can't be written.
    """
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise UserMistake(f"can't make the {what} {path}: {problem.strerror}") from problem
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserMistake(f"can't write in the {what} {path}")


def check_can_listen(address: HostPort, option: str) -> None:
    """
    Refuse an address somebody else listens on, while that can still be said in one line.

    Args:
        option: the variable to change, named in the refusal.

    Raises:
        UserMistake: taken, or not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
            probe.listen(1)
        except OSError as problem:
            text = f"can't listen on {address}: {problem.strerror or problem}; choose another with {option}"
            raise UserMistake(text) from problem
