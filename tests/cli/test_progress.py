"""Running operations on the operator's screen."""

from io import StringIO

from rich.console import Console
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.cli.operator.progress import Bars, Lines, left_of, line, phase_of, view

STAGING = {
    "id": "staging:tiny",
    "name": "tiny",
    "state": "staging",
    "phase": "sending",
    "nodeName": "alpha",
    "currentBytes": 2**20,
    "totalBytes": 2**22,
    "fileIndex": 2,
    "totalFiles": 7,
    "bytesPerSecond": 2**19,
    "etaRange": [6.0, 90.0],
}


class LineTests(SynchronousTestCase):
    def test_everything_that_is_known(self) -> None:
        """A line tells phase, node, file, bytes, rate and what is left (LOAD-18)."""
        self.assertEqual(
            line(STAGING),
            "tiny: sending, on alpha, file 2 of 7, 1.0 MiB of 4.0 MiB, 512.0 KiB/s, 6s to 1m30s left",
        )

    def test_what_it_waits_for(self) -> None:
        """A load that can't go on says why, and a new reason is a new line at once."""
        waits = {**STAGING, "waits": "node alpha lost its tunnel"}
        self.assertTrue(line(waits).endswith(", waits: node alpha lost its tunnel"))
        said: list[str] = []
        with Lines(said.append, now=lambda: 0.0) as lines:
            lines.show([STAGING])
            lines.show([waits])
            lines.show([waits])
        self.assertEqual(len(said), 2)

    def test_little_known(self) -> None:
        """A queued operation, a failed one and a cancelled one are readable lines too."""
        self.assertEqual(line({"id": "staging:m", "isQueued": True}), "staging:m: queued")
        self.assertEqual(line({"name": "m", "state": "failed", "error": "bad file"}), "m: failed, bad file")
        self.assertEqual(phase_of({**STAGING, "cancelled": True}), "cancelling")
        self.assertEqual(phase_of({"state": "staging", "phase": "waiting"}), "waiting")
        self.assertEqual(phase_of({"state": "installing", "phase": "waiting"}), "installing")
        self.assertEqual(left_of({"etaRange": [3.0, 3.2]}), "3s left")
        self.assertEqual(left_of({"etaSeconds": 0.2}), "about 1s left")


class ViewTests(SynchronousTestCase):
    def test_lines_do_not_flood(self) -> None:
        """Without a terminal there is a line when the phase changes, and else one every few seconds."""
        said: list[str] = []
        clock = [0.0]
        with Lines(said.append, now=lambda: clock[0]) as lines:
            for _ in range(10):
                lines.show([STAGING])
            lines.show([{**STAGING, "phase": "verifying"}])
            clock[0] = 5.0
            lines.show([{**STAGING, "phase": "verifying"}])
        self.assertEqual([text.split(",")[0] for text in said], ["tiny: sending", "tiny: verifying", "tiny: verifying"])

    def test_bars_on_a_terminal(self) -> None:
        """On a terminal each operation has a live bar that goes when it is over."""
        screen = StringIO()
        console = Console(file=screen, force_terminal=True, width=120)
        drawn = view(console)
        assert isinstance(drawn, Bars)
        with drawn:
            drawn.show([STAGING, {"id": "staging:other", "name": "other", "state": "pending"}])
            drawn.show([STAGING])
            drawn._progress.refresh()
            self.assertEqual([task.fields["name"] for task in drawn._progress.tasks], ["tiny"])
            self.assertEqual((drawn._progress.tasks[0].percentage, drawn._progress.tasks[0].total), (25.0, 2**22))
        self.assertIn("512.0 KiB/s", screen.getvalue())
        self.assertIn("25%", screen.getvalue())

    def test_no_terminal_no_bar(self) -> None:
        """Output that goes into a file gets lines."""
        self.assertIsInstance(view(Console(file=StringIO())), Lines)
