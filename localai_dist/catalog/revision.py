"""The hash of what a configuration means, whatever its layout."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass
from typing import Any


def revision_of(config: Any) -> str:
    """
    32 hex digits that change exactly when the meaning of ``config`` (a dataclass) does.

    Fields declared ``compare=False`` carry no meaning. Fields at their default are left out, so that a new option in
    a later version does not give every model a new revision.
    """
    canonical = json.dumps(_meaning(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:32]


def _meaning(value: Any) -> Any:
    if is_dataclass(value):
        counted = ((one.name, getattr(value, one.name), one.default) for one in fields(value) if one.compare)
        return {name: _meaning(held) for name, held, default in counted if held != default}
    if isinstance(value, tuple):
        return [_meaning(item) for item in value]
    return value
