"""A worker that starts anew in the middle of a load: the process that the load was given is gone."""

from localai_dist.reach import Answer, Answered, Unreached
from tests.loads.case import LoadsCase


class WorkerRestartTests(LoadsCase):
    def gone(self) -> Unreached:
        return Unreached(Answered(Answer.BACKEND_UNAVAILABLE, "no backend of this worker is on port 20000"))

    def test_the_backend_is_started_again(self) -> None:
        """
        The worker was started anew while files came: the load begins again there and takes what is staged (LOAD-11).
        """
        self.workers.errors["connect"] = [self.gone()]
        load = self.ensure(self.one)
        self.clock.pump([1.0] * 10)
        self.successResultOf(load)
        self.assert_steps("list", "install", "stage", "connect", "install", "stage", "connect", "load", "close")

    def test_a_backend_that_is_always_gone_ends_it(self) -> None:
        """
        A backend that is gone each time before it can load fails the load with the worker's words, not for ever.
        """
        self.workers.errors["connect"] = [self.gone() for _ in range(10)]
        load = self.ensure(self.one)
        self.clock.pump([1.0] * 60)
        self.assertIn("no backend of this worker", str(self.failureResultOf(load, Unreached).value))
        self.assertEqual(self.workers.steps.count("install"), 4)
