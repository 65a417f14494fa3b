"""The hold of a running load: what moves bytes lives, silence ends it with the facts, LoadModel has its budget."""

from collections.abc import Sequence
from typing import Any

from localai_dist.ids import NodeId
from localai_dist.loads.errors import LoadFailed
from localai_dist.staging.plan import SourceFile, StagedFile
from localai_dist.staging.progress import Progress
from localai_dist.units import MINUTE
from tests.loads.case import LoadsCase


class HoldInUseTests(LoadsCase):
    """One load whose staging waits at a gate, with what it was given in the test's hands."""

    def setUp(self) -> None:
        super().setUp()
        self.progress = Progress()
        self.hold: Any = None
        stage = self.workers.stage

        async def seen(
            node: NodeId, files: Sequence[SourceFile], progress: Progress, hold: Any
        ) -> tuple[StagedFile, ...]:
            self.progress, self.hold = progress, hold
            return await stage(node, files, progress, hold)

        self.workers.stage = seen  # type: ignore[method-assign]

    def test_bytes_that_move_outlive_the_base_and_silence_ends_it(self) -> None:
        """
        An hour of slow bytes is more than the base of 25 minutes and no end; five minutes of silence are one, and what
        the client reads has bytes, total, rate and what stopped it (LOAD-1, LOAD-3, LOAD-4, BR-005).
        """
        self.hold_at("stage")
        load = self.ensure(self.one)
        for _ in range(60):
            self.progress.sent(10)
            self.hold.observe()
            self.clock.advance(MINUTE)
        self.assertNoResult(load)
        self.progress.trouble = "the tunnel was cut"
        self.clock.pump([MINUTE] * 5)
        text = str(self.failureResultOf(load, LoadFailed).value)
        self.assertRegex(text, r"no progress for 5m\b")
        self.assertRegex(text, r"600 B of 1000 B done, [\d.]+ \S*B/s; last trouble: the tunnel was cut")

    def test_the_backend_has_its_whole_budget(self) -> None:
        """
        After the last byte nothing moves while the backend reads its model: six minutes of that are no stall
        (LOAD-2, BR-005).
        """
        staged, loaded = self.hold_at("stage"), self.hold_at("load")
        load = self.ensure(self.one)
        self.hold.observe()
        staged.callback(None)
        self.clock.pump([MINUTE] * 6)
        self.assertNoResult(load)
        self.assertEqual(self.workers.steps[-1], "load")
        loaded.callback(None)
        self.successResultOf(load)
