"""``python -m tests.attacks [NAME ...]``: break the code on purpose and see the right tests fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from tests.attacks.attack import Attack
from tests.attacks.catalogue import ATTACKS

ROOT = Path(__file__).resolve().parent.parent.parent
#: One test file of processes may start a whole cluster; more than this is a hang, which is neither red nor green.
BOUND = 600.0


def copy_tree(where: Path) -> Path:
    """The files git knows of or would add, as a tree of their own that git tracks: some tests ask git what to copy."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            target = where / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    for words in (["init", "-q"], ["add", "--all"]):
        subprocess.run(["git", *words], cwd=where, check=True)
    return where


class Outcome(Enum):
    """What came of one test (or all of a class or module)."""

    GREEN = "green"
    RED = "red"
    HUNG = "no end"
    NOTHING = "nothing run"


def run(tree: Path, test: str) -> Outcome:
    """Run one test (a trial name, or a pytest node under tests/process) in ``tree``."""
    of_processes = test.startswith("tests/process")
    runner = ["pytest", "-q", "-p", "no:cacheprovider"] if of_processes else ["twisted.trial"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", *runner, test],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=BOUND,
        )
    except subprocess.TimeoutExpired:
        return Outcome.HUNG
    if done.returncode:
        return Outcome.RED
    return Outcome.GREEN if re.search(r"successes=[1-9]|\b[1-9]\d* passed", done.stdout) else Outcome.NOTHING


class Trials:
    """
    Runs tests in one tree, unbroken and broken.

    Args:
        tree: a copy of the checkout, whose files are edited and put back.
        run: runs one test in it.
    """

    def __init__(self, tree: Path, run: Callable[[Path, str], Outcome] = run) -> None:
        self._tree = tree
        self._run = run
        self._unbroken: dict[str, Outcome] = {}

    def verdict(self, attack: Attack) -> list[str]:
        """What is wrong with ``attack``: tests that did not redden, that it should have spared, that prove nothing."""
        texts = {file: (self._tree / file).read_text() for file, _, _ in attack.edits}
        for file, old, _ in attack.edits:
            if texts[file].count(old) != 1:
                return [f"its text stands {texts[file].count(old)} times in {file}: the attack is out of date"]
        before = {test: self._before(test) for test in (*attack.reddens, *attack.leaves_green)}
        for file, old, new in attack.edits:
            (self._tree / file).write_text((self._tree / file).read_text().replace(old, new))
        try:
            after = {test: self._run(self._tree, test) for test, was in before.items() if was is Outcome.GREEN}
        finally:
            for file, text in texts.items():
                (self._tree / file).write_text(text)
        useless = [
            f"{was.value} before anything was broken: {test}" for test, was in before.items() if test not in after
        ]
        wrong = [_wrong(test, after[test], Outcome.RED) for test in attack.reddens if test in after]
        wrong += [_wrong(test, after[test], Outcome.GREEN) for test in attack.leaves_green if test in after]
        return useless + [text for text in wrong if text]

    def _before(self, test: str) -> Outcome:
        """The test in the unbroken tree, run once for all attacks."""
        if test not in self._unbroken:
            self._unbroken[test] = self._run(self._tree, test)
        return self._unbroken[test]


def _wrong(test: str, found: Outcome, wanted: Outcome) -> str:
    """Why ``found`` is not what an attack promises of a test; empty when it is."""
    if found is wanted:
        return ""
    if found is Outcome.HUNG:
        return f"no end within {BOUND:.0f} s, neither red nor green: {test}"
    return f"did not redden {test}" if wanted is Outcome.RED else f"reddened {test} too"


def main(names: list[str]) -> int:
    """Run the named attacks, or all; 0 only when each did exactly what it should."""
    chosen = [attack for attack in ATTACKS if not names or attack.name in names]
    if not chosen:
        print(f"no such attack; there are: {', '.join(attack.name for attack in ATTACKS)}", file=sys.stderr)
        return 2
    bad = 0
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        trials = Trials(copy_tree(Path(folder)))
        for attack in chosen:
            wrong = trials.verdict(attack)
            bad += bool(wrong)
            print(f"{attack.name}: {'; '.join(wrong) or 'reddens what it should'}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} attacks proven")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
