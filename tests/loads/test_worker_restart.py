"""A worker that starts anew in the middle of a load: the process that the load was given is gone."""

from localai_dist.grpcclient.status import Origin, RpcError, StatusCode
from localai_dist.loads.errors import LoadFailed
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
        A backend that is gone each time before it has loaded fails the load, and the error says where to look (BR-038).
        """
        lost = RpcError(StatusCode.UNAVAILABLE, "the connection was lost", Origin.TRANSPORT)
        errors: dict[str, list[Exception]] = {
            "connect": [self.gone() for _ in range(10)],
            "load": [lost for _ in range(10)],
        }
        for step, failures in errors.items():
            self.workers.errors = {step: failures}
            self.workers.steps.clear()
            load = self.ensure(self.one)
            self.clock.pump([1.0] * 60)
            text = str(self.failureResultOf(load, LoadFailed).value)
            self.assertIn("its backend was lost while it loaded the model, 4 times in a row", text)
            self.assertRegex(text, "no backend of this worker|the connection was lost")
            self.assertEqual(self.workers.steps.count("install"), 4)
            self.database.jobs.clear()
