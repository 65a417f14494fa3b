"""
Every ``console`` block of the README and of ``docs/`` is run, and prints what its page shows.

A page belongs to one of three worlds (``world_of``): the tutorial has two machines, each a folder with a shell of its
own, beside a real PostgreSQL; the README starts the demo itself; every other page is about the demo, and gets a cluster
of the same code. Each world has one table of what is read differently here than on the page, and nothing else is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from localai_dist.testing.child import checkout, child_environment
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.ports import Ports
from localai_dist.testing.postgres import PostgresServer
from localai_dist.testing.state import State
from localai_dist.worker.ports import bind_probe
from tests.process import kit
from tests.process.console import COMMAND_BOUND, Machine
from tests.process.test_make_demo import borrow_venv
from tests.support.pages import Command, commands_of, pages
from tests.test_packaging import copy_sources

ROOT = checkout()
TUTORIAL = "docs/tutorial/two-machines.md"
PROMISING = ("README.md", TUTORIAL, "docs/howto/models.md", "docs/howto/operate.md", "docs/howto/troubleshooting.md")
"""The pages that promise commands."""
DEMO_KEY = "KEY-FROM-THE-DEMO"
INSTALL_BOUND = 600.0
"""How long one command may take when installing is among them (s)."""


def read(page: str) -> list[Command]:
    """The commands of a page, named from the root of the repository."""
    return commands_of((ROOT / page).read_text(encoding="utf-8"))


def runnable() -> list[str]:
    """Every page that has commands."""
    names = [str(page.relative_to(ROOT)) for page in pages()]
    return [name for name in names if read(name)]


def play(commands: Sequence[Command], table: Mapping[str, str], machines: Mapping[str, Machine]) -> None:
    """Type every command on its machine, in the page's order."""
    for command in commands:
        assert command.machine in machines, f"line {command.number}: no machine {command.machine!r} here"
        machines[command.machine].type(command.mapped(table))
    for machine in machines.values():
        machine.interrupt()


@contextmanager
def two_machines(_page: str, *, install: bool = False) -> Iterator[tuple[dict[str, str], dict[str, Machine]]]:
    """
    The tutorial: PostgreSQL is there, as its root-only block leaves it, and two empty homes.

    Args:
        install: let pip install, from a copy of the sources; without it this environment stands for the installed one.
    """
    ports = Ports()
    port, backends = ports.one(), ports.backends()
    with kit.open_folder("tutorial") as folder, ExitStack() as ending:
        server = PostgresServer(folder / "postgres", durable=False)
        ending.callback(server.stop)
        server.start()
        server.run("create database localai")
        env = {name: value for name, value in child_environment({}).items() if name != "PYTHONPATH" or not install}
        machines = {}
        for name in ("head", "box"):
            (folder / name).mkdir()
            machines[name] = Machine(folder / name, env, bound=INSTALL_BOUND if install else COMMAND_BOUND)
            ending.callback(machines[name].close)
        installed = {
            "python3 -m venv venv": f"ln -s {sys.prefix} venv",
            "venv/bin/pip install ~/localai-dist'[llama]'": "venv/bin/python -c 'import xllamacpp'",
            "venv/bin/pip install ~/localai-dist": "venv/bin/python -c 'import localai_dist'",
        }
        yield (
            {
                **({} if install else installed),
                "~/localai-dist": str(copy_sources(folder / "source") if install else ROOT),
                "postgresql://localai:PASSWORD@127.0.0.1:5432/localai": server.url("localai"),
                '":8080"': f'"127.0.0.1:{port}"',
                "head.example:8080": f"127.0.0.1:{port}",
                "127.0.0.1:20000": f"127.0.0.1:{backends}",
                "127.0.0.1:19999": f"127.0.0.1:{backends - 1}",
                "scp -q": "cp",
                "box.example:localai/": f"{folder}/box/localai/",
            },
            machines,
        )


@contextmanager
def checkout_with_demo(_page: str) -> Iterator[tuple[dict[str, str], dict[str, Machine]]]:
    """The README: it is typed in the checkout, and starts the demo itself."""
    port = free_pair(Ports())
    with kit.open_folder("readme") as folder:
        state = State(folder / "state")
        state.open()
        key = state.secrets().api_key
        state.close()
        venv = folder / "venv"
        borrow_venv(venv)
        machine = Machine(folder, child_environment({}), cwd=ROOT)
        try:
            yield (
                {
                    # -o: whatever the times of files say, nothing is installed.
                    "make demo": f"make -o {venv}/.run demo VENV={venv} DEMO='--state {state.root} --http-port {port}'",
                    "127.0.0.1:8080": f"127.0.0.1:{port}",
                    "127.0.0.1:8081": f"127.0.0.1:{port + 1}",
                    ".venv/bin": f"{venv}/bin",
                    DEMO_KEY: key,
                },
                {"": machine},
            )
        finally:
            machine.close()


@contextmanager
def beside_the_demo(page: str) -> Iterator[tuple[dict[str, str], dict[str, Machine]]]:
    """Every other page: it is typed in the checkout while the demo runs."""
    with kit.open_folder(Path(page).stem) as folder, kit.running(kit.quick_plan(folder / "state")) as cluster:
        machine = Machine(folder, child_environment({}), cwd=ROOT)
        try:
            yield demo_table(cluster), {"": machine}
        finally:
            machine.close()


def demo_table(cluster: Cluster) -> dict[str, str]:
    """What a page about the demo is read as."""
    first, second = (frontend.url.removeprefix("http://") for frontend in cluster.frontends)
    return {
        "127.0.0.1:8080": first,
        "127.0.0.1:8081": second,
        "build/demo/": f"{cluster.state.root}/",
        "$PWD/.venv/bin": f"{sys.prefix}/bin",
        DEMO_KEY: cluster.secrets.api_key,
    }


WORLDS = {"README.md": checkout_with_demo, TUTORIAL: two_machines}


def free_pair(ports: Ports) -> int:
    """The first of two free ports."""
    while True:
        port = ports.one()
        if bind_probe(port + 1):
            return port


@pytest.mark.parametrize("page", runnable())
def test_page_prints_what_it_shows(page: str) -> None:
    """Every command of the page is run as it stands there and prints what the page shows (WALK-19)."""
    with WORLDS.get(page, beside_the_demo)(page) as (table, machines):
        play(read(page), table, machines)


@pytest.mark.slow
def test_tutorial_from_nothing_installed() -> None:
    """The tutorial with its two installs as well; it needs the package index or a cache of it (WALK-13, WALK-19)."""
    with two_machines(TUTORIAL, install=True) as (table, machines):
        play(read(TUTORIAL), table, machines)


@pytest.mark.parametrize("page", PROMISING)
def test_page_has_commands(page: str) -> None:
    """A page that promises commands has some, so the test above has something to run (WALK-19)."""
    assert read(page)


def test_tutorial_table_is_small_and_used() -> None:
    """Each line of the tutorial's table stands for something the tutorial really says, so none is left over."""
    text = (ROOT / TUTORIAL).read_text(encoding="utf-8")
    with two_machines(TUTORIAL) as (table, _):
        assert [shown for shown in table if shown not in text] == []


def test_the_check_can_fail(tmp_path: Path) -> None:
    """A page that shows another output, or a command that fails in silence, is noticed."""
    machine = Machine(tmp_path, child_environment({}))
    try:
        good = "```console\n$ x=1; echo one ...\none ...\n$ echo $x\n1\n$ cat <<'END'\n> two\n> END\ntwo\n```\n"
        play(commands_of(good), {}, {"": machine})
        for bad in ("$ echo one\ntwo", "$ echo one", "$ true\none", "$ false", "$ echo\n...\nlast"):
            with pytest.raises(AssertionError):
                play(commands_of(f"```console\n{bad}\n```\n"), {}, {"": machine})
        with pytest.raises(AssertionError):
            play(commands_of("```console elsewhere\n$ true\n```\n"), {}, {"": machine})
    finally:
        machine.close()


def test_a_foreground_command_ends_at_ctrl_c(tmp_path: Path) -> None:
    """What a page leaves in the foreground stays while the rest is typed, and is gone after Ctrl-C."""
    machine = Machine(tmp_path, child_environment({}))
    stays = "```console foreground\n$ echo $$ > its.id; echo up; sleep 300\nup\n```\n"
    beside = "```console\n$ until [ -s its.id ]; do sleep 0.1; done; kill -0 $(cat its.id) && echo there\nthere\n```\n"
    try:
        play(commands_of(stays + beside), {}, {"": machine})
        assert not kit.living({int((tmp_path / "its.id").read_text())})
    finally:
        machine.close()
