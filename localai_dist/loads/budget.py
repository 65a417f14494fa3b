"""How long each part of a cold load may take; sizes in, seconds out."""

from __future__ import annotations

from localai_dist.units import HOUR, MINUTE, GiB

INSTALL: float = 15 * MINUTE
"""Budget of the install verb (s)."""

_LOAD_FIXED = 5 * MINUTE
_LOAD_PER_GIB = 20.0
_LOAD_CAP = 6 * HOUR
_LEAST_BASE = 25 * MINUTE
_SLACK = 5 * MINUTE

RETRY_AFTER_LEAST = 5
RETRY_AFTER_MOST = 60
"""SDKs ignore a Retry-After above this (s)."""


def load_budget(payload: int, configured: float | None = None) -> float:
    """
    Seconds for the backend's LoadModel call.

    Args:
        payload: bytes of the model and its companions; 0 when unknown.
        configured: what the operator set (``LOCALAI_NATS_MODEL_LOAD_TIMEOUT``); wins in both directions.
    """
    if configured is not None:
        return configured
    return min(_LOAD_FIXED + _LOAD_PER_GIB * payload / GiB, _LOAD_CAP)


def base_hold(install: float, load: float) -> float:
    """Seconds a load's hold has before its first progress."""
    return max(install + load + _SLACK, _LEAST_BASE)


def retry_after(eta: float | None, default: float = RETRY_AFTER_MOST) -> int:
    """Whole seconds for ``Retry-After``: the estimate, else ``default``, within what clients honour."""
    wanted = default if eta is None else eta
    return int(min(RETRY_AFTER_MOST, max(RETRY_AFTER_LEAST, round(wanted))))
