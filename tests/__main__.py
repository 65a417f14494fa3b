"""
Run the tests: ``python -m tests all|check|trial|process|slow``.

Each file under ``tests/`` is run by exactly one runner: pytest has ``tests/process``, trial has everything else. The
last line counts all of it. A part that runs nothing is a failure: it would prove nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "tests"
BIN = Path(sys.executable).parent

#: Third-party code warns about itself at import; its warnings are not ours to fail on.
WARNINGS = ["-W", "error"]
for _known in (
    "ignore::DeprecationWarning:txpostgres",
    "ignore::DeprecationWarning:autobahn",
    "ignore:twisted.web.resource._Unsafe",
    "ignore:Passing pyOpenSSL",
    "ignore:Using readBody with a transport",
):
    WARNINGS += ["-W", _known]


#: Packages without a reactor, clock or chance: ``make check`` keeps every line and branch of them covered.
PURE = ("mux", "wire", "catalog", "reach", "backoff", "ids", "units", "urls", "errors")

#: What ``make check`` leaves to ``make test``: databases, peers, programs, and the long runs over sockets.
NOT_UNIT = (
    "tests.attacks.",
    "tests.backends.test_llama",
    "tests.backends.test_scriptable",
    "tests.db.",
    "tests.interop.",
    "tests.net.test_cycles",
    "tests.net.test_stalls",
    "tests.objects.",
    "tests.staging.test_by_store",
    "tests.test_packaging",
    "tests.worker.test_ports",
    "tests.worker.test_real_backend",
    "tests.worker.test_supervisor",
)


@dataclass(frozen=True)
class Count:
    """
    What one part ran.

    Attributes:
        not_run: why something was skipped, each reason once; shown in the last lines.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    not_run: tuple[str, ...] = ()

    def __add__(self, other: Count) -> Count:
        return Count(
            self.passed + other.passed,
            self.failed + other.failed,
            self.skipped + other.skipped,
            self.not_run + other.not_run,
        )

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def trial_modules() -> list[str]:
    """Every test module that trial runs, as dotted names."""
    found = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "process" not in path.parts)
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in found]


def process_files() -> list[str]:
    """Every test file that pytest runs."""
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / "process").glob("test_*.py"))]


def run(*command: str | Path, **environment: str) -> int:
    """Run ``command`` in the checkout, its output shown as it comes."""
    return subprocess.run([str(part) for part in command], cwd=ROOT, env={**os.environ, **environment}).returncode


def lint() -> Count:
    """Lint, format, types and import layers; each tool counts as one."""
    tools = {
        "ruff check": [BIN / "ruff", "check", "-q", "."],
        "ruff format": [BIN / "ruff", "format", "-q", "--check", "."],
        "mypy": [BIN / "mypy", "--no-error-summary"],
        "import layers": [BIN / "lint-imports", "--no-cache"],
    }
    count = Count()
    for name, command in tools.items():
        began = time.monotonic()
        done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
        good = done.returncode == 0
        print(f"  {name}: {'ok' if good else 'FAILED'} ({time.monotonic() - began:.0f} s)", flush=True)
        if not good:
            print(done.stdout + done.stderr, flush=True)
        count += Count(passed=int(good), failed=int(not good))
    return count


def trial(modules: list[str] | None = None) -> Count:
    """Everything that needs no cluster, in one trial run."""
    log = BUILD / "trial.log"
    command = [sys.executable, *WARNINGS, "-m", "twisted.trial", "--temp-directory", str(BUILD / "trial")]
    with subprocess.Popen(
        [*command, *(modules or trial_modules())],
        cwd=ROOT,
        env={**os.environ, "PYTHONDEVMODE": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        assert child.stdout is not None
        with log.open("w") as copy:
            for line in child.stdout:
                copy.write(line)
                print(line, end="", flush=True)
    return trial_count(log.read_text(), child.returncode)


def trial_count(output: str, status: int) -> Count:
    """The counts in trial's last line; a run that ended without one is a failure."""
    found = re.findall(r"^(?:PASSED|FAILED)(?: \((.*)\))?$", output, flags=re.MULTILINE)
    numbers = dict(part.split("=") for part in found[-1].split(", ") if "=" in part) if found else {}
    failed = sum(int(numbers.get(kind, 0)) for kind in ("failures", "errors", "unexpectedSuccesses"))
    if status and not failed:
        failed = 1
    reasons = dict.fromkeys(re.findall(r"^\[SKIPPED\]\n(.+)$", output, flags=re.MULTILINE))
    return Count(int(numbers.get("successes", 0)), failed, int(numbers.get("skips", 0)), tuple(reasons))


def process(marker: str = "not slow") -> Count:
    """The suites that start real daemons."""
    report = BUILD / "process.xml"
    report.unlink(missing_ok=True)
    status = run(
        sys.executable, "-m", "pytest", "-q", "-m", marker, "--junitxml", report, "--durations=10", *process_files()
    )
    return junit_count(report, status)


def junit_count(report: Path, status: int) -> Count:
    """The counts in pytest's report; a run without a report is a failure."""
    if not report.exists():
        return Count(failed=1)
    suites = ElementTree.parse(report).getroot().findall("testsuite")
    total = {
        kind: sum(int(suite.get(kind, 0)) for suite in suites) for kind in ("tests", "failures", "errors", "skipped")
    }
    failed = total["failures"] + total["errors"]
    if status and not failed:
        failed = 1
    return Count(total["tests"] - failed - total["skipped"], failed, total["skipped"])


def unit_modules() -> list[str]:
    """The trial modules that start no program and take seconds; the pure packages' are run by ``coverage``."""
    return [name for name in trial_modules() if not name.startswith(NOT_UNIT) and not is_pure(name)]


def is_pure(module: str) -> bool:
    """Whether a test module is one of a pure package."""
    return module.split(".")[1].removeprefix("test_") in PURE


def coverage() -> Count:
    """The pure packages keep every line and branch covered by their own tests."""
    source = [f"localai_dist/{name}{'/*' if (ROOT / 'localai_dist' / name).is_dir() else '.py'}" for name in PURE]
    modules = [name for name in trial_modules() if is_pure(name)]
    data, where = f"--data-file={BUILD / 'coverage'}", str(BUILD / "pure")
    began = time.monotonic()
    runner = [sys.executable, "-m", "coverage", "run", "--branch", data, f"--include={','.join(source)}"]
    measured = subprocess.run(
        [*runner, "-m", "twisted.trial", "--temp-directory", where, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    report = subprocess.run(
        [str(BIN / "coverage"), "report", data, "-m", "--skip-covered", "--fail-under=100"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    good = measured.returncode == 0 and report.returncode == 0
    print(
        f"  coverage of {', '.join(PURE)}: {'complete' if good else 'NOT COMPLETE'} ({time.monotonic() - began:.0f} s)"
    )
    if not good:
        print(measured.stdout[-3000:] if measured.returncode else report.stdout, flush=True)
    return Count(passed=int(good), failed=int(not good))


PARTS: dict[str, list[tuple[str, Callable[[], Count]]]] = {
    "all": [("lint, types, layers", lint), ("trial", trial), ("processes", process)],
    "check": [
        ("lint, types, layers", lint),
        ("unit tests", lambda: trial(unit_modules())),
        ("coverage of the pure packages", coverage),
    ],
    "lint": [("lint, types, layers", lint)],
    "trial": [("trial", trial)],
    "process": [("processes", process)],
    "slow": [("slow processes", lambda: process("slow"))],
}


def main(arguments: list[str]) -> int:
    """Run the named parts; the exit status is 0 only when each ran something and nothing failed."""
    if len(arguments) != 1 or arguments[0] not in PARTS:
        print(f"usage: python -m tests {'|'.join(PARTS)}", file=sys.stderr)
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    total, lines, empty = Count(), [], False
    for name, part in PARTS[arguments[0]]:
        print(f"==> {name}", flush=True)
        began = time.monotonic()
        count = part()
        nothing = count == Count()
        empty = empty or nothing
        lines.append(f"  {name}: {count} in {time.monotonic() - began:.0f} s" + (" (NOTHING RAN)" if nothing else ""))
        total += count
    print("\n".join(["", *lines, *(f"  SKIPPED: {reason}" for reason in total.not_run), str(total)]), flush=True)
    return int(bool(total.failed) or empty)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
