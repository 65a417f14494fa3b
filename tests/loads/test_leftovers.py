"""What loads of a deleted model left on workers: removed, once the deletion has lasted for a moment."""

from typing import Any

from twisted.internet.defer import Deferred

from localai_dist.catalog.model import ModelConfig
from localai_dist.ids import NodeId
from localai_dist.loads.errors import LoadFailed
from localai_dist.loads.status import JobState
from localai_dist.registry.presence import PresenceState
from localai_dist.staging.errors import UploadRefused
from tests.loads.case import LoadsCase
from tests.loads.doubles import Row

MOMENT = 5.0


class LeftoverTests(LoadsCase):
    """A load of the model that failed in its staging; then the model's file goes."""

    def setUp(self) -> None:
        super().setUp()
        self.there = True
        self.asked: list[NodeId] = []
        call = self.workers.call

        async def noted(node: NodeId, *arguments: Any, **more: Any) -> Any:
            self.asked.append(node)
            return await call(node, *arguments, **more)

        self.workers.call = noted  # type: ignore[method-assign]
        self.workers.errors["stage"] = [UploadRefused("the worker answered 500: it has had enough")]
        self.failureResultOf(self.ensure(self.one), LoadFailed)
        self.workers.steps.clear()
        self.asked.clear()

    def find(self, name: str) -> ModelConfig | None:
        return super().find(name) if self.there else None

    def delete(self) -> None:
        self.there = False
        self.one.models_changed({"tiny"})

    def test_a_partial_file_goes_with_its_model(self) -> None:
        """
        The model of a load that failed in the middle is deleted: what it left on the worker is removed (LOAD-16).
        """
        self.delete()
        self.clock.advance(MOMENT)
        self.assert_steps("delete unfinished")

    def test_also_long_after_the_failure(self) -> None:
        """
        Nothing but the workers knows of the failed load any more: all that are connected are asked (LOAD-16).
        """
        other = self.database.add_node("worker-2")
        self.database.add_node("worker-3", PresenceState.DEPARTED)
        self.database.add_node("worker-4", approved=False)
        self.database.jobs.clear()
        self.delete()
        self.clock.advance(MOMENT)
        self.assertEqual(self.asked, [self.node, other])

    def test_a_file_that_comes_back_was_not_deleted(self) -> None:
        """
        An editor takes a file away and writes it anew: nothing is removed; what stays away is (LOAD-16).
        """
        self.delete()
        self.clock.advance(MOMENT / 2)
        self.there = True
        self.clock.advance(MOMENT)
        self.assert_steps()
        self.delete()
        self.clock.advance(MOMENT)
        self.assert_steps("delete unfinished")

    def test_a_load_that_runs_is_left_alone(self) -> None:
        """
        Another frontend that still has the model loads it: its files stay; so do those of a replica (LOAD-16).
        """
        self.database.jobs["tiny"] = Row(99, "two", JobState.STAGING)
        self.delete()
        self.clock.advance(MOMENT)
        self.database.jobs.clear()
        self.database.add_replica(self.node, self.model)
        self.one.models_changed({"tiny"})
        self.clock.advance(MOMENT)
        self.assert_steps()
        self.database.replicas.clear()
        self.one.models_changed({"tiny"})
        self.clock.advance(MOMENT)
        self.assert_steps("delete unfinished")

    def test_without_the_database(self) -> None:
        """
        Nobody can say who runs what: nothing is removed, and the workers do it after a day.
        """
        self.delete()
        self.database.away = True
        self.clock.advance(MOMENT)
        self.database.away = False
        self.assert_steps()

    def test_a_frontend_that_stops(self) -> None:
        """
        A frontend that stops leaves no timer behind, and begins no removal.
        """
        self.delete()
        self.successResultOf(Deferred.fromCoroutine(self.one.stop()))
        self.one.models_changed({"tiny"})
        self.clock.advance(MOMENT)
        self.assert_steps()
        self.assertEqual(self.clock.getDelayedCalls(), [])
