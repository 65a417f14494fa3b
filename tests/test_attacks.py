"""The catalogue of attacks fits the code it breaks; ``make attacks`` runs them."""

from __future__ import annotations

from pathlib import Path

from twisted.python.reflect import namedAny
from twisted.trial.unittest import SynchronousTestCase

from tests.attacks.catalogue import ATTACKS

ROOT = Path(__file__).resolve().parent.parent


class CatalogueTests(SynchronousTestCase):
    """Each attack can be carried out as it is written."""

    def test_each_edit_fits_the_source(self) -> None:
        """The text an attack replaces stands in its file exactly once, and the edit changes it."""
        for attack in ATTACKS:
            text = (ROOT / attack.file).read_text()
            self.assertEqual(text.count(attack.old), 1, f"{attack.name}: {attack.file}")
            self.assertNotEqual(attack.old, attack.new, attack.name)

    def test_each_named_test_exists(self) -> None:
        """Every test an attack must redden or leave green is there; an attack without both proves nothing."""
        for attack in ATTACKS:
            self.assertTrue(attack.reddens and attack.leaves_green, attack.name)
            for test in (*attack.reddens, *attack.leaves_green):
                if test.startswith("tests/process"):
                    file, _, name = test.partition("::")
                    self.assertIn(f"def {name.partition('[')[0]}", (ROOT / file).read_text(), attack.name)
                else:
                    namedAny(test)

    def test_names_are_unique(self) -> None:
        """Each attack has a name of its own."""
        names = [attack.name for attack in ATTACKS]
        self.assertEqual(len(names), len(set(names)))
