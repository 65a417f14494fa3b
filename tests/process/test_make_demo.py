"""``make demo`` as a newcomer meets it: no PostgreSQL, no compiler, root or an ordinary user, a Python without venv."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from localai_dist.testing.waiting import until
from tests.process import kit
from tests.process.kit import NAIROBI, capital_of_kenya

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = ("pg_", "psql", "initdb", "postgres", "gcc", "g++", "cc", "c++", "c89", "c99", "clang", "python")
SYSTEM_PYTHON = Path("/usr/bin/python3")
INSTALL_BOUND = 900.0
"""How long a start may take that installs first (s)."""
LAST_WORDS = "Ctrl-C stops it"
"""What the last line begins with that a start prints; the ready file is there before the first."""


@pytest.fixture
def home() -> Iterator[Path]:
    """A 0700 home with a copy of the checkout in it."""
    with kit.open_folder("home") as folder:
        folder.chmod(0o700)
        copy_checkout(folder / "localai-dist")
        yield folder


def copy_checkout(where: Path) -> Path:
    """The files git tracks, as a clone would have them: one that was never added is missing."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, where / name)
    return where


def poor_path(folder: Path, *, python: Path = Path(sys.executable)) -> str:
    """A PATH with the system's tools, but nothing of PostgreSQL and no compiler."""
    folder.mkdir()
    for tool in (*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()):
        if not tool.name.startswith(HIDDEN) and not (folder / tool.name).is_symlink():
            (folder / tool.name).symlink_to(tool)
    (folder / "python3").symlink_to(python)
    assert not any(shutil.which(tool, path=str(folder)) for tool in ("pg_ctl", "initdb", "postgres", "gcc", "cc"))
    return str(folder)


def borrow_venv(folder: Path) -> None:
    """
    A venv as ``make`` leaves it, made of links to this one.

    Installing into it would change this very venv; ``test_make_demo_from_a_clone`` has one of its own.
    """
    folder.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name not in (".run", ".test"):
            (folder / entry.name).symlink_to(entry)
    for stamp in (".run", ".test"):
        (folder / stamp).touch()


def bare_environment(home: Path, path: str, **more: str) -> dict[str, str]:
    """What a fresh login has."""
    return {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", **more}


@contextmanager
def started(
    argv: list[str], cwd: Path, env: Mapping[str, str], ready: Path, *, bound: float = 120, **identity: Any
) -> Iterator[dict[str, Any]]:
    """A demo started by ``argv`` within ``bound`` seconds, all that it prints then printed; its ready file."""
    output = ready.with_suffix(".out")
    with output.open("w") as sink:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **identity,
        )
    try:
        until("the ready file", lambda: ready.exists() or process.poll() is not None, bound)
        until("the last words", lambda: LAST_WORDS in output.read_text() or process.poll() is not None, 30)
        assert process.poll() is None, output.read_text()
        yield {**json.loads(ready.read_text()), "output": output}
    finally:
        tree = kit.descendants(process.pid) | {process.pid}
        for pid in tree:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        process.wait(20)
        until("the end of every process", lambda: not kit.living(tree), 15)


def test_make_demo_without_postgresql_or_compiler(home: Path) -> None:
    """From a 0700 home, with no PostgreSQL or compiler on PATH, ``make demo`` answers and says how to ask (WALK-1)."""
    checkout = home / "localai-dist"
    borrow_venv(checkout / ".venv")
    path = poor_path(home / "bin")
    ready = home / "ready.json"
    words = f"--http-port 0 --postgres embedded --ready-file {ready}"
    argv = [str(shutil.which("make")), "demo", f"DEMO={words}"]
    env = bare_environment(home, path, PYTHONPATH=str(checkout))  # the borrowed venv leads to this checkout
    with started(argv, checkout, env, ready) as demo:
        assert all(demo[kind][0]["env"]["PYTHONPATH"] == str(checkout) for kind in ("frontends", "workers"))
        assert capital_of_kenya(demo) == NAIROBI
        said = demo["output"].read_text()
        asked = subprocess.run(["sh", "-c", printed_curl(said)], env=env, cwd=checkout, capture_output=True, text=True)
        assert NAIROBI in asked.stdout, asked.stderr
    assert "(embedded)" in said
    for frontend in demo["frontends"]:
        assert frontend["url"] in said
    assert demo["api_key"] in said
    assert demo["log_dir"] in said and demo["state"] in said
    for step in ("starting PostgreSQL", "starting 2 frontends", "starting 2 workers"):
        assert step in said
    assert Path(demo["state"]).is_relative_to(checkout)


def printed_curl(said: str) -> str:
    """The ``curl`` that a demo prints for its user to copy, with its continued lines."""
    lines = said.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  curl "))
    last = next(number for number, line in enumerate(lines) if number >= first and not line.endswith("\\"))
    return "\n".join(lines[first : last + 1])


def test_make_installs_nothing_twice(home: Path) -> None:
    """With an unchanged setup.cfg neither ``make demo`` nor ``make test`` installs anything (WALK-18)."""
    checkout = home / "localai-dist"
    borrow_venv(checkout / ".venv")

    def installs(target: str) -> bool:
        words = [str(shutil.which("make")), "-n", target]
        done = subprocess.run(words, cwd=checkout, env=bare_environment(home, os.environ["PATH"]), capture_output=True)
        assert done.returncode == 0, done.stderr
        return b"pip " in done.stdout

    assert not installs("demo") and not installs("test")
    later = (checkout / ".venv" / ".test").stat().st_mtime + 10
    os.utime(checkout / "setup.cfg", (later, later))
    assert installs("demo") and installs("test")


@pytest.mark.slow
def test_make_demo_from_a_clone() -> None:
    """
    From a fresh clone ``make demo`` makes a venv and installs into it, says so before it does, and answers; the second
    run needs no index (WALK-1, WALK-18). It needs the package index, or what pip's environment names instead of it.
    """
    with kit.open_folder("clone") as home:
        checkout, ready = home / "localai-dist", home / "ready.json"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
        path = poor_path(home / "bin", python=Path(sys.executable).resolve())
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        env |= {"PATH": path, "PYTHONUNBUFFERED": "1"}
        argv = [str(shutil.which("make")), "demo", f"DEMO=--http-port 0 --postgres embedded --ready-file {ready}"]
        with started(argv, checkout, env, ready, bound=INSTALL_BOUND) as demo:
            assert capital_of_kenya(demo) == NAIROBI
            assert demo["frontends"][0]["argv"][0].startswith(str(checkout / ".venv"))
            said = demo["output"].read_text().splitlines()
        assert said[0] == "==> creating .venv"
        assert said[1].startswith("==> installing localai-dist[llama,embedded] into .venv (a minute or two")
        ready.unlink()
        offline = {**env, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(home / "nothing")}
        with started(argv, checkout, offline, ready) as demo:
            assert capital_of_kenya(demo) == NAIROBI
            assert "==>" not in demo["output"].read_text()


def test_demo_as_an_ordinary_user(home: Path) -> None:
    """An ordinary user without any right but to their own folder runs the demo, model included (WALK-1)."""
    if os.geteuid() != 0:
        pytest.skip("this user is an ordinary one: every other test shows it")
    if not SYSTEM_PYTHON.exists() or f"{sys.version_info[0]}.{sys.version_info[1]}" not in os.readlink(SYSTEM_PYTHON):
        pytest.skip(f"no {SYSTEM_PYTHON} of this version that an ordinary user can run")
    nobody = pwd.getpwnam("nobody")
    checkout = home / "localai-dist"
    for folder, _, files in os.walk(home):
        for name in (folder, *(os.path.join(folder, file) for file in files)):
            os.chown(name, nobody.pw_uid, nobody.pw_gid)
    ready = home / "ready.json"
    env = bare_environment(home, os.environ["PATH"], PYTHONPATH=f"{checkout}:{sysconfig.get_path('purelib')}")
    words = ["--http-port", "0", "--ready-file", str(ready), "--state", str(home / "state")]
    argv = [str(SYSTEM_PYTHON), "-m", "localai_dist.cli.operator.main", "demo", *words]
    identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    with started(argv, checkout, env, ready, **identity) as demo:
        assert Path(f"/proc/{demo['workers'][0]['pid']}").stat().st_uid == nobody.pw_uid
        assert capital_of_kenya(demo) == NAIROBI


def test_a_missing_venv_module_is_named(home: Path) -> None:
    """Where Python came without ``venv``, one line names the package that brings it (WALK-1)."""
    broken = home / "python-without-venv"
    broken.write_text(f'#!/bin/sh\ncase "$*" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    broken.chmod(0o755)
    path = poor_path(home / "bin", python=broken)
    done = subprocess.run(
        [str(shutil.which("make")), "demo"],
        cwd=home / "localai-dist",
        env=bare_environment(home, path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "apt-get install python3-venv" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (home / "localai-dist" / ".venv").exists()
