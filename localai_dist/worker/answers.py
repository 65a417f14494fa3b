"""What a worker answers about staged files, as values; ``files`` turns them into HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from localai_dist.wire.files import Target


@dataclass(frozen=True, slots=True)
class Absent:
    """Nothing is there."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A finished file of ``size`` bytes that hashes to ``sha256``."""

    size: int
    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class Partial:
    """An unfinished file; ``target`` is what it is to become, if that was written down."""

    size: int
    path: Path
    target: Target | None


@dataclass(frozen=True, slots=True)
class Verifying:
    """A file that is being hashed: ``verified`` of its bytes so far."""

    size: int
    path: Path
    verified: int
    target: Target | None


HeadAnswer: TypeAlias = Absent | Whole | Partial | Verifying


@dataclass(frozen=True, slots=True)
class Staged:
    """The file is whole and verified."""

    path: Path


@dataclass(frozen=True, slots=True)
class Incomplete:
    """``size`` bytes are there; ``wrong_offset`` = the piece did not start there and nothing was written."""

    size: int
    wrong_offset: bool = False


@dataclass(frozen=True, slots=True)
class Conflict:
    """What is there is something else: start again from 0."""

    text: str


@dataclass(frozen=True, slots=True)
class Unusable:
    """The request or what it carried is wrong."""

    text: str


PutAnswer: TypeAlias = Staged | Incomplete | Conflict | Unusable
