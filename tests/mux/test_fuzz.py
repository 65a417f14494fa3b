"""Garbage from the peer: 100 000 mutated frames here, 1 000 000 by ``make fuzz``."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux.window import SPEC_WINDOW
from tests.mux.fuzz import CONFIG, IN_SUITE, run


class FuzzTests(SynchronousTestCase):
    def test_mutated_frames(self) -> None:
        """Whatever the peer sends, nothing is raised, what is held stays bounded, errors have our names (MUX-18)."""
        report = run(IN_SUITE, seed=20)
        self.assertEqual(report.frames, IN_SUITE)
        # Positive controls: sessions lived long enough to hold something, and the peer broke every rule there is.
        self.assertGreater(report.unread_most, SPEC_WINDOW)
        self.assertLessEqual(report.unread_most, CONFIG.max_streams * 2 * SPEC_WINDOW + CONFIG.session_pool)
        wanted = {"BadVersion", "BadFrameType", "BadStreamId", "FrameTooLong", "WindowOverflow", "SessionDead"}
        self.assertEqual(set(report.ends), wanted)
