"""Which releases may speak with each other."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from localai_dist import __version__
from localai_dist.wire.releases import UPGRADE_ORDER, compatible, mismatch


class ReleaseTests(SynchronousTestCase):
    """Pairs of releases."""

    def test_pairs(self) -> None:
        """The first number decides, and while it is 0 the second one too; no name at all passes (CLUS-28)."""
        for ours, theirs, fits in [
            ("0.1.0", "0.1.9", True),
            ("0.1.0", "0.1.0.dev3+local", True),
            ("0.1.0", "v0.1.2-rc1", True),
            ("0.1.0", "0.2.0", False),
            ("0.2.0", "0.1.0", False),
            ("1.2.0", "1.9.3", True),
            ("1.0.0", "2.0.0", False),
            ("1.1.0", "0.1.0", False),
            ("0.1.0", None, True),
            ("0.1.0", "", True),
            ("0.1.0", "1", False),
            ("0.1.0", "nonsense", False),
            ("nonsense", "nonsense", False),
            ("0.1.0", "0.1" + "9" * 400, False),
        ]:
            self.assertEqual(compatible(ours, theirs), fits, (ours, theirs))
        self.assertTrue(compatible(__version__, __version__))

    def test_the_sentence_names_both_and_the_order(self) -> None:
        """Who reads the refusal learns both releases and what to upgrade first (CLUS-28)."""
        said = mismatch("0.1.0", "0.2.0")
        self.assertIn("0.1.0", said)
        self.assertIn("0.2.0", said)
        self.assertIn(UPGRADE_ORDER, said)
        self.assertLess(len(mismatch("0.1.0", "x" * 4000)), 300)
