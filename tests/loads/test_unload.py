"""Taking replicas off: gone means gone."""

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import NodeId
from localai_dist.loads.errors import UnloadFailed
from localai_dist.loads.unload import Unloaded
from localai_dist.reach import DeadlineExceeded, NoRoute, PeerUnreachable, Reconnecting, RegistryUnknown, Unreached
from localai_dist.wire.verbs import DoneReply
from tests.loads.doubles import Database, Workers, frontend, make_model


class UnloadTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.database = Database()
        self.node = self.database.add_node("worker-1")
        self.model = make_model()
        self.database.add_replica(self.node, self.model, address="127.0.0.1:20000")
        self.workers = Workers()
        self.workers.processes["tiny#0"] = "127.0.0.1:20000"
        self.loads = frontend(self.database, self.workers, Clock())

    def unload(self, node: NodeId | None = None) -> Deferred[list[Unloaded]]:
        return Deferred.fromCoroutine(self.loads.unload("tiny", node))

    def assert_row_kept(self) -> None:
        self.assertEqual(len(self.database.replicas), 1)

    def test_freed_stopped_forgotten(self) -> None:
        """
        The backend gives its memory back, ends, and only then its row goes (WALK-21).
        """
        gone = self.successResultOf(self.unload())
        self.assertEqual(gone, [Unloaded(self.node, 0, absent=False, freed=True)])
        self.assertEqual(self.workers.steps, ["free", "stop"])
        self.assertEqual((self.workers.processes, self.database.replicas), ({}, {}))

    def test_an_absent_process_is_a_success(self) -> None:
        """
        Unloading a model whose process is gone already succeeds (WALK-21).
        """
        self.workers.processes.clear()
        gone = self.successResultOf(self.unload())
        self.assertEqual([one.absent for one in gone], [True])
        self.assertEqual(self.database.replicas, {})

    def test_a_failed_free_escalates_to_the_stop(self) -> None:
        """
        A backend whose Free fails or hangs is ended without asking it again (WALK-21).
        """
        self.workers.free = DoneReply(False, error="Free hangs")
        self.successResultOf(self.unload())
        self.assertEqual(self.workers.force, [True])
        self.workers.errors["free"] = [Unreached(DeadlineExceeded("30s"))]
        self.workers.processes["tiny#0"] = "127.0.0.1:20000"
        self.database.add_replica(self.node, self.model, address="127.0.0.1:20000")
        self.successResultOf(self.unload())
        self.assertEqual(self.database.replicas, {})

    def test_a_process_that_survives_fails_the_command(self) -> None:
        """
        While the process lives, the command fails with the cause and the row stays (WALK-21).
        """
        self.workers.immortal = "pid 77 survived SIGKILL"
        self.workers.free = DoneReply(False, error="Free failed: busy")
        text = str(self.failureResultOf(self.unload(), UnloadFailed).value)
        self.assertIn("pid 77 survived SIGKILL", text)
        self.assertIn("Free failed: busy", text)
        self.assert_row_kept()

    def test_an_unreachable_worker_keeps_its_row(self) -> None:
        """
        A worker that can't be asked costs the command, never the row (WALK-21).
        """
        for outcome in (Reconnecting("w"), PeerUnreachable("fe", "refused"), NoRoute("w", departed=True)):
            for step in ("free", "stop"):
                self.workers.errors = {step: [Unreached(outcome)]}
                self.failureResultOf(self.unload(), Unreached)
                self.assert_row_kept()

    def test_another_process_in_its_place_is_left_alone(self) -> None:
        """
        The process that has the replica's name but another address is not stopped.
        """
        self.workers.processes["tiny#0"] = "127.0.0.1:30000"
        self.failureResultOf(self.unload(), UnloadFailed)
        self.assertEqual(self.workers.processes, {"tiny#0": "127.0.0.1:30000"})
        self.assert_row_kept()

    def test_one_node_only(self) -> None:
        """
        Unloading from one node leaves the other nodes' replicas.
        """
        other = self.database.add_node("worker-2")
        self.database.add_replica(other, self.model)
        self.successResultOf(self.unload(self.node))
        self.assertEqual([row.node_id for row in self.database.replicas.values()], [other])

    def test_the_rest_is_unloaded_although_one_failed(self) -> None:
        """
        A node that can't be asked does not keep the other nodes from being unloaded.
        """
        other = self.database.add_node("worker-2")
        self.database.add_replica(other, self.model, address="127.0.0.1:20000")
        self.workers.errors["free"] = [Unreached(Reconnecting("worker-1"))]
        self.failureResultOf(self.unload(), Unreached)
        self.assertEqual([row.node_id for row in self.database.replicas.values()], [self.node])

    def test_nothing_loaded(self) -> None:
        """
        Unloading a model that is loaded nowhere finds nothing.
        """
        self.database.replicas.clear()
        self.assertEqual(self.successResultOf(self.unload()), [])

    def test_a_process_without_a_row_is_stopped(self) -> None:
        """
        On a node without a row of the model the worker is asked what it runs; those processes are stopped, no other.
        """
        self.database.replicas.clear()
        self.workers.processes = {"tiny#2": "127.0.0.1:20002", "other#0": "127.0.0.1:20003"}
        gone = self.successResultOf(self.unload(self.node))
        self.assertEqual([(one.node, one.replica_index) for one in gone], [(self.node, 2)])
        self.assertEqual(list(self.workers.processes), ["other#0"])
        self.assertEqual(self.successResultOf(self.unload(self.node)), [])
        self.workers.processes = {"tiny#2": "127.0.0.1:20002"}
        self.workers.immortal = "pid 77 survived SIGKILL"
        self.assertIn("pid 77", str(self.failureResultOf(self.unload(self.node), UnloadFailed).value))

    def test_the_process_of_a_load_that_runs_is_left_alone(self) -> None:
        """
        A process without a row may be one that a load is filling: it is the load's, which can be cancelled.
        """
        self.database.replicas.clear()
        self.workers.gates["load"] = Deferred()
        Deferred.fromCoroutine(self.loads.ensure(self.model, wait=None))
        self.assertEqual(self.successResultOf(self.unload(self.node)), [])
        self.assertEqual(list(self.workers.processes), ["tiny#0"])
        self.assertNotIn("running", self.workers.steps)

    def test_without_the_database(self) -> None:
        """
        While the database is away nothing is unloaded and the condition is told.
        """
        self.database.away = True
        error = self.failureResultOf(self.unload(), Unreached).value
        assert isinstance(error, Unreached)
        self.assertIsInstance(error.outcome, RegistryUnknown)
        self.assertEqual(self.workers.steps, [])
