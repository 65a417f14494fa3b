"""What a user gets: the wheel, the plugins, and a checkout that works without installing."""

from __future__ import annotations

import email
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
DAEMONS = ("localai-frontend", "localai-worker", "localai-agent-worker")


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A finished command with its output as text."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LOCALAI_", "PYTHONPATH"))}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**clean, **environment}, capture_output=True, text=True
    )


@dataclass(frozen=True)
class Installed:
    """
    The wheel, built once, and an empty venv it is installed into.

    The venv sees the dependencies through a path file instead of downloading them again; the package itself is only
    what the wheel brought, which ``test_the_wheel_is_what_runs`` checks.
    """

    folder: Path
    wheel: Path
    python: Path


@functools.cache
def installed() -> Installed:
    """Build and install the wheel, once for all tests of this module (trial runs no ``setUpClass``)."""
    folder = ROOT / "build" / "tests" / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    source = copy_sources(folder / "source")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    built = run(*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", folder, source, cwd=folder)
    assert built.returncode == 0, built.stderr
    wheel = next(folder.glob("*.whl"))
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    done = run(*pip, "--python", python, "install", "--no-deps", wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    # Path files add behind the venv's own folder, so the wheel's package wins over the checkout's.
    site = next((folder / "venv" / "lib").glob("python3*")) / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(folder, wheel, python)


def copy_sources(where: Path) -> Path:
    """The files the package is built from, as a clone has them: one that was never added to git is missing."""
    listed = run("git", "ls-files", "-z", cwd=ROOT).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, where / name)
    return where


class WheelTests(SynchronousTestCase):
    """The built wheel, installed beside nothing of the checkout."""

    def setUp(self) -> None:
        self.folder, self.wheel, self.python = installed().folder, installed().wheel, installed().python

    def test_the_wheel_is_what_runs(self) -> None:
        """The empty venv imports the package from the wheel, not from the checkout (WALK-13)."""
        done = run(self.python, "-c", "import localai_dist; print(localai_dist.__file__)", cwd=self.folder)
        self.assertTrue(done.stdout.startswith(str(self.folder / "venv")), done.stdout + done.stderr)

    def test_daemons_list_their_options(self) -> None:
        """After ``pip install`` of the wheel, twistd knows the three daemons and each lists its options (WALK-13)."""
        for daemon in DAEMONS:
            done = run(self.python, BIN / "twistd", daemon, "--help", cwd=self.folder)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("--data-path", done.stdout)

    def test_the_wheel_has_what_is_not_python(self) -> None:
        """SQL, the contract, the backend in the box and the demo's models are in the wheel (WALK-13)."""
        names = zipfile.ZipFile(self.wheel).namelist()
        for wanted in (
            "twisted/plugins/localai_dist_plugin.py",
            "localai_dist/rpc/backend.proto",
            "localai_dist/backends/index.yaml",
            "localai_dist/backends/llama_cpp/run.sh",
            "localai_dist/testing/models/tiny-facts-1m-q8_0.gguf",
        ):
            self.assertIn(wanted, names)
        self.assertTrue(any(name.startswith("localai_dist/store/sql/") for name in names))
        self.assertTrue(any(name.startswith("localai_dist/store/migrations/") for name in names))
        self.assertNotIn("twisted/__init__.py", names)
        self.assertNotIn("twisted/plugins/__init__.py", names)

    def test_no_broker_client_is_a_dependency(self) -> None:
        """The installed distribution depends on no message broker's client (WALK-8)."""
        archive = zipfile.ZipFile(self.wheel)
        meta = next(name for name in archive.namelist() if name.endswith("METADATA"))
        needs = email.message_from_bytes(archive.read(meta)).get_all("Requires-Dist", [])
        self.assertTrue(needs)
        for brokers in ("nats", "pika", "kafka", "redis", "celery", "zmq", "paho"):
            self.assertNotIn(brokers, " ".join(needs).lower())


class CheckoutTests(SynchronousTestCase):
    """The checkout itself."""

    def test_a_checkout_works_without_install(self) -> None:
        """With the dependencies there, ``PYTHONPATH=. twistd … --help`` works in a bare copy (WALK-13)."""
        folder = copy_sources(Path(self.mktemp()).resolve())
        for daemon in DAEMONS:
            done = run(BIN / "twistd", daemon, "--help", cwd=folder, PYTHONPATH=".")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("--data-path", done.stdout)
        where = run(
            sys.executable, "-c", "import localai_dist; print(localai_dist.__file__)", cwd=folder, PYTHONPATH="."
        )
        self.assertTrue(where.stdout.startswith(str(folder)), where.stdout)
