"""Flags over environment over YAML over defaults, to one frozen settings object."""

from __future__ import annotations

import difflib
import os.path
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import yaml

from localai_dist.errors import UserMistake
from localai_dist.settings.accepted import Accepted
from localai_dist.settings.kinds import PATH, parse_switch
from localai_dist.settings.option import Option, options_of


class SettingsClass(Protocol):
    """What a settings class has besides its fields."""

    program: ClassVar[str]
    accepted: ClassVar[tuple[Accepted, ...]]

    def check(self) -> None:
        """Refuse what can't work together (``UserMistake``)."""


S = TypeVar("S", bound=SettingsClass)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[S]):
    """
    What came out.

    Attributes:
        settings: the frozen settings, checked.
        warnings: sentences for the log; none holds a secret.
    """

    settings: S
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Said:
    """One value as somebody wrote it, and where (named in an error)."""

    text: str
    where: str


def resolve(
    settings_type: type[S],
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    yaml_text: str | None = None,
    *,
    read_file: Callable[[str], str],
    cwd: str = "",
) -> Resolved[S]:
    """
    The settings that ``flags``, ``environ`` and ``yaml_text`` make together.

    Args:
        settings_type: ``FrontendSettings``, ``WorkerSettings`` or ``AgentSettings``.
        flags: long flag without dashes -> text, as given on the command line only.
        environ: an empty value counts as not given.
        yaml_text: the configuration file's text, or None.
        read_file: reads the file a secret's ``…_FILE`` names; raises ``OSError`` or ``UnicodeDecodeError``.
        cwd: what relative paths are joined to; empty leaves them as they are.

    Raises:
        UserMistake: an unknown YAML key, a value that can't be read, or settings that can't work together.
    """
    table = options_of(settings_type)
    document = _document(yaml_text, table, settings_type.accepted)
    values: dict[str, Any] = {}
    for row in table:
        said = _said(row, flags, environ, document, read_file)
        if said is not None:
            values[row.name] = _value(row, said)
        if row.kind is PATH:
            values[row.name] = os.path.normpath(os.path.join(cwd, values.get(row.name, row.default)))
    settings = settings_type(**values)
    settings.check()
    return Resolved(settings, tuple(_warnings(table, settings_type.accepted, flags, environ, document)))


def _said(
    row: Option,
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    document: Mapping[str, str],
    read_file: Callable[[str], str],
) -> _Said | None:
    if row.flag in flags:
        return _Said(flags[row.flag], "--" + row.flag)
    if environ.get(row.env):
        return _Said(environ[row.env], row.env)
    if row.secret and environ.get(row.env_file):
        return _Said(_secret(environ[row.env_file], row.env_file, read_file), row.env_file)
    if document.get(row.key):
        return _Said(document[row.key], f"{row.key} in the configuration file")
    if row.secret and document.get(row.key + "_file"):
        where = f"{row.key}_file in the configuration file"
        return _Said(_secret(document[row.key + "_file"], where, read_file), where)
    return None


def _secret(path: str, where: str, read_file: Callable[[str], str]) -> str:
    try:
        text = read_file(path).strip()
    except OSError as problem:
        raise UserMistake(f"{where}: can't read {path}: {problem.strerror or problem}") from problem
    except UnicodeDecodeError as problem:
        raise UserMistake(f"{where}: {path} is not text") from problem
    if not text:
        raise UserMistake(f"{where}: {path} is empty")
    return text


def _value(row: Option, said: _Said) -> Any:
    try:
        value = row.kind.parse(said.text)
    except UserMistake as mistake:
        text = "is not in a form that can be read" if row.secret else str(mistake)
        raise UserMistake(f"{said.where}: {text}") from mistake
    if row.zero_is_default and value == 0:
        return row.default
    if row.least is not None and value < row.least:
        raise UserMistake(f"{said.where}: {said.text!r} is too small: want at least {row.kind.show(row.least)}")
    return value


def _document(yaml_text: str | None, table: Iterable[Option], old: Iterable[Accepted]) -> Mapping[str, str]:
    if yaml_text is None:
        return {}
    try:
        parsed = yaml.safe_load(yaml_text)
    except yaml.YAMLError as problem:
        # Only the place: a YAML error quotes the line, and the line may hold a secret.
        mark = getattr(problem, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise UserMistake(f"the configuration file is not YAML{place}") from None
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise UserMistake("the configuration file is not a mapping: want lines like `address: :8080`")
    known = {row.key: row for row in table}
    allowed = {*known, *(row.key + "_file" for row in known.values() if row.secret), *(name.key for name in old)}
    return {key: _text(key, value) for key, value in _normalised(parsed, allowed)}


def _normalised(parsed: Mapping[Any, Any], allowed: set[str]) -> Iterable[tuple[str, Any]]:
    seen: set[str] = set()
    for raw, value in parsed.items():
        key = str(raw).replace("-", "_")
        if key not in allowed:
            raise UserMistake(f"unknown key {str(raw)[:60]!r} in the configuration file{suggestion(key, allowed)}")
        if key in seen:
            raise UserMistake(f"{key} stands twice in the configuration file")
        seen.add(key)
        yield key, value


def suggestion(name: str, known: Iterable[str]) -> str:
    """A tail for an error about an unknown ``name``: the nearest known one, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def _text(key: str, value: Any) -> str:
    """A YAML value as the text the same option would have in the environment."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(_text(key, part) for part in value)
    if isinstance(value, dict):
        return ",".join(f"{name}={_text(key, part)}" for name, part in value.items())
    return str(value)


def _warnings(
    table: Iterable[Option],
    old: Iterable[Accepted],
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    document: Mapping[str, str],
) -> Iterable[str]:
    for row in table:
        if row.secret and row.flag in flags:
            yield (
                f"--{row.flag} puts a secret where every user of this machine can read it;"
                f" set {row.env} or {row.env_file} instead"
            )
    for name in old:
        if not name.warn:
            continue
        where = _where_set(name, flags, environ, document)
        if where:
            yield f"{where} is accepted and has no effect in this version"


def _where_set(
    name: Accepted, flags: Mapping[str, str], environ: Mapping[str, str], document: Mapping[str, str]
) -> str:
    if name.flag in flags:
        return "--" + name.flag
    if environ.get(name.env) and not _is_off(environ[name.env], name):
        return name.env
    return f"{name.key} in the configuration file" if document.get(name.key) else ""


def _is_off(text: str, name: Accepted) -> bool:
    if name.takes_value:
        return False
    try:
        return not parse_switch(text)
    except UserMistake:
        return False
