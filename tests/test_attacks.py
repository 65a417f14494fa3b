"""The catalogue of attacks fits the code it breaks; ``make attacks`` runs them."""

from __future__ import annotations

from pathlib import Path

from twisted.python.reflect import namedAny
from twisted.trial.unittest import SynchronousTestCase

from tests.attacks.__main__ import Outcome, Trials
from tests.attacks.attack import Attack
from tests.attacks.catalogue import ATTACKS

ROOT = Path(__file__).resolve().parent.parent


class CatalogueTests(SynchronousTestCase):
    """Each attack can be carried out as it is written."""

    def test_each_edit_fits_the_source(self) -> None:
        """The text an attack replaces stands in its file exactly once, and the edit changes it."""
        for attack in ATTACKS:
            for file, old, new in attack.edits:
                text = (ROOT / file).read_text()
                self.assertEqual(text.count(old), 1, f"{attack.name}: {file}")
                self.assertNotEqual(old, new, attack.name)

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


class VerdictTests(SynchronousTestCase):
    """What counts as a proof, and what only looks like one."""

    def setUp(self) -> None:
        self.tree = Path(self.mktemp())
        self.tree.mkdir()
        self.source = self.tree / "code"
        self.source.write_text("whole")
        self.ran: list[tuple[str, str]] = []

    def verdict(self, whole: Outcome = Outcome.GREEN, broken: Outcome = Outcome.RED) -> list[str]:
        """Of an attack on ``code`` whose test ends so in the whole and so in the broken tree."""

        def run(tree: Path, test: str) -> Outcome:
            text = (tree / "code").read_text()
            self.ran.append((text, test))
            if test == "other":
                return Outcome.GREEN
            return whole if text == "whole" else broken

        trials = Trials(self.tree, run)
        attack = Attack("it", "code", "whole", "broken", reddens=("one",), leaves_green=("other",))
        found = trials.verdict(attack)
        self.assertEqual(trials.verdict(attack), found)
        self.assertEqual(self.source.read_text(), "whole")
        return found

    def test_proven(self) -> None:
        """A test that is green before and red after is a proof; unbroken it is run once, for all attacks."""
        self.assertEqual(self.verdict(), [])
        self.assertEqual(self.ran.count(("whole", "one")), 1)
        self.assertEqual(self.ran.count(("broken", "one")), 2)

    def test_still_green(self) -> None:
        """A test that does not notice is told."""
        self.assertEqual(self.verdict(broken=Outcome.GREEN), ["did not redden one"])

    def test_red_already(self) -> None:
        """A test that was red before anything was broken proves nothing; neither does one that is skipped."""
        self.assertEqual(self.verdict(whole=Outcome.RED), ["red before anything was broken: one"])
        self.assertEqual(self.verdict(whole=Outcome.NOTHING), ["nothing run before anything was broken: one"])

    def test_without_an_end(self) -> None:
        """A test that does not end is not one that reddened."""
        [found] = self.verdict(broken=Outcome.HUNG)
        self.assertIn("neither red nor green: one", found)
