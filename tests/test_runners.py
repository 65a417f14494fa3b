"""The test runner itself: every file is run once, and a run of nothing is a failure."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests import __main__ as runner

ROOT = Path(runner.__file__).resolve().parent


class PartitionTests(SynchronousTestCase):
    """Which runner runs which file."""

    def test_each_file_has_exactly_one_runner(self) -> None:
        """Every test file of the repository is run by trial or by pytest, and by no more than one (WALK-18)."""
        with_trial = {ROOT.parent / (name.replace(".", "/") + ".py") for name in runner.trial_modules()}
        with_pytest = {ROOT.parent / name for name in runner.process_files()}
        self.assertEqual(with_trial & with_pytest, set())
        self.assertEqual(with_trial | with_pytest, set(ROOT.rglob("test_*.py")))

    def test_every_folder_of_tests_is_a_package(self) -> None:
        """A folder without ``__init__.py`` would be passed over in silence, so there is none (WALK-18)."""
        folders = {path.parent for path in ROOT.rglob("test_*.py") if path.parent.name != "process"}
        self.assertEqual([str(folder) for folder in folders if not (folder / "__init__.py").exists()], [])


class CountTests(SynchronousTestCase):
    """What the runner reads from trial's and pytest's reports."""

    def test_trial_success(self) -> None:
        """Successes and skips are counted apart."""
        self.assertEqual(runner.trial_count("PASSED (skips=2, successes=10)\n", 0), runner.Count(10, 0, 2))

    def test_what_was_not_run_is_named(self) -> None:
        """A peer that is not on this machine is named in the last lines, once for all its tests (MUX-9)."""
        skipped = "[SKIPPED]\nyamux peer in Go not run: no go\n\ntests.interop.test_go.GoTests.test_x\n"
        count = runner.trial_count(f"{skipped}{skipped}PASSED (skips=2, successes=1)\n", 0)
        self.assertEqual(count, runner.Count(1, 0, 2, ("yamux peer in Go not run: no go",)))
        said = StringIO()
        self.patch(runner, "PARTS", {"all": [("one", lambda: count)]})
        with redirect_stdout(said):
            self.assertEqual(runner.main(["all"]), 0)
        self.assertEqual(
            said.getvalue().splitlines()[-2:],
            ["  SKIPPED: yamux peer in Go not run: no go", "1 passed, 0 failed, 2 skipped"],
        )

    def test_trial_failure(self) -> None:
        """Failures, errors and unexpected successes all count as failed."""
        output = "FAILED (failures=1, errors=2, unexpectedSuccesses=1, successes=3)\n"
        self.assertEqual(runner.trial_count(output, 1), runner.Count(3, 4, 0))

    def test_trial_that_died_without_a_count_failed(self) -> None:
        """A runner that ended without its last line is one failure, never a pass (WALK-18)."""
        self.assertEqual(runner.trial_count("Segmentation fault\n", 139), runner.Count(0, 1, 0))

    def test_pytest_without_a_report_failed(self) -> None:
        """The same for pytest: no report is one failure (WALK-18)."""
        self.assertEqual(runner.junit_count(ROOT / "no-such-report.xml", 0), runner.Count(0, 1, 0))

    def test_nothing_selected_is_a_failure(self) -> None:
        """A part that ran nothing makes the whole run fail (WALK-18)."""
        self.patch(runner, "PARTS", {"all": [("empty", runner.Count)]})
        self.assertEqual(runner.main(["all"]), 1)
        self.patch(runner, "PARTS", {"all": [("one", lambda: runner.Count(passed=1))]})
        self.assertEqual(runner.main(["all"]), 0)
