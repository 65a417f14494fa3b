"""
Backends as directories: ``<backends>/<name>/`` with ``run.sh`` and ``metadata.json``, installed whole or not at all.

An install is staged beside the old one (``<name>.install-tmp``), checked, and swapped in by two renames; whatever fails
leaves the old one where it was. Blocking: callers run these in a thread.

Source: surface §4.3.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from localai_dist.errors import InvalidName
from localai_dist.units import MiB
from localai_dist.wire.verbs import BackendEntry
from localai_dist.worker.containment import folder_name
from localai_dist.worker.errors import InstallFailed, WorkerError
from localai_dist.worker.gallery import DEFAULT_CAPABILITY, Entry, Gallery, choose, parse_index

BOXED_INDEX = Path(__file__).parent.parent / "backends" / "index.yaml"
"""The gallery index that ships with this package."""

RUN = "run.sh"
METADATA = "metadata.json"
NAMES_SHOWN = 20
"""Backends an error lists at most."""
_STAGED = ".install-tmp"
_BACKUP = ".install-backup"


class Metadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """What ``metadata.json`` says about an installed backend."""

    name: str
    alias: str = ""
    meta_backend_for: str = ""
    gallery_url: str = ""
    installed_at: str = ""
    version: str = ""
    uri: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """
    What to install.

    Attributes:
        backend: its name in a gallery, or how it is called once installed from ``uri``.
        uri: install from this directory instead of a gallery.
        alias: another name for it, for ``uri``.
        galleries: searched in order; empty = the installer's own.
    """

    backend: str
    uri: str = ""
    alias: str = ""
    galleries: Sequence[Gallery] = ()


@dataclass(frozen=True, slots=True)
class Installed:
    """
    An installed backend.

    Attributes:
        folder: its directory.
        folder_id: device and inode, which a reinstall changes.
    """

    metadata: Metadata
    folder: Path
    folder_id: tuple[int, int]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name


class Installer:
    """
    The installed backends.

    Args:
        folder: where they are; made when needed.
        galleries: where to look when a request names none; empty = the one in the box.
        capabilities: the worker's own, for meta entries; see ``gallery.choose``.
        now: the time as RFC 3339.
    """

    def __init__(
        self,
        folder: Path,
        *,
        galleries: Sequence[Gallery] = (),
        capabilities: Sequence[str] = (DEFAULT_CAPABILITY,),
        now: Callable[[], str],
    ) -> None:
        self.folder = folder
        self._galleries = tuple(galleries) or (Gallery(str(BOXED_INDEX), "box"),)
        self._capabilities = tuple(capabilities)
        self._now = now

    def find(self, name: str) -> Installed | None:
        """The installed backend called ``name``: by its folder, its alias, or the meta entry it was chosen for."""
        by_folder = self._read(name)
        if by_folder is not None or not name:
            return by_folder
        others = ((one, (one.metadata.alias, one.metadata.meta_backend_for)) for one in self.all())
        return next((one for one, names in others if name in names), None)

    def all(self) -> list[Installed]:
        """Every installed backend, by name; half-made ones are left out."""
        if not self.folder.is_dir():
            return []
        found = (self._read(entry.name) for entry in sorted(self.folder.iterdir()))
        return [one for one in found if one is not None]

    def entries(self) -> list[BackendEntry]:
        """The same, as the list verb tells it."""
        return [
            BackendEntry(
                name=one.name,
                installed_at=one.metadata.installed_at,
                gallery_url=one.metadata.gallery_url,
                version=one.metadata.version,
                uri=one.metadata.uri,
            )
            for one in self.all()
        ]

    def install(self, wanted: Wanted, check: Callable[[], None] = lambda: None) -> Installed:
        """
        Install ``wanted``, replacing what has its name.

        Args:
            check: called before every file and after every megabyte; what it raises ends it, and nothing of it stays.

        Raises:
            InstallFailed: not in any gallery, nothing at its uri, no ``run.sh`` in it, or the disk said no.
            WorkerError: from ``check``.
        """
        source, metadata = self._resolve(wanted)
        target = self.folder / metadata.name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._stage(source, metadata, target, check)
            _swap(target)
        except OSError as error:
            raise InstallFailed(f"backend {metadata.name} can't be installed: {error}") from error
        installed = self._read(metadata.name)
        if installed is None:
            raise InstallFailed(f"backend {metadata.name} disappeared while it was installed")
        return installed

    def remove(self, name: str) -> bool:
        """
        Remove an installed backend; False = there was none.

        Raises:
            InstallFailed: the disk said no.
        """
        installed = self.find(name)
        if installed is None:
            return False
        try:
            shutil.rmtree(installed.folder)
        except OSError as error:
            raise InstallFailed(f"backend {installed.name} can't be removed: {error}") from error
        return True

    def _resolve(self, wanted: Wanted) -> tuple[Path, Metadata]:
        try:
            if wanted.uri:
                name = folder_name(wanted.backend or Path(wanted.uri).name)
                metadata = Metadata(name=name, alias=wanted.alias, installed_at=self._now(), uri=wanted.uri)
                return _directory(wanted.uri, Path("/")), metadata
            return self._from_gallery(wanted)
        except InvalidName as error:
            raise InstallFailed(str(error)) from error

    def _from_gallery(self, wanted: Wanted) -> tuple[Path, Metadata]:
        galleries = tuple(wanted.galleries) or self._galleries
        for gallery in galleries:
            index = _local_path(gallery.url)
            entry = choose(_entries(index), wanted.backend, self._capabilities)
            if entry is not None:
                metadata = Metadata(
                    name=folder_name(entry.name),
                    alias=entry.alias,
                    meta_backend_for="" if wanted.backend in (entry.name, entry.alias) else wanted.backend,
                    gallery_url=gallery.url,
                    installed_at=self._now(),
                    version=entry.version,
                    uri=entry.uri,
                )
                return _directory(entry.uri, index.parent), metadata
        searched = ", ".join(gallery.name or gallery.url for gallery in galleries)
        raise InstallFailed(
            f"there is no backend {wanted.backend[:80]!r} in the galleries searched: {searched}; "
            f"there is: {self._names(galleries)}"
        )

    def _names(self, galleries: Sequence[Gallery]) -> str:
        """What could be installed, for an error's text; the first few of many."""
        indexes = [_entries(_local_path(gallery.url)) for gallery in galleries]
        names = sorted({one.name for index in indexes for one in index if choose(index, one.name, self._capabilities)})
        return ", ".join([*names[:NAMES_SHOWN], *(["…"] if len(names) > NAMES_SHOWN else [])]) or "none"

    def _stage(self, source: Path, metadata: Metadata, target: Path, check: Callable[[], None]) -> None:
        staged = target.with_name(target.name + _STAGED)
        shutil.rmtree(staged, ignore_errors=True)
        try:
            ignore, copy = shutil.ignore_patterns("__pycache__"), partial(_copy, check)
            shutil.copytree(source, staged, symlinks=True, ignore=ignore, copy_function=copy)
            run = staged / RUN
            if not run.is_file():
                raise InstallFailed(f"backend {metadata.name}: there is no {RUN} in {source}")
            run.chmod(0o755)
            (staged / METADATA).write_bytes(msgspec.json.format(msgspec.json.encode(metadata), indent=2) + b"\n")
            check()
        except (OSError, WorkerError):
            shutil.rmtree(staged, ignore_errors=True)
            raise

    def _read(self, name: str) -> Installed | None:
        try:
            folder = self.folder / folder_name(name)
            if name.endswith((_STAGED, _BACKUP)) or not (folder / RUN).is_file():
                return None
            status = folder.stat()
            metadata = msgspec.json.decode((folder / METADATA).read_bytes(), type=Metadata)
        except (InvalidName, OSError, msgspec.DecodeError):
            return None
        return Installed(metadata, folder, (status.st_dev, status.st_ino))


def _copy(check: Callable[[], None], source: str, target: str) -> str:
    """``shutil.copy2`` in steps, so that it can be stopped; for ``copytree``, which follows no link to get here."""
    check()
    if not stat.S_ISREG(os.stat(source).st_mode):
        raise shutil.SpecialFileError(f"{source} is neither a file nor a directory")
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while chunk := reader.read(MiB):
            writer.write(chunk)
            check()
    shutil.copystat(source, target)
    return target


def _swap(target: Path) -> None:
    staged, backup = (target.with_name(target.name + suffix) for suffix in (_STAGED, _BACKUP))
    shutil.rmtree(backup, ignore_errors=True)
    had_one = target.exists()
    if had_one:
        target.rename(backup)
    try:
        staged.rename(target)
    except OSError:
        if had_one:
            backup.rename(target)
        raise
    shutil.rmtree(backup, ignore_errors=True)


def _entries(index: Path) -> list[Entry]:
    try:
        return parse_index(index.read_text("utf-8"), str(index))
    except (OSError, UnicodeDecodeError) as error:
        raise InstallFailed(f"the backend index {index} can't be read: {error}") from error


def _directory(uri: str, relative_to: Path) -> Path:
    folder = relative_to / _local_path(uri)
    if not folder.is_dir():
        raise InstallFailed(f"{folder} is not a directory")
    return folder


def _local_path(uri: str) -> Path:
    """
    The path in ``uri``, plain or ``file://``.

    Raises:
        InstallFailed: any other scheme.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return Path(uri)
    if scheme != "file":
        raise InstallFailed(f"{uri[:120]!r}: this worker installs backends from directories (a path or file://) only")
    return Path(rest)
