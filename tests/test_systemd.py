"""The units an operator copies to /etc/systemd/system."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

ROOT = Path(__file__).resolve().parent.parent
UNITS = sorted((ROOT / "systemd").glob("*.service"))


class UnitTests(SynchronousTestCase):
    """Each unit is what systemd accepts."""

    def setUp(self) -> None:
        if shutil.which("systemd-analyze") is None:
            raise SkipTest("systemd-analyze is not installed")

    def verify(self, text: str, name: str) -> subprocess.CompletedProcess[str]:
        """What systemd says of a unit whose ExecStart points at the interpreter under test's folder."""
        folder = Path(tempfile.mkdtemp(dir=self.mktemp_parent()))
        unit = folder / name
        unit.write_text(text.replace("/opt/localai-dist/bin", str(Path(sys.executable).parent)))
        return subprocess.run(
            ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)],
            capture_output=True,
            text=True,
        )

    def mktemp_parent(self) -> str:
        """A folder of this test's own."""
        folder = Path(self.mktemp())
        folder.mkdir(parents=True)
        return str(folder.resolve())

    def test_there_is_one_per_daemon(self) -> None:
        """Frontend, worker and agent worker each have a unit (WALK-19)."""
        self.assertEqual([unit.stem for unit in UNITS], ["localai-agent-worker", "localai-frontend", "localai-worker"])

    def test_units_verify(self) -> None:
        """``systemd-analyze verify`` has nothing to say about any of them (WALK-19)."""
        for unit in UNITS:
            done = self.verify(unit.read_text(), unit.name)
            self.assertEqual((done.returncode, done.stderr), (0, ""), unit.name)

    def test_the_check_can_fail(self) -> None:
        """A unit with an unknown key is noticed, so the check above means something."""
        done = self.verify(UNITS[0].read_text().replace("Restart=always", "Restrat=always"), UNITS[0].name)
        self.assertIn("Restrat", done.stderr)

    def test_no_secret_has_a_place_on_a_command_line(self) -> None:
        """Settings come from a file only root reads; no ExecStart carries a token (WALK-23)."""
        for unit in UNITS:
            line = next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
            self.assertNotRegex(line, "token|key|password")
