"""A load that is cancelled, or whose model is taken away: nothing of it is left, wherever it runs."""

from dataclasses import replace
from typing import Any

from twisted.internet.defer import Deferred

from localai_dist.ids import NodeId
from localai_dist.loads.errors import LoadCancelled
from localai_dist.loads.rows import Claim
from localai_dist.loads.service import Loads
from localai_dist.loads.status import JobState
from localai_dist.reach import Reconnecting, RegistryUnknown, Unreached
from localai_dist.staging.progress import Progress
from localai_dist.wire.verbs import DoneReply
from tests.loads.case import LoadsCase
from tests.loads.doubles import MemoryTable, Row, make_model


class CancelTests(LoadsCase):
    def cancel(self, loads: Loads, why: str = "cancelled by an operator") -> bool:
        return bool(self.successResultOf(Deferred.fromCoroutine(loads.cancel("tiny", why))))

    def cancelled(self, request: Deferred[Any]) -> str:
        return str(self.failureResultOf(request, LoadCancelled).value)

    def jobs(self, loads: Loads) -> list[Any]:
        return list(self.successResultOf(Deferred.fromCoroutine(loads.jobs())))

    def test_on_the_frontend_that_loads(self) -> None:
        """
        Cancelled where it runs: it stops at once; process, partial file and row are gone, waiters told (LOAD-17).
        """
        self.hold_at("stage")
        request = self.ensure(self.one)
        self.assertTrue(self.cancel(self.one))
        self.assertEqual(self.cancelled(request), "the load of tiny was cancelled: cancelled by an operator")
        self.assert_steps("list", "install", "stage", "stop", "delete")
        self.assertEqual(self.workers.processes, {})
        self.assertEqual(self.database.jobs, {})
        self.assertEqual((self.jobs(self.one), self.jobs(self.two)), ([], []))

    def test_on_another_frontend(self) -> None:
        """
        Cancelled elsewhere: the row is the truth, the frontend that loads stops within two seconds (LOAD-17).
        """
        for step in ("install", "stage", "load"):
            self.setUp()
            self.hold_at(step)
            mine, other = self.ensure(self.one), self.ensure(self.two)
            self.assertTrue(self.cancel(self.two))
            self.assertEqual([job.cancelled for job in self.jobs(self.two)], [True])
            self.clock.pump([0.5] * 4)
            self.assertEqual(self.cancelled(mine), self.cancelled(other))
            self.assertEqual(self.database.jobs, {})
            self.assertIn("delete", self.workers.steps)

    def test_a_waiter_elsewhere_that_only_finds_the_row_gone(self) -> None:
        """
        A cancelled load is never taken for one that ended well: nobody starts it again (LOAD-17).
        """
        self.hold_at("stage")
        mine, other = self.ensure(self.one), self.ensure(self.two)
        self.cancel(self.one)
        self.assertEqual(self.database.jobs, {})
        self.clock.advance(0.5)
        self.assertEqual(self.cancelled(mine), self.cancelled(other))
        self.clock.advance(5.0)
        self.assertEqual(self.workers.steps.count("install"), 1)

    def test_a_waiter_that_looks_late(self) -> None:
        """
        A request that came before the cancel and reads the row only after it is told as well (LOAD-17).
        """
        self.database.jobs["tiny"] = Row(1, "elsewhere", JobState.STAGING, cancelled="by ann", cancelled_for=0.5)
        other = self.ensure(self.two)
        self.assertNoResult(other)
        self.clock.advance(1.0)
        self.assertIn("by ann", self.cancelled(other))

    def test_the_next_request_starts_afresh(self) -> None:
        """
        After a cancel the model can be loaded again, also by a request that came while the rest was cleared away.
        """
        self.hold_at("stage")
        gate = self.hold_at("delete")
        self.cancelled_request = self.ensure(self.one)
        self.cancel(self.one)
        late = self.ensure(self.two)
        self.clock.advance(1.0)
        self.assertNoResult(late)
        self.workers.gates.clear()
        gate.callback(None)
        self.cancelled(self.cancelled_request)
        self.clock.advance(0.5)
        self.assertEqual(self.successResultOf(late).address, "127.0.0.1:20000")

    def test_nothing_to_cancel(self) -> None:
        """
        What does not run can't be cancelled, and a finished load stays loaded.
        """
        self.assertFalse(self.cancel(self.one))
        self.successResultOf(self.ensure(self.one))
        self.assertFalse(self.cancel(self.two))
        self.assertEqual(len(self.database.replicas), 1)

    def test_a_mark_that_comes_with_the_last_step(self) -> None:
        """
        A cancel that arrives while the load is just ending wins: no replica is left behind (LOAD-17).
        """
        gate = self.hold_at("load")
        request = self.ensure(self.one)
        self.database.jobs["tiny"].cancelled = "too late?"
        gate.callback(None)
        self.cancelled(request)
        self.assertEqual((self.database.replicas, self.database.jobs), ({}, {}))
        self.assertEqual(self.workers.processes, {})

    def test_a_tick_never_takes_the_mark_back(self) -> None:
        """
        Neither a heartbeat nor a step of the owner clears the mark; a second cancel keeps the first reason (LOAD-24).
        """
        table = MemoryTable(self.database, "one")
        claim = self.successResultOf(Deferred.fromCoroutine(table.claim(make_model())))
        assert isinstance(claim, Claim)
        for why in ("first", "second"):
            self.successResultOf(Deferred.fromCoroutine(table.cancel("tiny", why)))
        told = self.successResultOf(Deferred.fromCoroutine(table.beat(claim, Progress(), phase="sending", rate=None)))
        self.assertEqual(told, "first")
        advance = table.advance(claim, JobState.LOADING, node=NodeId("n"), node_name="n", replica_index=0)
        self.assertFalse(self.successResultOf(Deferred.fromCoroutine(advance)))
        (job,) = self.jobs(self.two)
        self.assertTrue(job.cancelled)

    def test_an_owner_that_is_gone(self) -> None:
        """
        A cancelled load whose owner died is cleared away by another frontend, not taken over (LOAD-17).
        """
        self.hold_at("stage")
        self.ensure(self.one).addErrback(lambda _: None)
        self.database.jobs["tiny"].cancelled = "cancelled by an operator"
        self.database.jobs["tiny"].orphaned = True
        self.two.start()
        self.addCleanup(lambda: self.successResultOf(Deferred.fromCoroutine(self.two.stop())))
        self.clock.advance(1.0)
        self.assertEqual(self.database.jobs, {})
        self.assertEqual(self.workers.steps.count("install"), 1)
        self.assertEqual(self.workers.steps.count("delete"), 1)

    def test_a_worker_that_is_away(self) -> None:
        """
        A worker that can't be asked does not keep the row: it removes the partial file by itself later.
        """
        self.hold_at("stage")
        request = self.ensure(self.one)
        self.workers.errors["stop"] = [Unreached(Reconnecting("worker-1"))]
        self.workers.errors["delete"] = [Unreached(Reconnecting("worker-1"))]
        self.cancel(self.one)
        self.cancelled(request)
        self.assertEqual(self.database.jobs, {})

    def test_a_worker_that_can_not_delete(self) -> None:
        """
        Files that can't be removed are logged; the load is over all the same.
        """
        self.hold_at("stage")
        request = self.ensure(self.one)
        self.workers.deleted = DoneReply(False, "read-only file system")
        self.cancel(self.one)
        self.cancelled(request)

    def test_files_in_use_stay(self) -> None:
        """
        A replica of an older configuration on the same node keeps its files and its process.
        """
        self.database.nodes[self.node] = replace(self.database.nodes[self.node], max_replicas_per_model=2)
        self.database.add_replica(self.node, make_model(context_size=64), address="127.0.0.1:9")
        self.workers.processes["tiny#0"] = "127.0.0.1:9"
        self.hold_at("stage")
        request = self.ensure(self.one)
        self.cancel(self.one)
        self.cancelled(request)
        self.assertEqual(self.workers.processes, {"tiny#0": "127.0.0.1:9"})
        self.assertNotIn("delete", self.workers.steps)

    def test_a_model_that_is_taken_away(self) -> None:
        """
        The model's file is deleted while it is loaded: the load stops like a cancelled one (LOAD-17).
        """
        self.hold_at("stage")
        mine, other = self.ensure(self.one), self.ensure(self.two)
        self.model = make_model("another")
        self.two.models_changed()
        self.clock.advance(0)
        self.assertNoResult(mine)
        self.one.models_changed()
        self.clock.advance(0.5)
        self.assertIn("its model file was removed", self.cancelled(mine))
        self.cancelled(other)
        self.assertEqual(self.database.jobs, {})

    def test_a_model_that_was_never_here(self) -> None:
        """
        A load that runs here for another frontend's model is none of this folder's business.
        """
        gate = self.hold_at("stage")
        request = self.ensure(self.one, model=make_model("foreign"))
        self.one.models_changed()
        gate.callback(None)
        self.successResultOf(request)

    def test_without_the_database_nothing_is_said(self) -> None:
        """
        A cancel that could not be written down is an error, not a success.
        """
        self.database.away = True
        cancelling = Deferred.fromCoroutine(self.one.cancel("tiny", "x"))
        self.assertIsInstance(self.outcome_of(cancelling), RegistryUnknown)
