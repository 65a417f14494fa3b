"""Which ``LOCALAI_…`` variables mean anything here, and a warning for each that does not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from localai_dist.settings.agent import AgentSettings
from localai_dist.settings.frontend import FrontendSettings
from localai_dist.settings.option import PREFIX, options_of
from localai_dist.settings.resolve import suggestion
from localai_dist.settings.worker import WorkerSettings

_DAEMONS: tuple[type[Any], ...] = (FrontendSettings, WorkerSettings, AgentSettings)

_OTHERS = frozenset(
    {
        "LOCALAI_CONFIG",
        "LOCALAI_SERVER",
        "LOCALAI_CLI_API_KEY",
        "LOCALAI_CLI_API_KEY_FILE",
        "LOCALAI_GRPC_AUTH_TOKEN",
        "LOCALAI_BACKEND_PYTHON",
        "LOCALAI_BACKEND_PARENT_WATCH",
    }
)
"""The daemons' configuration file, the operator's command, and what backends read."""

_FAMILIES = ("LOCALAI_BACKEND_", "LOCALAI_TEST_")
"""Backends and tests have variables of their own, which nobody here has a list of."""

_SURELY = 0.9
"""How alike a name of a family must be to a known one to be taken for a slip of the pen."""


def unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    """A sentence for each ``LOCALAI_…`` variable that no daemon, nor the operator's command, nor a backend reads."""
    known = known_variables()
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in known:
            continue
        if name.startswith(_FAMILIES) and not difflib.get_close_matches(name, known, n=1, cutoff=_SURELY):
            continue
        yield f"the variable {name} is not known and has no effect{suggestion(name, sorted(known))}"


@cache
def known_variables() -> frozenset[str]:
    """Every variable that is read, or accepted without effect, by any daemon: one environment may serve them all."""
    rows = [row for settings_type in _DAEMONS for row in options_of(settings_type)]
    old = [name.env for settings_type in _DAEMONS for name in settings_type.accepted]
    return frozenset({*_OTHERS, *old, *(row.env for row in rows), *(row.env_file for row in rows if row.secret)})
