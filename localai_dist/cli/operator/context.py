"""What every subcommand is given: the frontend to ask, and how to print."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from localai_dist.cli.operator.api import Api, ApiFailure

KEY_ENV = "LOCALAI_CLI_API_KEY"


@dataclass(frozen=True, slots=True)
class Asked:
    """
    The command's own options.

    Attributes:
        server: a frontend's address.
        as_json: whether to print the API's own JSON.
    """

    server: str
    as_json: bool

    @property
    def api(self) -> Api:
        """
        The frontend, with the key from the environment or from the file it names.

        Raises:
            BadParameter: its address has no scheme.
        """
        if not self.server.startswith(("http://", "https://")):
            raise click.BadParameter(f"{self.server!r}: want http://host:port", param_hint="LOCALAI_SERVER or --server")
        return Api(self.server.rstrip("/"), _key())


def _key() -> str:
    if os.environ.get(KEY_ENV):
        return _checked(os.environ[KEY_ENV], KEY_ENV)
    path = os.environ.get(KEY_ENV + "_FILE")
    if not path:
        return ""
    try:
        key = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ApiFailure(f"can't read the key from {path} ({KEY_ENV}_FILE): {problem}") from problem
    if not key.strip():
        raise ApiFailure(f"there is no key in {path} ({KEY_ENV}_FILE)")
    return _checked(key, f"{path} ({KEY_ENV}_FILE)")


def _checked(key: str, where: str) -> str:
    """The key without what surrounds it; one that no header can hold is refused without being shown."""
    found = key.strip()
    if not found.isascii() or not found.isprintable() or " " in found:
        raise ApiFailure(f"the key in {where} has a line break, a space or a letter in it that no key has")
    return found


pass_asked: Any = click.make_pass_decorator(Asked)
