"""How often a frontend looks after loads: rarely without any, at once when it is told of one."""

from typing import Any

from twisted.internet.defer import Deferred

from localai_dist.loads.status import JobState
from localai_dist.loads.table import SILENCE
from localai_dist.loads.tools import LoadSettings
from tests.loads.case import LoadsCase
from tests.loads.doubles import Row


class LookoutTests(LoadsCase):
    """One frontend, whose questions after the jobs are counted."""

    def setUp(self) -> None:
        super().setUp()
        self.looks = 0
        table = self.one._tools.table
        real = table.all

        async def counted() -> list[Any]:
            self.looks += 1
            if self.gate is not None:
                await self.gate
            return await real()

        self.gate: Deferred[None] | None = None
        self.patch(table, "all", counted)
        self.one.start()
        self.addCleanup(lambda: self.successResultOf(Deferred.fromCoroutine(self.one.stop())))

    def test_without_loads(self) -> None:
        """
        Nothing is loaded: a look every five seconds, which is what an orphan has to be silent for anyway (BR-105).
        """
        self.clock.pump([0.5] * 120)
        self.assertLessEqual(self.looks, 12)
        self.assertLessEqual(LoadSettings().idle_look, SILENCE)

    def test_with_loads(self) -> None:
        """
        While there is a load it is looked at every second, so that it is taken over as soon as it may be (LOAD-6).
        """
        self.database.jobs["tiny"] = Row(1, "two", JobState.STAGING, model=self.model)
        self.clock.pump([1.0] * 5)
        self.looks = 0
        self.clock.pump([1.0] * 10)
        self.assertEqual(self.looks, 10)
        self.database.jobs["tiny"].orphaned = True
        self.clock.advance(1.0)
        self.assertEqual(len(self.database.replicas), 1)

    def test_told_of_one(self) -> None:
        """
        Whoever lets go of a load says so: the look is at once, and once more if it is told during a look (LOAD-6).
        """
        self.database.jobs["tiny"] = Row(1, "", JobState.PENDING, orphaned=True, model=self.model)
        self.gate = Deferred()
        self.one.look_now("tiny")
        self.one.look_now("tiny")
        self.one.look_now("tiny")
        self.assertEqual(self.looks, 1)
        gate, self.gate = self.gate, None
        gate.callback(None)
        self.assertEqual((self.looks, len(self.database.replicas)), (2, 1))

    def test_not_running(self) -> None:
        """
        A frontend that stops is told in vain.
        """
        self.successResultOf(Deferred.fromCoroutine(self.one.stop()))
        self.one.look_now("tiny")
        self.assertEqual(self.looks, 0)
