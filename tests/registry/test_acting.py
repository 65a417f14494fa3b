"""The closed list of what deletes, demotes or evicts."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import localai_dist
from localai_dist import registry
from localai_dist.registry.acting import ACTS, Ground, acts_on
from localai_dist.store.statements import files, read

GUARDED = re.compile(
    r"\b(?:delete\s+from|update|truncate)\s+(?:only\s+)?(?:backend_nodes|node_models|node_connections|instances)\b"
)
SQL_IN_PYTHON = re.compile(
    r"[\"'(\s](?:delete\s+from|update|insert\s+into|truncate)\s+"
    r"(?:backend_nodes|node_models|node_connections|instances)\b",
    re.IGNORECASE,
)
PACKAGE = Path(localai_dist.__file__).parent


class ActingTests(SynchronousTestCase):
    """Code, SQL and the list agree."""

    def setUp(self) -> None:
        """Import every module of the registry, so that its decorators have run."""
        for module in pkgutil.iter_modules(registry.__path__):
            importlib.import_module(f"{registry.__name__}.{module.name}")

    def test_every_change_of_a_guarded_table_says_what_it_is(self) -> None:
        """Each DELETE or UPDATE of nodes, replicas, connections or instances states its ground, or that it has none."""
        guarded = 0
        for file in files():
            for statement in read(file).values():
                if GUARDED.search(statement.sql):
                    guarded += 1
                    self.assertIsNotNone(statement.acts, f"{file}: {statement.name} wants '-- acts:'")
                if "delete from node_models" in statement.sql or "delete from backend_nodes" in statement.sql:
                    self.assertNotEqual(statement.acts, "none", f"{file}: {statement.name} deletes")
        self.assertGreater(guarded, 15)

    def test_every_acting_statement_is_registered_on_its_ground(self) -> None:
        """What the SQL says acts, and nothing else, is registered by one function, on the same ground."""
        stated = {
            f"{file.removesuffix('.sql')}.{statement.name}": statement.acts
            for file in files()
            for statement in read(file).values()
            if statement.acts not in (None, "none")
        }
        mine = {"nodes", "ownership", "instances", "replicas"}
        registered = {name: act.ground.value for name, act in ACTS.items()}
        self.assertEqual({k: v for k, v in stated.items() if k.split(".")[0] in mine}, registered)
        for ground in stated.values():
            self.assertIn(ground, {each.value for each in Ground})

    def test_no_python_file_changes_a_guarded_table_itself(self) -> None:
        """Outside ``store/sql`` and the migrations nobody writes SQL against these tables."""
        found = [
            str(path.relative_to(PACKAGE))
            for path in PACKAGE.rglob("*.py")
            if SQL_IN_PYTHON.search(path.read_text(encoding="utf-8"))
        ]
        self.assertEqual(found, [])

    def test_a_statement_is_registered_once(self) -> None:
        """A second function for the same statement, or an unknown ground, is refused."""
        self.assertRaises(ValueError, acts_on("asked", "replicas.remove"), lambda: None)
        self.assertRaises(ValueError, acts_on, "whim", "x.y")
