"""A settings table as a twistd option parser: every row a flag, old names taken and hidden."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn

from twisted.python import usage

import localai_dist
from localai_dist.errors import UserMistake
from localai_dist.settings.kinds import parse_switch
from localai_dist.settings.option import Option, options_of
from localai_dist.settings.resolve import SettingsClass, suggestion

CONFIG = "config"
CONFIG_ENV = "LOCALAI_CONFIG"

_UNKNOWN = re.compile(r"option --(\S+) not recognized")


class DaemonOptions(usage.Options):
    """
    The options of one daemon; a subclass names its settings class::

        class Options(DaemonOptions, settings_type=FrontendSettings): ...
    """

    settings_type: ClassVar[type[SettingsClass]]
    optParameters: ClassVar[list[list[Any]]] = []
    optFlags: ClassVar[list[list[Any]]] = []

    def __init_subclass__(cls, *, settings_type: type[SettingsClass], **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.settings_type = settings_type
        valued, switches = [CONFIG], []
        for row in options_of(settings_type):
            if row.is_switch:
                switches.append(row.flag)
            elif not row.secret or row.flag_tolerated:
                valued.append(row.flag)
        for old in settings_type.accepted:
            (valued if old.takes_value else switches).append(old.flag)
        cls.optParameters = [[flag, None, None, ""] for flag in valued]
        cls.optFlags = [[prefix + flag, None, ""] for flag in switches for prefix in ("", "no-")]

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """Parse; a mistake is one line on stderr and exit code 2 (twistd itself would print its whole help, exit 0)."""
        given = list(sys.argv[1:] if options is None else options)
        try:
            super().parseOptions([self._switch_without_value(word) for word in given])
        except UserMistake as mistake:
            self._refuse(str(mistake))
        except usage.UsageError as problem:
            self._refuse(self._explained(str(problem)))

    def parseArgs(self, *rest: str) -> None:
        """Refuse words that are no option."""
        if rest:
            raise UserMistake(f"{rest[0][:60]!r} is no option: options start with --")

    def opt_version(self) -> NoReturn:
        """Show the version and exit."""
        sys.stdout.write(f"localai-dist {localai_dist.__version__}\n")
        raise SystemExit(0)

    def flags(self) -> dict[str, str]:
        """What was given on the command line: flag without dashes -> text."""
        given = {name[0]: self[name[0]] for name in self.optParameters if self[name[0]] is not None}
        for name, _short, _help in self.optFlags:
            if self[name]:
                given[name.removeprefix("no-")] = "false" if name.startswith("no-") else "true"
        given.pop(CONFIG, None)
        return given

    def rundir(self) -> str:
        """The directory twistd was told to change to; relative paths count from there."""
        return str(self.parent["rundir"]) if self.parent is not None and "rundir" in self.parent else "."

    def __str__(self) -> str:
        """The text of ``--help``."""
        return "\n".join(self._help_lines())

    def getSynopsis(self) -> str:
        """How the command is written."""
        return f"Usage: twistd [twistd options] {self.settings_type.program} [options]"

    def _help_lines(self) -> Iterator[str]:
        yield self.getSynopsis()
        yield ""
        yield from textwrap.wrap(
            "A flag wins over its environment variable, and that over the key in the YAML file. Secrets are set by"
            " environment, by the variable with _FILE at its end, or in the YAML file.",
            width=100,
        )
        yield ""
        yield from _help_of("--config=FILE", CONFIG_ENV, "A YAML file of options.")
        for row in options_of(self.settings_type):
            default = f" Default {row.shown_default}." if row.shown_default else ""
            yield from _help_of(_written(row), _environment(row), row.help + default)
        yield from _help_of("--version", "", "Show the version and exit.")
        yield from _help_of("--help", "", "Show this and exit.")

    def _switch_without_value(self, word: str) -> str:
        """``--switch=false`` as ``--no-switch``: other programs of this family take that form."""
        name, separator, value = word.partition("=")
        if not separator or [name.removeprefix("--"), None, ""] not in self.optFlags:
            return word
        return name if parse_switch(value) else "--no-" + name.removeprefix("--")

    def _explained(self, problem: str) -> str:
        found = _UNKNOWN.fullmatch(problem)
        if found is None:
            return problem
        for row in options_of(self.settings_type):
            if row.secret and found[1] == row.flag:
                return f"--{row.flag} is a secret and no flag takes it: set {row.env}, {row.env_file} or the YAML key"
        known = ["--" + row.flag for row in options_of(self.settings_type) if not row.secret]
        return f"unknown option --{found[1]}{suggestion('--' + found[1], known)}"

    def _refuse(self, text: str) -> NoReturn:
        sys.stderr.write(f"{self.settings_type.program}: {text}\n")
        raise SystemExit(2)


def _written(row: Option) -> str:
    if row.secret:
        return "(secret)"
    if row.is_switch:
        return f"--{row.flag}, --no-{row.flag}"
    return f"--{row.flag}={'PATH' if row.kind.name == 'path' else row.kind.name.split(' ')[0].strip(',`').upper()}"


def _environment(row: Option) -> str:
    return f"{row.env}, {row.env_file}" if row.secret else row.env


def _help_of(flag: str, env: str, text: str) -> Iterator[str]:
    yield f"  {flag}" + (f"  [{env}]" if env else "")
    yield from textwrap.wrap(text, width=100, initial_indent=" " * 8, subsequent_indent=" " * 8)
