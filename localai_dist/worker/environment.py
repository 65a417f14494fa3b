"""
What of our environment a backend may see: the machine's settings, none of ours, no secret but its own token.

Source: design §5 item 6; acceptance WALK-23.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

GRPC_TOKEN = "LOCALAI_GRPC_AUTH_TOKEN"
"""What a backend wants as gRPC bearer: random, for this one process."""
BACKEND_PYTHON = "LOCALAI_BACKEND_PYTHON"
"""The interpreter for backends written in Python."""

_OURS = re.compile(r"(LOCALAI|NATS)_.*")
_SECRET_NAME = re.compile(
    r".*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|DATABASE_URL|_DSN|PGPASS).*",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r".*[a-z][a-z0-9+.-]*://[^/@\s]*:[^/@\s]*@.*", re.IGNORECASE | re.DOTALL)


def backend_environment(
    parent: Mapping[str, str], *, token: str, python: str, secrets: Iterable[str] = (), code: str = ""
) -> dict[str, str]:
    """
    The environment of a backend process.

    Args:
        parent: our own.
        token: the process's own gRPC token.
        python: the interpreter backends in Python are to use.
        secrets: values that must not be in it wherever they hide; empty ones are ignored.
        code: put first in PYTHONPATH, so that backends in the box run the code that this worker runs.
    """
    hidden = [secret for secret in secrets if secret]
    kept = {
        name: value
        for name, value in parent.items()
        if not _OURS.fullmatch(name)
        and not _SECRET_NAME.fullmatch(name)
        and not _SECRET_VALUE.fullmatch(value)
        and not any(secret in value for secret in hidden)
    }
    if code:
        kept["PYTHONPATH"] = ":".join(filter(None, (code, kept.get("PYTHONPATH", ""))))
    return kept | {GRPC_TOKEN: token, BACKEND_PYTHON: python}
