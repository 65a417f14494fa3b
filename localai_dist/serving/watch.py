"""
The models folder, read anew twice a second, off the reactor's thread.

A model is gone when no file names it any more, and that for a moment: an editor that saves a file may take it away
first. As long as a file is there, whatever is in it now, the model that it last served is broken and not gone.

Source: LOAD-17, LOAD-22.
"""

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

INTERVAL = 0.5
"""Time between two looks at the folder (s)."""

GONE_AFTER = 0.9
"""How long no look has found a model when it is gone (s); with ``INTERVAL``, its load stops within two (LOAD-17)."""

FILE_LIMIT = 1 * MiB
"""A model YAML bigger than this is a problem, not a model (bytes)."""

Signature = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Look:
    """
    One look at the folder: what the files were like, and what they said.

    Attributes:
        served: file -> the model it named when it could last be read.
    """

    signatures: Mapping[str, Signature] = field(default_factory=dict)
    snapshot: Snapshot = field(default_factory=Snapshot)
    served: Mapping[str, str] = field(default_factory=dict)

    def models(self) -> set[str]:
        """Every model that a file is, was before it broke, or would be if it were right."""
        return {*self.snapshot.models, *self.snapshot.broken.values(), *self.served.values()}


def look(folder: Path, before: Look) -> Look:
    """
    The folder now; ``before`` itself when no YAML file changed.

    Raises:
        OSError: the folder can't be read.
    """
    signatures = _signatures(folder, before.served)
    if signatures == before.signatures:
        return before
    texts: dict[str, str] = {}
    problems: dict[str, str] = {}
    for name in signatures:
        shown = _shown(name)
        try:
            texts[shown] = _read(folder / name)
        except (OSError, ValueError) as error:
            if os.path.lexists(folder / name):  # else taken away between the listing and now: the next look will agree
                problems[shown] = f"can't be read: {error}"
    read = read_snapshot(texts)
    served = {one: before.served[one] for one in map(_shown, signatures) if one in before.served} | dict(read.names)
    broken = {**read.broken, **{shown: _stem(shown) for shown in problems}}
    broken = {one: served.get(one, name) if name == _stem(one) else name for one, name in broken.items()}
    return Look(signatures, Snapshot(read.models, {**read.problems, **problems}, broken, read.names), served)


def _shown(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")  # a file's name may be any bytes


def _stem(shown: str) -> str:
    return shown.rpartition(".")[0]


def _signatures(folder: Path, served: Collection[str]) -> dict[str, Signature]:
    """The files that count; of what is no file, a link to nowhere among them, those that served before."""
    found: dict[str, Signature] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not entry.name.endswith((".yaml", ".yml")):
                continue
            try:
                if entry.is_file():
                    stat = entry.stat()
                    found[entry.name] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                elif _shown(entry.name) in served:
                    found[entry.name] = (-1, 0, entry.inode())
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
        on_change: called after the models changed, and when some are gone, with the names of those, broken ones too.
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
        self._absent: dict[str, float] = {}
        self._clock = clock
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
        """Whether for a while no file was model ``name``, nor would be if it were right; not known: no."""
        known = name in self._absent or name in self._look.models()
        return self._seen and not self._trouble and not known

    def startService(self) -> None:
        """Read the folder once, at once, so that the first request finds its model; then every ``INTERVAL``."""
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
        self._absent = dict.fromkeys(self._absent, self._clock.seconds())
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
        before, self._look = self._look, seen
        gone = self._pass(before)
        if seen is not before:
            self._tell(before, seen)
        if seen is not before or gone:
            self.on_change(gone)

    def _pass(self, before: Look) -> set[str]:
        """The models that are gone from this look on."""
        now, there = self._clock.seconds(), self._look.models()
        absent = dict.fromkeys(before.models() - there, now) | self._absent
        self._absent = {name: since for name, since in absent.items() if name not in there and now - since < GONE_AFTER}
        return absent.keys() - there - self._absent.keys()

    def _tell(self, before: Look, seen: Look) -> None:
        known = before.snapshot.all_problems()
        for one in seen.snapshot.all_problems():
            if one not in known:
                said = "model file {source}: {reason}" if one.served else "model file {source} is not served: {reason}"
                log.warn(said, source=one.file, reason=one.reason)
        log.info("serving {count} models: {names}", count=len(self.all()), names=", ".join(seen.snapshot.models))
