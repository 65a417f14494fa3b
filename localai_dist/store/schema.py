"""Bring the tables up to this program's version, under one lock; refuse newer ones. Synchronous: before the reactor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from typing import Final

import psycopg2
from psycopg2.extensions import connection as PsycopgConnection

from localai_dist import __version__
from localai_dist.store.dsn import one_line, redact, with_defaults
from localai_dist.store.errors import NewerSchema, StoreUnavailable

LOCK_KEY = 105
"""Advisory lock of migrations. Source: internals §2f."""

LOCK_WAIT = 60  # s; another frontend that migrates right now is waited for so long
OLDEST_SERVER = 150000

_FILE = re.compile(r"(\d{4})_(\w+)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """One step: ``migrations/NNNN_name.sql``."""

    version: int
    name: str
    sql: str


def migrations() -> list[Migration]:
    """
    Every step, in order.

    Raises:
        ValueError: numbers do not run 1, 2, 3, …
    """
    folder = resources.files(__package__) / "migrations"
    found = []
    for entry in folder.iterdir():
        if (name := _FILE.fullmatch(entry.name)) is not None:
            found.append(Migration(int(name[1]), name[2], entry.read_text(encoding="utf-8")))
    found.sort(key=lambda step: step.version)
    if [step.version for step in found] != list(range(1, len(found) + 1)):
        raise ValueError("migrations are not numbered 1, 2, 3, …")
    return found


SCHEMA_VERSION: Final = len(migrations())
"""The schema version this program writes and knows."""


def migrate_sync(dsn: str) -> None:
    """
    Create or upgrade the tables. Concurrent callers wait for each other; one migrates, the rest find it done.

    Everything happens in one transaction, so a failure leaves the database as it was.

    Raises:
        NewerSchema: written by a newer version of this program; nothing was changed.
        StoreUnavailable: unreachable, refused, older than PostgreSQL 15, or the statements failed; one line, no secret.
        UnreadableDsn: the URL can't be read.
    """
    connection = _connect(dsn)
    try:
        with connection:
            _migrate(connection)
    except psycopg2.Error as error:
        raise StoreUnavailable(
            f"can't prepare the tables in the database at {redact(dsn)}: {one_line(str(error), dsn)}"
        ) from None
    finally:
        connection.close()


def _connect(dsn: str) -> PsycopgConnection:
    full = with_defaults(dsn, application_name="localai-dist migrate")
    try:
        connection: PsycopgConnection = psycopg2.connect(full)
    except psycopg2.Error as error:
        raise StoreUnavailable(f"can't connect to the database at {redact(dsn)}: {one_line(str(error), dsn)}") from None
    if connection.server_version < OLDEST_SERVER:
        found = connection.server_version // 10000
        connection.close()
        raise StoreUnavailable(f"the database at {redact(dsn)} is PostgreSQL {found}; 15 or newer is needed")
    return connection


def _migrate(connection: PsycopgConnection) -> None:
    with connection.cursor() as cursor:
        cursor.execute("select set_config('lock_timeout', %s, true)", (f"{LOCK_WAIT}s",))
        cursor.execute("select set_config('statement_timeout', %s, true)", (f"{LOCK_WAIT + 60}s",))
        cursor.execute("select pg_advisory_xact_lock(%s)", (LOCK_KEY,))
        cursor.execute(
            "create table if not exists schema_versions (version int primary key, name text not null,"
            " written_by text not null, written_at timestamptz not null default now())"
        )
        cursor.execute("select version, written_by from schema_versions order by version desc limit 1")
        newest = cursor.fetchone()
        found, writer = newest if newest is not None else (0, "")
        if found > SCHEMA_VERSION:
            raise NewerSchema(found, SCHEMA_VERSION, writer, __version__)
        for step in migrations()[found:]:
            cursor.execute(step.sql)
            cursor.execute(
                "insert into schema_versions (version, name, written_by) values (%s, %s, %s)",
                (step.version, step.name, __version__),
            )
