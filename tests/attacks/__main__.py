"""``python -m tests.attacks [NAME ...]``: break the code on purpose and see the right tests fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.attacks.attack import Attack
from tests.attacks.catalogue import ATTACKS

ROOT = Path(__file__).resolve().parent.parent.parent
#: One test file of processes may start a whole cluster; more than this is a hang.
BOUND = 300.0


def copy_tree(where: Path) -> Path:
    """The files git knows of or would add, as a tree of their own."""
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
    return where


def passes(tree: Path, test: str) -> bool:
    """Whether one test (a trial name, or a pytest node under tests/process) passes in ``tree``."""
    runner = ["pytest", "-q", "-p", "no:cacheprovider"] if test.startswith("tests/process") else ["twisted.trial"]
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
        return False
    return done.returncode == 0


def verdict(attack: Attack, tree: Path) -> list[str]:
    """What is wrong with ``attack``: tests that did not redden, or that it should have left alone."""
    source = tree / attack.file
    text = source.read_text()
    if text.count(attack.old) != 1:
        return [f"its text stands {text.count(attack.old)} times in {attack.file}: the attack is out of date"]
    source.write_text(text.replace(attack.old, attack.new))
    try:
        still_green = [f"did not redden {test}" for test in attack.reddens if passes(tree, test)]
        reddened = [f"reddened {test} too" for test in attack.leaves_green if not passes(tree, test)]
    finally:
        source.write_text(text)
    return still_green + reddened


def main(names: list[str]) -> int:
    """Run the named attacks, or all; 0 only when each did exactly what it should."""
    chosen = [attack for attack in ATTACKS if not names or attack.name in names]
    if not chosen:
        print(f"no such attack; there are: {', '.join(attack.name for attack in ATTACKS)}", file=sys.stderr)
        return 2
    bad = 0
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        tree = copy_tree(Path(folder))
        for attack in chosen:
            wrong = verdict(attack, tree)
            bad += bool(wrong)
            print(f"{attack.name}: {'; '.join(wrong) or 'reddens what it should'}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} attacks proven")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
