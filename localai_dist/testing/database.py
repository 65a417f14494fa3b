"""The PostgreSQL of a cluster: launched in its state folder, or a running server somebody named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from localai_dist.testing.postgres import PostgresServer
from localai_dist.testing.state import State

DATABASE = "localai"
"""The name of the database inside a launched server."""


class Database(Protocol):
    """What a cluster needs of its PostgreSQL."""

    @property
    def url(self) -> str:
        """A libpq URI, as ``psql`` takes it."""

    def stop(self) -> None:
        """End the server if this process launched it."""


@dataclass(frozen=True, slots=True)
class Named:
    """A server that runs already; nobody here ends it."""

    url: str

    def stop(self) -> None:
        """Nothing: it is not ours."""


@dataclass(frozen=True, slots=True)
class Launched:
    """
    A server of ours, a child of this process.

    Attributes:
        server: for tests that stop, kill and restart it.
    """

    server: PostgresServer

    @property
    def url(self) -> str:
        """A libpq URI; the same after a restart."""
        return self.server.url(DATABASE)

    def stop(self) -> None:
        """End it; its data stay."""
        self.server.stop()


def open_database(kind: str, state: State, say: Callable[[str], None], *, durable: bool = True) -> Database:
    """
    The PostgreSQL for a cluster.

    Args:
        kind: ``auto``, ``system``, ``embedded``, or the URI of a running server.
        state: a launched server's files go into its ``postgres`` folder, and are found there again.
        say: told what is being done.
        durable: False makes a launched server fast and forgetful, for tests.

    Raises:
        LocalAIDistError: no binaries, or the server would not start.
    """
    if "://" in kind:
        return Named(kind)
    # Not ``state.folder``: root's server runs under another uid, which must be able to pass through.
    server = PostgresServer(state.root / "postgres", choice=kind, durable=durable, say=say)
    try:
        server.start()
        if not server.run(f"select 1 from pg_database where datname = '{DATABASE}'"):
            server.run(f"create database {DATABASE}")
    except BaseException:
        server.stop()
        raise
    return Launched(server)
