"""Databases for tests: one private server for a whole run, one migrated template, a fresh copy for each test class."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from localai_dist.store.schema import migrate_sync
from localai_dist.testing.postgres import PostgresServer

TEMPLATE = "template_of_tests"


class Databases:
    """
    Fresh databases out of a template.

    Args:
        server: a running one.
        prepare: called once with the URL of the template.
    """

    def __init__(self, server: PostgresServer, prepare: Callable[[str], None] = migrate_sync) -> None:
        self.server = server
        self._prepare = prepare
        self._numbers = itertools.count(1)
        self._ready = False

    def fresh(self) -> str:
        """The URL of a new database with the tables in it."""
        if not self._ready:
            self.server.run(f'create database "{TEMPLATE}"')
            self._prepare(self.server.url(TEMPLATE))
            self._ready = True
        return self._create(f'template "{TEMPLATE}"')

    def empty(self) -> str:
        """The URL of a new database without any table."""
        return self._create("template template0")

    def drop(self, url: str) -> None:
        """Drop a database and everybody's connections to it."""
        name = url.split("@/", 1)[1].split("?", 1)[0]
        self.server.run(f'drop database if exists "{name}" with (force)')

    def _create(self, how: str) -> str:
        name = f"test_{os.getpid()}_{next(self._numbers)}"
        self.server.run(f'create database "{name}" {how}')
        return self.server.url(name)


_shared: Databases | None = None


def shared() -> Databases:
    """The run's one server, started at the first call from the main thread, stopped when Python exits."""
    global _shared
    if _shared is None:
        server = private_server()
        _shared = Databases(server)
    return _shared


def private_server(choice: str | None = None) -> PostgresServer:
    """
    A started server in a temporary folder that goes when Python exits.

    Args:
        choice: as for ``PostgresServer``; by default ``LOCALAI_TEST_POSTGRES`` or ``auto``.
    """
    folder = Path(tempfile.mkdtemp(prefix="localai-dist-test-"))
    folder.chmod(0o711)
    chosen = choice or os.environ.get("LOCALAI_TEST_POSTGRES", "auto")
    server = PostgresServer(folder, choice=chosen, durable=False)
    atexit.register(_end, server, folder)
    server.start()
    return server


def _end(server: PostgresServer, folder: Path) -> None:
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)
