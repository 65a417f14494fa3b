"""Replicas of older configurations: no new request, then stopped one by one, however long it takes."""

from dataclasses import replace

from twisted.internet.defer import Deferred

from localai_dist.loads.status import JobState
from localai_dist.reach import NoRoute, Reconnecting, Unreached
from tests.loads.case import LoadsCase
from tests.loads.doubles import MemoryRetirement, make_model


class RetirementTests(LoadsCase):
    """An older replica at 127.0.0.1:9, slot 0; the model's file has changed since."""

    def setUp(self) -> None:
        super().setUp()
        self.old = self.database.add_replica(self.node, make_model(context_size=64), address="127.0.0.1:9")
        self.workers.processes["tiny#0"] = "127.0.0.1:9"

    @property
    def rows(self) -> MemoryRetirement:
        """The first frontend's view of the rows."""
        found = self.one._retirement._table
        assert isinstance(found, MemoryRetirement)
        return found

    def start(self) -> None:
        self.one.start()
        self.addCleanup(lambda: self.successResultOf(Deferred.fromCoroutine(self.one.stop())))

    def state(self) -> str:
        row = self.database.replicas.get((self.node, "tiny", 0))
        return "gone" if row is None else row.state

    def serve_for_long(self, *, in_flight: int = 0) -> None:
        """The replica is the model's own, and the only frontend has known its database for a live window."""
        replica = replace(self.old, in_flight=in_flight, config_revision=self.model.revision)
        self.database.replicas[(self.node, "tiny", 0)] = replica
        self.database.instances = {"one"}
        self.start()
        self.clock.pump([5.0] * 7)
        self.assertEqual(self.state(), "loaded")

    def test_it_is_left_alone_for_a_moment(self) -> None:
        """
        Other frontends read the folder a little later: the old replica goes only after that, and exactly (LOAD-22).
        """
        self.start()
        self.clock.advance(5.0)
        self.assertEqual(self.state(), "loaded")
        self.clock.advance(5.0)
        self.assertEqual(self.state(), "gone")
        self.assert_steps("stop")
        self.assertEqual(self.workers.force, [False])

    def test_what_runs_on_it_ends_first(self) -> None:
        """
        A replica with requests takes no new one and is stopped when they are done (LOAD-22).
        """
        key = (self.node, "tiny", 0)
        self.database.replicas[key] = replace(self.old, in_flight=1)
        self.start()
        self.clock.pump([5.0] * 4)
        self.assertEqual(self.state(), "unloading")
        self.assert_steps()
        self.database.replicas[key] = replace(self.database.replicas[key], in_flight=0)
        self.clock.advance(5.0)
        self.assertEqual(self.state(), "gone")

    def test_a_configuration_that_comes_back_is_kept(self) -> None:
        """
        A change that is undone at once stops nothing.
        """
        self.start()
        self.clock.advance(5.0)
        self.model = make_model(context_size=64)
        self.clock.pump([5.0] * 4)
        self.assertEqual(self.state(), "loaded")

    def test_models_of_others_are_not_judged(self) -> None:
        """
        A replica of a model this frontend does not have is served by another one, which is live (LOAD-22).
        """
        self.model = make_model("other")
        self.keeps = {"two"}
        self.start()
        self.two.start()
        self.addCleanup(lambda: self.successResultOf(Deferred.fromCoroutine(self.two.stop())))
        self.clock.pump([5.0] * 10)
        self.assertEqual(self.state(), "loaded")
        self.keeps.clear()
        self.clock.pump([5.0] * 3)
        self.assertEqual(self.state(), "gone")

    def test_a_deleted_model_is_stopped(self) -> None:
        """
        The model's file is deleted everywhere: its replica is stopped, exactly, after what runs on it (LOAD-22).
        """
        key = (self.node, "tiny", 0)
        self.serve_for_long(in_flight=1)
        self.model = make_model("other")
        self.clock.advance(5.0)
        self.assertEqual(self.state(), "loaded")
        self.clock.advance(5.0)
        self.assertEqual((self.state(), self.workers.steps), ("unloading", []))
        self.database.replicas[key] = replace(self.database.replicas[key], in_flight=0)
        self.clock.advance(5.0)
        self.assertEqual(self.state(), "gone")
        self.assert_steps("stop")

    def test_a_file_that_is_broken_is_not_deleted(self) -> None:
        """
        A YAML with a typing error stops nothing that runs.
        """
        self.serve_for_long()
        self.model = make_model("other")
        self.keeps = {"one"}
        self.clock.pump([5.0] * 10)
        self.assertEqual(self.state(), "loaded")

    def test_who_is_live_is_not_known_at_once(self) -> None:
        """
        Without the database no frontend can say that it lives: what one alone does not serve runs on for a live window
        after an outage that its looks met or slept through, and after its start (LOAD-22).
        """
        self.serve_for_long()
        self.model = make_model("other")
        self.clock.advance(5.0)  # unserved, but not for long enough
        self.database.away = True
        self.clock.advance(5.0)
        self.database.away = False
        self.clock.pump([5.0] * 6)
        self.assertEqual(self.state(), "loaded")
        self.clock.advance(15.0)  # as if the host had slept
        self.clock.pump([5.0] * 5)
        self.assertEqual(self.state(), "loaded")
        self.clock.pump([5.0] * 2)
        self.assertEqual(self.state(), "gone")

    def test_a_frontend_that_has_just_started(self) -> None:
        """
        The models of others are not judged before the others had time to come back, too (LOAD-22).
        """
        self.database.replicas[(self.node, "tiny", 0)] = replace(self.old, config_revision=self.model.revision)
        self.database.instances = {"one"}
        self.model = make_model("other")
        self.start()
        self.clock.pump([5.0] * 6)
        self.assertEqual(self.state(), "loaded")
        self.clock.pump([5.0] * 2)
        self.assertEqual(self.state(), "gone")

    def test_a_stop_that_fails_is_kept_for_later(self) -> None:
        """
        A process that won't end keeps its row, and the reason stands there for the next try (LOAD-22).
        """
        self.workers.immortal = "it survived SIGKILL"
        self.start()
        self.clock.pump([5.0] * 2)
        self.assertEqual(self.state(), "unloading")
        self.assertIn("it survived SIGKILL", self.rows.failures[0])

    def test_a_worker_that_is_away_keeps_the_row(self) -> None:
        """
        Nothing is forgotten about a node that reconnects; of a node that departed the row goes (LOAD-22).
        """
        self.workers.errors["stop"] = [Unreached(Reconnecting("worker-1"))]
        self.start()
        self.clock.pump([5.0] * 2)
        self.assertEqual(self.state(), "unloading")
        self.workers.errors["stop"] = [Unreached(NoRoute("worker-1", departed=True))]
        self.rows.waiting.append(self.database.replicas[(self.node, "tiny", 0)])
        self.clock.advance(5.0)
        self.assertEqual(self.state(), "gone")

    def test_one_by_one(self) -> None:
        """
        Two old replicas are not stopped at the same moment (LOAD-22).
        """
        other = self.database.add_node("worker-2")
        self.database.add_replica(other, make_model(context_size=64), address="127.0.0.1:9")
        gate = self.hold_at("stop")
        self.start()
        self.clock.pump([5.0] * 3)
        self.assert_steps("stop")
        gate.callback(None)
        self.assert_steps("stop", "stop")

    def test_the_database_may_be_away(self) -> None:
        """
        A look that finds no database is made up for by the next.
        """
        self.start()
        self.database.away = True
        self.clock.pump([5.0] * 3)
        self.database.away = False
        self.clock.pump([5.0] * 2)
        self.assertEqual(self.state(), "gone")

    def test_a_new_load_waits_for_the_requests_in_its_slot(self) -> None:
        """
        A node with one slot: requests on the old replica end before it makes room for the new one (LOAD-22).
        """
        key = (self.node, "tiny", 0)
        self.database.replicas[key] = replace(self.old, in_flight=2)
        request = self.ensure(self.one)
        self.clock.pump([1.0] * 3)
        self.assertEqual((self.state(), self.workers.steps), ("unloading", ["list"]))
        self.database.replicas[key] = replace(self.database.replicas[key], in_flight=0)
        self.clock.advance(1.0)
        self.assertEqual(self.successResultOf(request).config_revision, self.model.revision)
        self.assert_steps("list", "stop", "install", "stage", "connect", "load", "close")

    def test_room_is_made_in_the_end(self) -> None:
        """
        A request that never ends does not keep a new configuration out for ever.
        """
        self.database.replicas[(self.node, "tiny", 0)] = replace(self.old, in_flight=1)
        request = self.ensure(self.one)
        self.clock.pump([1.0] * 29)
        self.assertEqual(self.database.jobs["tiny"].state, JobState.INSTALLING)
        self.clock.pump([1.0] * 2)
        self.successResultOf(request)
