"""The files of a model on this frontend's disk: listed, with directories walked. Blocking calls: run in a thread."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from localai_dist.staging.errors import SourceMissing
from localai_dist.staging.plan import SourceFile, is_sidecar
from localai_dist.wire.keys import staging_key


@dataclass(frozen=True, slots=True)
class Sources:
    """
    What was found.

    Attributes:
        files: what to stage, in order.
        missing: optional files that are not there, by their relative names.
    """

    files: tuple[SourceFile, ...]
    missing: tuple[str, ...] = ()


def list_sources(models_dir: Path, model: str, relatives: Sequence[str]) -> Sources:
    """
    The files named by ``relatives`` (the first is required) below ``models_dir``.

    Raises:
        SourceMissing: the first one is not there, or one leads out of the models folder.
        InvalidKey: a name that no worker would take.
    """
    files: list[SourceFile] = []
    missing: list[str] = []
    for position, relative in enumerate(relatives):
        found = list(_below(models_dir, model, relative))
        if not found and position == 0:
            raise SourceMissing(f"model {model}: {relative} is not in this frontend's models folder {models_dir}")
        files += found
        if not found:
            missing.append(relative)
    return Sources(tuple(files), tuple(missing))


def _below(models_dir: Path, model: str, relative: str) -> Iterator[SourceFile]:
    path = models_dir / relative
    if not path.exists():
        return
    _demand_inside(models_dir, path, relative)
    if not path.is_dir():
        yield SourceFile(path, relative, path.stat().st_size, staging_key(model, relative))
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        siblings = frozenset(names)
        for name in sorted(names):
            file = Path(folder, name)
            if is_sidecar(name, siblings) or not file.exists():
                continue
            inner = file.relative_to(models_dir).as_posix()
            _demand_inside(models_dir, file, inner)
            yield SourceFile(file, inner, file.stat().st_size, staging_key(model, inner))


def _demand_inside(models_dir: Path, path: Path, relative: str) -> None:
    # Both ends resolved: the folder itself may be reached through a link, a file may not lead out of it.
    if not path.resolve().is_relative_to(models_dir.resolve()):
        raise SourceMissing(f"{relative} leads out of the models folder {models_dir}: replace the link by the file")
