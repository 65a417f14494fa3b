"""``docs/reference/timers.md`` against the code: every timer is on it, with its default, and the order it promises."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.backoff import Backoff
from localai_dist.settings.agent import AgentSettings
from localai_dist.settings.frontend import FrontendSettings
from localai_dist.settings.kinds import DURATION, MAYBE_DURATION
from localai_dist.settings.option import options_of
from localai_dist.settings.worker import WorkerSettings
from localai_dist.units import format_duration
from tests.support.pages import ROOT

PAGE = ROOT / "docs/reference/timers.md"
PACKAGE = ROOT / "localai_dist"
DAEMONS = (FrontendSettings, WorkerSettings, AgentSettings)
OUTSIDE = {"testing", "rpc", "backends", "operator"}
"""Folders whose clocks are not on the way of a request."""
NO_TIMERS = {
    "httpapi.errors.CAPACITY_RETRY": "advice to a client",
    "loads.budget.RETRY_AFTER_MOST": "advice to a client",
    "grpcclient.framing._LONGEST_TIMEOUT": "the largest number a header holds",
    "httpapi.resource.LOG_AGAIN": "how often the log says the same",
    "loads.speed.WINDOW": "what a shown rate is measured over",
    "loads.speed.LEAST_MEASURE": "the same",
    "staging.hold._TOUCHES_PER_STALL": "a count",
    "loads.endings.KEPT": "how long old measurements are of use",
    "mux.pacing.PING_INTERVAL": "pacing, below a second",
    "mux.stream.PAUSE": "pacing, below a second",
    "mux.window.CREDIT_TIME": "pacing, below a second",
    "mux.window.RATE_SPAN": "pacing, below a second",
}
"""Constants that look like timers, and what they are."""

_ENDINGS = re.compile(
    r"(WITHIN|TIMEOUT|EVERY|INTERVAL|AFTER|WAIT|SILENCE|POLL|AGAIN|BEAT|GRACE|STALL|RETRY|BACKOFF|LINGER|QUARANTINE)$"
)
_NUMBER = re.compile(r"[\d._]+( \* [\d._]+)*( \* (SECOND|MINUTE|HOUR))?|SECOND|MINUTE|HOUR")
_SECONDS = re.compile(r"\(s\)|\(s, |\bSeconds\b|\bso many seconds\b|# s\b")


def value_of(name: str) -> Any:
    """What ``module.NAME``, ``module.Class.field``, ``module.CONSTANT.field`` or ``module.callable(parameter)`` is."""
    path, _, parameter = name.rstrip(")").partition("(")
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        if (PACKAGE / Path(*parts[:cut])).with_suffix(".py").exists():
            break
    else:
        raise LookupError(f"no module of this package begins {name}")
    found: Any = importlib.import_module(".".join(["localai_dist", *parts[:cut]]))
    for part in parts[cut:]:
        found = _default(found, part) if _is_field(found, part) else getattr(found, part)
    return inspect.signature(found).parameters[parameter].default if parameter else found


def _is_field(found: Any, name: str) -> bool:
    return isinstance(found, type) and dataclasses.is_dataclass(found) and name in found.__dataclass_fields__


def _default(found: Any, name: str) -> Any:
    if found in DAEMONS:
        return next(row.default for row in options_of(found) if row.name == name)
    return found.__dataclass_fields__[name].default


def seconds_of(name: str) -> float:
    """A timer's default (s)."""
    value = value_of(name)
    if value is Backoff or isinstance(value, Backoff):
        raise LookupError(f"{name} is two numbers: say which")
    return float(value)


def default_of(name: str) -> str:
    """The same as the page has it."""
    value = value_of(name)
    if value is Backoff:
        value = Backoff()
    if isinstance(value, Backoff):
        return f"{format_duration(value.first)} to {format_duration(value.cap)}"
    return format_duration(float(value))


def constants() -> Iterator[str]:
    """Every constant of the package that looks like a time: a plain number that says seconds, or is named like one."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if not OUTSIDE & set(parts):
            source = path.read_text(encoding="utf-8")
            yield from (".".join([*parts, name]) for name in _times(source))


def _times(source: str) -> Iterator[str]:
    lines = source.splitlines()
    body = ast.parse(source).body
    for statement, after in zip(body, [*body[1:], None], strict=True):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        value = getattr(statement, "value", None)
        if not isinstance(target, ast.Name) or value is None or not target.id.lstrip("_").isupper():
            continue
        written = ast.unparse(value)
        said = lines[statement.lineno - 1]
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            said += " " + str(after.value.value)
        named = _SECONDS.search(said) or _ENDINGS.search(target.id) or re.search("SECOND|MINUTE|HOUR", written)
        if written.startswith("Backoff(") or (named and _NUMBER.fullmatch(written)):
            yield target.id


def tables() -> Iterator[list[str]]:
    """The cells of every line of a table, headings aside."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def timers() -> dict[str, list[str]]:
    """The page's timers: name -> default, knob, what it bounds."""
    return {cells[0].strip("`"): cells[1:] for cells in tables() if len(cells) == 4}


class TimerTests(SynchronousTestCase):
    """The page."""

    def test_defaults(self) -> None:
        """Each timer of the page exists and has the default that it says, and what it bounds is told (BR-081)."""
        for name, (default, _, bounds) in timers().items():
            self.assertEqual(default, default_of(name), name)
            self.assertTrue(bounds, name)

    def test_every_constant_is_there(self) -> None:
        """Every constant that is a time is on the page, or is named here with what else it is (BR-081)."""
        found = set(constants())
        self.assertEqual(found - set(timers()) - set(NO_TIMERS), set())
        self.assertEqual(set(NO_TIMERS) - found, set())

    def test_every_knob_is_there(self) -> None:
        """Every option that is a duration is some timer's knob, with its default; no other is named (BR-081)."""
        known: dict[str, set[str]] = {}
        for settings in DAEMONS:
            for row in options_of(settings):
                if row.kind in (DURATION, MAYBE_DURATION):
                    known.setdefault(row.env, set()).add("" if row.default is None else format_duration(row.default))
        shown: dict[str, set[str]] = {}
        for default, knob, _ in timers().values():
            shown.setdefault(knob.strip("`"), set()).add(default)
        self.assertEqual(set(shown) - {"–"}, set(known))
        for env, defaults in known.items():
            self.assertTrue(defaults - {""} <= shown[env], env)

    def test_which_outlasts_which(self) -> None:
        """No timer is longer than the one that encloses it, as the page says (BR-081)."""
        orders = [cells for cells in tables() if len(cells) == 3]
        self.assertGreater(len(orders), 20)
        for shorter, longer, why in orders:
            parts, (whole,) = re.findall(r"`([^`]+)`", shorter), re.findall(r"`([^`]+)`", longer)
            self.assertLessEqual(sum(map(seconds_of, parts)), seconds_of(whole), f"{shorter} {longer}: {why}")

    def test_constants_are_found(self) -> None:
        """A constant that says seconds, is made of them, or is named like a time is found; sizes and counts are not."""
        times = ["A = 1.0  # s", "B = 2.0", '"""Seconds."""', "C = 3 * MINUTE", "X_WITHIN = 4", "D = Backoff(cap=1)"]
        source = "\n".join([*times, "E = 5", "F: Final = 6", "X_EVERY = MiB"])
        self.assertEqual(list(_times(source)), ["A", "B", "C", "X_WITHIN", "D"])
