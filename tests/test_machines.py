"""The drawings of the machines are those of the code."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.machines import FOLDER, drawings


class MachineDrawingTests(SynchronousTestCase):
    """``docs/machines``."""

    def test_are_current(self) -> None:
        """
        Each page is what ``make docs`` writes, and no page is left of a machine that is gone.
        """
        pages = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.dot")}
        self.assertEqual(pages, drawings())

    def test_show_every_change(self) -> None:
        """
        A change of the tunnel's, the stream's and the node's machine is a line of its page.
        """
        drawn = drawings()
        self.assertIn('"up" -> "lingering" [label="told to go"];', drawn["tunnel-link.dot"])
        self.assertIn('"open" -> "we sent FIN" [label="send FIN"];', drawn["mux-stream.dot"])
        self.assertIn('"pending" -> "healthy" [label="an admin approved it"];', drawn["node-status.dot"])
