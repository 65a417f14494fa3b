"""Migrations: at the same moment, of a newer version, and when they can't be."""

from __future__ import annotations

import subprocess
import sys

import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from localai_dist import __version__
from localai_dist.store.dsn import UnreadableDsn
from localai_dist.store.errors import NewerSchema, StoreUnavailable
from localai_dist.store.schema import SCHEMA_VERSION, migrate_sync, migrations
from localai_dist.testing.databases import Databases, shared

MIGRATE = "import sys; from localai_dist.store.schema import migrate_sync; sys.stdin.read(1); migrate_sync(sys.argv[1])"


class MigrationTests(SynchronousTestCase):
    """On an empty database of its own each time."""

    def setUp(self) -> None:
        """An empty database."""
        self.databases: Databases = shared()
        self.url = self.databases.empty()
        self.name = self.url.split("@/", 1)[1].split("?", 1)[0]
        self.addCleanup(self.databases.drop, self.url)

    def ask(self, sql: str) -> list[tuple[object, ...]]:
        """Rows of the test's database."""
        return self.databases.server.run(sql, self.name)

    def test_four_at_once_make_the_tables_once(self) -> None:
        """Four programs start at the same moment on an empty database: one migrates, all go on (WALK-14)."""
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", MIGRATE, self.url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for _ in range(4)
        ]
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write(b"x")
            racer.stdin.flush()
        outputs = [racer.communicate(timeout=60)[0] for racer in racers]
        self.assertEqual(([racer.returncode for racer in racers], outputs), ([0] * 4, [b""] * 4))
        versions = self.ask("select version, written_by from schema_versions order by version")
        self.assertEqual(versions, [(step.version, __version__) for step in migrations()])

    def test_again_changes_nothing(self) -> None:
        """A second start finds everything done and keeps what is in the tables."""
        migrate_sync(self.url)
        self.ask("insert into instances (id) values ('here')")
        migrate_sync(self.url)
        self.assertEqual(self.ask("select id from instances"), [("here",)])

    def test_a_newer_schema_is_refused(self) -> None:
        """A database written by a newer version is refused, naming both versions, and not touched (WALK-14)."""
        migrate_sync(self.url)
        self.ask(f"insert into schema_versions values ({SCHEMA_VERSION + 3}, 'later', '9.9.9')")
        error = self.assertRaises(NewerSchema, migrate_sync, self.url)
        self.assertIn(f"schema version {SCHEMA_VERSION + 3}, written by localai-dist 9.9.9", str(error))
        self.assertIn(f"localai-dist {__version__}, which knows schema version {SCHEMA_VERSION}", str(error))
        self.assertEqual((error.found, error.known), (SCHEMA_VERSION + 3, SCHEMA_VERSION))

    def test_a_failing_step_leaves_nothing(self) -> None:
        """If a statement of a migration fails, the database is as it was, and the error is one line."""
        self.ask("create view node_models as select 1 as one")
        error = self.assertRaises(StoreUnavailable, migrate_sync, self.url)
        self.assertNotIn("\n", str(error))
        self.assertIn("can't prepare the tables", str(error))
        self.assertEqual(self.ask("select to_regclass('instances') is null"), [(True,)])

    def test_an_unreachable_database_is_one_line_without_the_password(self) -> None:
        """A wrong or unreachable URL is told in one clear line that has no secret in it (WALK-14, WALK-23)."""
        for url in (
            "postgresql://ann:hush@127.0.0.1:1/x?connect_timeout=1",
            "host=/nowhere user=ann password=hush dbname=x",
        ):
            text = str(self.assertRaises(StoreUnavailable, migrate_sync, url))
            self.assertIn("can't connect to the database at ann@", text)
            self.assertNotIn("hush", text)
            self.assertNotIn("\n", text)
        text = str(self.assertRaises(UnreadableDsn, migrate_sync, "postgresql://ann:hu sh@[/x"))
        self.assertNotIn("hu sh", text)

    def test_pending_ends_by_approval_alone(self) -> None:
        """The database itself refuses a node that is healthy without being approved."""
        migrate_sync(self.url)
        self.ask("insert into backend_nodes (name) values ('new')")
        for status in ("healthy", "draining", "offline", "unhealthy"):
            self.assertRaises(psycopg2.errors.CheckViolation, self.ask, f"update backend_nodes set status = '{status}'")
