"""
The files of a model on this frontend's disk: listed, with directories walked. Blocking calls: run in a thread.

Links are followed as long as what they lead to lies in the models folder, both ends resolved: the folder itself may be
reached through a link, nothing may lead out of it.

Source: internals §4a, LOAD-13, LOAD-14.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from localai_dist.staging.errors import SourceMissing
from localai_dist.staging.plan import SourceFile, companions, is_sidecar
from localai_dist.wire.keys import InvalidKey, staging_key


@dataclass(frozen=True, slots=True)
class Sources:
    """
    What was found.

    Attributes:
        files: what to stage, in order, each once.
        missing: files beside the first that are named and not there, by their relative names: shards, companions.
        where: the folder, in words.
    """

    files: tuple[SourceFile, ...]
    missing: tuple[str, ...] = ()
    where: str = "this frontend's models folder"


def list_sources(models_dir: Path, model: str, relatives: Sequence[str], hints: Sequence[str] = ()) -> Sources:
    """
    The files named by ``relatives`` (the first is required) below ``models_dir``, and what lies beside them.

    Args:
        hints: values of free options; one that is the path of a file or folder in the models folder is staged too, as
            it is or below the model's own folder. Any other value is none of our business.

    Raises:
        SourceMissing: the first one is not there, one leads out of the models folder, or the disk said no.
        InvalidKey: a name that no worker would take.
    """
    try:
        return _listed(_Listing(models_dir, model), models_dir, relatives, hints)
    except OSError as error:
        raise SourceMissing(f"model {model}: {error.filename} can't be read: {error.strerror}") from error


def _listed(listing: _Listing, models_dir: Path, relatives: Sequence[str], hints: Sequence[str]) -> Sources:
    where = f"this frontend's models folder {models_dir}"
    for relative in relatives:
        listing.add(relative)
    if not listing.found or relatives[0] in listing.missing:
        what = "has no file in it" if (models_dir / relatives[0]).is_dir() else "is not there"
        raise SourceMissing(f"{relatives[0]} {what} ({where})")
    for hint in hints:
        listing.add_hint(hint, os.path.dirname(relatives[0]))
    return Sources(tuple(listing.found.values()), tuple(listing.missing), where)


class _Listing:
    """What was found so far, by relative name."""

    def __init__(self, models_dir: Path, model: str) -> None:
        self.found: dict[str, SourceFile] = {}
        self.missing: list[str] = []
        self._models_dir = models_dir
        self._real = models_dir.resolve()
        self._model = model

    def add(self, relative: str) -> None:
        """A named file or folder, with its companions."""
        before = len(self.found)
        path = self._models_dir / relative
        if path.is_dir():
            for file in self._below(path, frozenset()):
                self._take(file)
        elif path.exists():
            self._take(path)
        if len(self.found) == before and relative not in self.found:
            self.missing.append(relative)

    def add_hint(self, hint: str, beside: str) -> None:
        """An option's value, if it is a path in here; the folder of all models is not one model's."""
        for path in (self._models_dir / hint, self._models_dir / beside / hint):
            if hint and "\0" not in hint and os.path.exists(path) and self._is_one_of_ours(path.resolve()):
                relative = os.path.relpath(path, self._models_dir)
                if relative.startswith(".."):  # it names the folder behind our link
                    relative = path.resolve().relative_to(self._real).as_posix()
                try:
                    self.add(relative)
                except (SourceMissing, InvalidKey):
                    self.missing.append(relative)
                return

    def _is_one_of_ours(self, real: Path) -> bool:
        return real != self._real and real.is_relative_to(self._real)

    def _below(self, folder: Path, above: frozenset[Path]) -> Iterator[Path]:
        """The files of a folder tree; ``above``: real folders on the way here, so that a link can't make a circle."""
        real = self._inside(folder)
        if real in above:
            return
        names = sorted(os.listdir(folder))
        siblings = frozenset(names)
        for path in (folder / name for name in names if not is_sidecar(name, siblings)):
            if path.is_dir():
                yield from self._below(path, above | {real})
            elif path.is_file():
                yield path
            elif path.is_symlink():
                self.missing.append(self._relative(path))  # a link to nothing

    def _take(self, path: Path) -> None:
        self._inside(path)
        relative = self._relative(path)
        if not path.is_file():
            raise SourceMissing(f"{relative} in the models folder {self._models_dir} is neither a file nor a folder")
        if relative not in self.found:
            size = path.stat().st_size
            self.found[relative] = SourceFile(path, relative, size, staging_key(self._model, relative))
            for companion in companions(relative):
                if (self._models_dir / companion).is_file():
                    self._take(self._models_dir / companion)

    def _inside(self, path: Path) -> Path:
        real = path.resolve()
        if not real.is_relative_to(self._real):
            text = f"{self._relative(path)} leads out of the models folder {self._models_dir}"
            raise SourceMissing(f"{text}: replace the link by the file")
        return real

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._models_dir).as_posix()
