"""
Staging keys: the name a file has on a worker, built, parsed and refused.

A key is a relative path with ``/`` between its parts. Its first part chooses the area it lives in; where that area is
on the worker's disk is the worker's business (``worker/containment.py`` resolves it and checks symbolic links).

Source: surface §5.6, internals §4a.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from localai_dist.errors import InvalidName
from localai_dist.ids import file_parts, folder_of, path_parts

T = TypeVar("T")

HASH_SUFFIX = ".sha256"
"""Beside a finished file: its SHA-256 in hexadecimal."""

TARGET_SUFFIX = ".sha256.target"
"""Beside an unfinished file: the SHA-256 it is to have, and its size."""


EPHEMERAL = "ephemeral"
"""First part of the keys of single requests' files: ``ephemeral/<request>/…``, in the staging area."""


class InvalidKey(InvalidName):
    """A staging key that names nothing inside its area."""


class Area(Enum):
    """Which folder of the worker a key lives in."""

    MODELS = "models"
    DATA = "data"
    STAGING = "staging"


@dataclass(frozen=True, slots=True)
class StagingKey:
    """
    A parsed key.

    Attributes:
        area: the folder it lives in.
        parts: the path inside that folder; no part is empty, ``.`` or ``..``.
    """

    area: Area
    parts: tuple[str, ...]

    @property
    def relative(self) -> str:
        """The path inside the area, with ``/``."""
        return "/".join(self.parts)

    def __str__(self) -> str:
        """The key as it travels."""
        return self.relative if self.area is Area.STAGING else f"{self.area.value}/{self.relative}"


def staging_key(model: str, relative: str) -> str:
    """
    The key of a model's file: ``models/<model>/<relative>``.

    Args:
        model: the model's name (its tracking key); a ``/`` in it is written ``%2F`` and a ``%`` ``%25``.
        relative: the file's path below the models folder of the frontend, with ``/``.

    Raises:
        InvalidKey: either part is empty or would leave the models folder.
    """
    if not model or not relative:
        raise InvalidKey(f"a staging key needs a model and a path, got {model[:80]!r} and {relative[:80]!r}")
    return str(parse_key(f"models/{_checked(folder_of, model)}/{relative}"))


def parse_key(text: str) -> StagingKey:
    """
    The key of a file in ``text``: ``models/…`` and ``data/…`` have folders of their own, anything else is staging.

    Raises:
        InvalidKey: absolute, empty, too long or deep, or with an empty, ``.`` or ``..`` part or a control character.
    """
    return _parse(text, file_parts)


def _checked(take: Callable[[str], T], text: str) -> T:
    try:
        return take(text)
    except InvalidName as error:
        raise InvalidKey(f"no staging key: {error}") from error


def _parse(text: str, split: Callable[[str], tuple[str, ...]]) -> StagingKey:
    parts = _checked(split, text)
    for area in (Area.MODELS, Area.DATA):
        if parts[0] == area.value:
            if len(parts) == 1:
                raise InvalidKey(f"{text[:80]!r} names the whole {area.value} folder, want a file in it")
            return StagingKey(area, parts[1:])
    return StagingKey(Area.STAGING, parts)


def parse_prefix(text: str) -> StagingKey:
    """
    The folder in ``text``, for listing: as ``parse_key``, but ``models`` alone is the whole models folder.

    Raises:
        InvalidKey: as for ``parse_key``.
    """
    trimmed = text.rstrip("/")
    for area in (Area.MODELS, Area.DATA):
        if trimmed == area.value:
            return StagingKey(area, ())
    return _parse(trimmed, path_parts)


def model_folder(model: str) -> StagingKey:
    """
    The folder that holds all staged files of ``model``.

    Raises:
        InvalidKey: the name would leave the models folder.
    """
    return _parse(f"models/{_checked(folder_of, model)}", path_parts)


def ephemeral_folder(request: str) -> StagingKey:
    """
    The folder of one request's files.

    Raises:
        InvalidKey: ``request`` can't be one folder's name.
    """
    key = _parse(f"{EPHEMERAL}/{request}", path_parts)
    if len(key.parts) != 2:
        raise InvalidKey(f"{request[:80]!r} is no request id: it has a / in it")
    return key


def ephemeral_key(request: str, name: str) -> str:
    """
    The key of an input file of a single request: ``ephemeral/<request>/inputs/<name>``.

    Raises:
        InvalidKey: either can't be one part of a path.
    """
    folder = ephemeral_folder(request)
    key = parse_key(f"{folder}/inputs/{name}")
    if len(key.parts) != 4:
        raise InvalidKey(f"{name[:80]!r} is no file's name: it has a / in it")
    return str(key)


def is_sidecar(name: str) -> bool:
    """Whether ``name`` looks like one of the hash files kept beside a staged file."""
    return name.endswith((HASH_SUFFIX, TARGET_SUFFIX))
