"""What the tests of loads share: two frontends over one database and one node."""

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.catalog.model import ModelConfig
from localai_dist.loads.service import Loads
from localai_dist.loads.status import LoadStatus
from localai_dist.reach import Unreached
from localai_dist.registry.records import Replica
from tests.loads.doubles import Database, Workers, frontend, make_model


class LoadsCase(SynchronousTestCase):
    """Two frontends, one node."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.database = Database()
        self.node = self.database.add_node("worker-1")
        self.workers = Workers()
        self.model = make_model()
        self.keeps: set[str] = set()  # frontends that have a file of every model, if a broken one
        self.one = self.frontend("one")
        self.two = self.frontend("two")

    def frontend(self, instance: str, **settings: Any) -> Loads:
        return frontend(
            self.database,
            self.workers,
            self.clock,
            instance,
            find_model=self.find,
            is_gone=lambda name: instance not in self.keeps and self.find(name) is None,
            **settings,
        )

    def find(self, name: str) -> ModelConfig | None:
        return self.model if name == self.model.name else None

    def ensure(self, loads: Loads, wait: float | None = None, model: ModelConfig | None = None) -> Deferred[Replica]:
        return Deferred.fromCoroutine(loads.ensure(model or self.model, wait=wait))

    def hold_at(self, step: str) -> Deferred[None]:
        gate: Deferred[None] = Deferred()
        self.workers.gates[step] = gate
        return gate

    def status_of(self, loads: Loads) -> LoadStatus:
        status = self.successResultOf(Deferred.fromCoroutine(loads.status("tiny")))
        assert status is not None
        return status

    def outcome_of(self, done: Deferred[Any]) -> Any:
        return self.failureResultOf(done, Unreached).value.outcome  # type: ignore[attr-defined]

    def assert_steps(self, *steps: str) -> None:
        self.assertEqual(self.workers.steps, list(steps))
