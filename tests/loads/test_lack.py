"""What frontends lack, and whose turn it is then."""

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import InstanceId
from localai_dist.loads.lack import Lack, Resort, lack_of, lacking_text, last_resort

ONE, TWO, THREE = (InstanceId(name) for name in ("one", "two", "three"))


class LackTests(SynchronousTestCase):
    """Three frontends."""

    def decide(self, lacking: dict[str, Lack], *live: str, after: float = 0.0) -> str:
        """What each of them does, as letters: runs, refuses, waits."""
        found = [
            last_resort(lacking, frozenset(live), me, offered_for=after, patience=15.0) for me in (ONE, TWO, THREE)
        ]
        return "".join({Resort.RUN: "R", Resort.REFUSE: "-", Resort.WAIT: "."}[one] for one in found)

    def test_whose_turn_it_is(self) -> None:
        """
        Everybody is asked first; then it is the turn of the one that lacks the least; the dead have none (LOAD-22).
        """
        some = {"one": Lack("", 2), "two": Lack("", 1)}
        none = {"one": Lack(""), "two": Lack("")}
        self.assertEqual(self.decide(some, "one", "two", "three"), "...")
        self.assertEqual(self.decide(some, "one", "two", "three", after=15.0), ".R.")
        self.assertEqual(self.decide(some, "one", "two"), ".R.")
        self.assertEqual(self.decide(some, "one", "two", after=30.0), "RR.")  # its turn passed: any, and one claims
        self.assertEqual(self.decide(some, "one"), "RR.")  # one without an address is in no list of the live
        self.assertEqual(self.decide({"one": Lack("", 1), "two": Lack("", 1)}, "one", "two"), "R..")
        self.assertEqual(self.decide({"one": Lack("", 3), "two": Lack("")}, "one", "two"), "R..")
        self.assertEqual(self.decide(none, "one", "two"), "---")
        self.assertEqual(self.decide(none, "one", "two", "three"), "...")
        self.assertEqual(self.decide(none, "one", "two", "three", after=15.0), "---")

    def test_in_the_row(self) -> None:
        """
        What a frontend says is read by the others; an older version's text means that nothing can be loaded there.
        """
        for lack in (Lack("x not in /m", 2), Lack("x is not there")):
            self.assertEqual(lack_of(lack.as_json()), lack)
        self.assertEqual(lack_of("a text"), Lack("a text"))
        self.assertEqual(lack_of({"why": "x", "without": -1}), Lack("x"))
        self.assertEqual(lack_of({"odd": 1}), Lack("{'odd': 1}"))

    def test_in_words(self) -> None:
        """
        Who lacks what, in order, and who did not say.
        """
        text = lacking_text({"two": Lack("b"), "one": Lack("a")}, ("three",))
        self.assertEqual(text, "frontend one: a; frontend two: b; frontend three did not answer")
