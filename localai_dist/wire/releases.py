"""
Which releases may speak with each other.

The first number decides; while it is 0, the second one does too. A worker that names no release is a stock LocalAI one,
which speaks the common contract. Source: docs/wire/tunnel.md, acceptance CLUS-28.
"""

from __future__ import annotations

import re
from typing import Final

UPGRADE_ORDER: Final = "upgrade all frontends first, then the workers"

_RELEASE: Final = re.compile(r"v?(\d{1,9})\.(\d{1,9})(?:[.\-+a-z].*)?", re.DOTALL)
_SHOWN: Final = 40  # characters of what somebody called their release


def compatible(ours: str, theirs: str | None) -> bool:
    """Whether a peer of the release ``theirs`` (None or nothing: it named none) may be admitted by this one."""
    if not theirs:
        return True
    return _line(ours) == _line(theirs) is not None


def mismatch(here: str, dialler: str) -> str:
    """One sentence on two releases that don't fit; names both, and what to do."""
    return f"this frontend runs release {here}, who dials runs {dialler[:_SHOWN]!r}; they don't fit: {UPGRADE_ORDER}"


def _line(release: str) -> tuple[int, ...] | None:
    """What two releases must have in common; None for a text that is no release."""
    found = _RELEASE.fullmatch(release)
    if found is None:
        return None
    major, minor = int(found[1]), int(found[2])
    return (major,) if major else (0, minor)
