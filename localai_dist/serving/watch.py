"""The models folder, read anew every second, off the reactor's thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from twisted.application.service import Service
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.catalog.model import ModelConfig
from localai_dist.catalog.snapshot import ModelProblem, Snapshot, read_snapshot
from localai_dist.ids import ModelName
from localai_dist.units import MiB

log = Logger()

INTERVAL = 1.0
"""Time between two looks at the folder (s); a load whose model was removed stops within two (LOAD-17)."""

FILE_LIMIT = 1 * MiB
"""A model YAML bigger than this is a problem, not a model (bytes)."""

Signature = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the folder: what the files were like, and what they said."""

    signatures: Mapping[str, Signature] = field(default_factory=dict)
    snapshot: Snapshot = field(default_factory=Snapshot)


def look(folder: Path, before: Look) -> Look:
    """
    The folder now; ``before`` itself when no YAML file changed.

    Raises:
        OSError: the folder can't be read.
    """
    signatures = _signatures(folder)
    if signatures == before.signatures:
        return before
    texts: dict[str, str] = {}
    problems: dict[str, str] = {}
    broken: dict[str, str] = {}
    for name in signatures:
        shown = os.fsencode(name).decode("utf-8", "backslashreplace")  # a file's name may be any bytes
        try:
            texts[shown] = _read(folder / name)
        except FileNotFoundError:
            continue  # taken away between the listing and now: the next look will agree
        except (OSError, ValueError) as error:
            problems[shown] = f"can't be read: {error}"
            broken[shown] = shown.rpartition(".")[0]
    read = read_snapshot(texts)
    return Look(signatures, Snapshot(read.models, {**read.problems, **problems}, {**read.broken, **broken}))


def _signatures(folder: Path) -> dict[str, Signature]:
    found: dict[str, Signature] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not entry.name.endswith((".yaml", ".yml")):
                continue
            try:
                if entry.is_file():
                    stat = entry.stat()
                    found[entry.name] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            except FileNotFoundError:
                continue
            except OSError as error:  # a link that leads to itself, ...: reading it says what is wrong
                found[entry.name] = (-1, error.errno or 0, entry.inode())
    return found


def _read(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(FILE_LIMIT + 1)
    if len(content) > FILE_LIMIT:
        raise ValueError(f"more than {FILE_LIMIT} bytes; a model file is a short YAML text")
    return content.decode("utf-8")


class CatalogWatch(Service):
    """
    The models being served, from the YAML files of ``folder``.

    Args:
        in_thread: runs a function off the reactor's thread (``deferToThreadPool`` with its first two arguments given).

    Attributes:
        on_change: called after the models changed, with the names of those that are gone, broken ones too.
        failures: looks that came to nothing, since the start.
    """

    name = "catalog"

    def __init__(
        self, folder: Path, *, clock: IReactorTime, in_thread: Callable[[Callable[[], Look]], Deferred[Look]]
    ) -> None:
        self._folder = folder
        self._in_thread = in_thread
        self._look = Look()
        self._trouble = ""
        self._seen = False
        self.failures = 0
        self.on_change: Callable[[Collection[str]], None] = lambda gone: None
        self._loop = LoopingCall(self._again)
        self._loop.clock = clock

    @property
    def folder(self) -> Path:
        """The models folder."""
        return self._folder

    @property
    def problems(self) -> list[ModelProblem]:
        """The model files that are not served, and those that are odd."""
        return self._look.snapshot.all_problems()

    def all(self) -> list[ModelConfig]:
        """Every served model, by name."""
        return list(self._look.snapshot.models.values())

    def get(self, name: str) -> ModelConfig | None:
        """The model that clients call ``name``."""
        return self._look.snapshot.models.get(ModelName(name))

    def is_gone(self, name: str) -> bool:
        """Whether no file of the folder is model ``name``, nor would be if it were right; not known: no."""
        snapshot = self._look.snapshot
        known = name in snapshot.models or name in snapshot.broken.values()
        return self._seen and not self._trouble and not known

    def startService(self) -> None:
        """Read the folder once, at once, so that the first request finds its model; then every second."""
        super().startService()
        try:
            self._adopt(look(self._folder, self._look))
        except Exception:  # noqa: BLE001 - one bad look, logged below, must not keep the frontend from starting
            self._failed(Failure())
        self._loop.start(INTERVAL, now=False)

    def stopService(self) -> None:
        """Stop looking; the last snapshot stays."""
        super().stopService()
        if self._loop.running:
            self._loop.stop()

    def _again(self) -> Deferred[None]:
        before = self._look
        seen = maybeDeferred(self._in_thread, lambda: look(self._folder, before))
        return seen.addCallback(self._adopt).addErrback(self._failed)

    def _failed(self, failure: Failure) -> None:
        """Whatever went wrong, the next look is to come; said once for as long as it stays the same."""
        self.failures += 1
        trouble = repr(failure.value)
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if failure.check(OSError):
            log.warn("the models folder {folder} can't be read: {error}", folder=str(self._folder), error=failure.value)
        else:
            log.failure("looking at the models folder {folder} failed", failure, folder=str(self._folder))

    def _adopt(self, seen: Look) -> None:
        self._trouble = ""
        self._seen = True
        if seen is self._look:
            return
        before, self._look = self._look, seen
        known = before.snapshot.all_problems()
        for one in seen.snapshot.all_problems():
            if one not in known:
                said = "model file {source}: {reason}" if one.served else "model file {source} is not served: {reason}"
                log.warn(said, source=one.file, reason=one.reason)
        log.info("serving {count} models: {names}", count=len(self.all()), names=", ".join(seen.snapshot.models))
        names = {*before.snapshot.models, *before.snapshot.broken.values()}
        self.on_change({name for name in names if self.is_gone(name)})
