"""Cold loads over two frontends in memory: joined, waited for, failed, taken over."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import LogEvent, Logger

from localai_dist.grpcclient.status import Origin, RpcError, StatusCode
from localai_dist.loads.errors import LoadFailed, StillLoading
from localai_dist.loads.job import LoadJob
from localai_dist.loads.rows import Measured
from localai_dist.reach import (
    DeadlineExceeded,
    NoRoute,
    NotServed,
    PeerUnreachable,
    Reconnecting,
    RegistryUnknown,
    Unreached,
)
from localai_dist.registry.presence import PresenceState
from localai_dist.registry.records import SchedulingRow
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.scheduler.placement import NoPlace
from localai_dist.serving.deadline import within
from localai_dist.staging.errors import NoSpace
from localai_dist.units import MINUTE, GiB
from localai_dist.wire.verbs import InstallReply
from tests.loads.case import LoadsCase
from tests.loads.doubles import make_model


class ColdLoadTests(LoadsCase):
    def test_a_cold_load(self) -> None:
        """
        Backend installed, files staged, model loaded; then the replica is there and the job is not (WALK-5).
        """
        replica = self.successResultOf(self.ensure(self.one))
        self.assertEqual((replica.node_id, replica.address), (self.node, "127.0.0.1:20000"))
        self.assertEqual(replica.backend_token, "token")
        self.assert_steps("list", "install", "stage", "connect", "load", "close")
        self.assertEqual(self.database.history, ["installing", "staging", "loading"])
        self.assertEqual(self.database.jobs, {})

    def test_a_loaded_model_is_returned_at_once(self) -> None:
        """
        A model that is loaded already costs nothing.
        """
        self.database.add_replica(self.node, self.model)
        self.successResultOf(self.ensure(self.two))
        self.assert_steps()

    def test_what_the_backend_is_told(self) -> None:
        """
        LoadModel gets the file's absolute path on the worker and the folder it lies in.
        """
        self.successResultOf(self.ensure(self.one))
        options = self.workers.options
        assert options is not None
        self.assertEqual(options.Model, "tiny.gguf")
        self.assertEqual(options.ModelFile, "/w/models/tiny/tiny.gguf")
        self.assertEqual(options.ModelPath, "/w/models/tiny")
        self.assertEqual([round(timeout or 0.0) for timeout in self.workers.timeouts], [5 * MINUTE])

    def test_the_operators_load_timeout_wins(self) -> None:
        """
        A load timeout that the operator set, shorter than ours, is what LoadModel gets (LOAD-1).
        """
        self.successResultOf(self.ensure(self.frontend("short", load_timeout=7.0)))
        self.assertEqual(self.workers.timeouts, [7.0])

    def test_a_resumed_load_needs_room_only_for_the_rest(self) -> None:
        """
        A disk that has most of the model already is not too small for it (LOAD-15).
        """
        room = 20 * GiB
        self.database.nodes[self.node] = replace(
            self.database.nodes[self.node], total_disk=room, available_disk=2 * GiB
        )
        self.workers.size = 10 * GiB
        text = str(self.failureResultOf(self.ensure(self.one), NoPlace).value)
        self.assertIn("worker-1 needs 11.0 GiB and has 2.0 GiB free of 20.0 GiB", text)
        self.database.endings.append(("tiny", 1, "", self.node, Measured(10 * GiB, 10 * GiB)))
        self.successResultOf(self.ensure(self.one))

    def test_a_full_disk_is_one_clear_failure(self) -> None:
        """
        No space left in the middle: one failure with the worker's words, what was sent goes (LOAD-15, BR-111).
        """
        self.workers.errors["stage"] = [NoSpace("staging tiny.gguf: the worker answered 507: no space left on device")]
        text = str(self.failureResultOf(self.ensure(self.one), LoadFailed).value)
        for words in (
            "the disk of node worker-1 is full: tiny needs 1000 B, and 0 B were free",
            "space left on device",
        ):
            self.assertIn(words, text)
        self.assert_steps("list", "install", "stage", "stop", "delete")
        self.assertEqual(self.workers.processes, {})

    def test_a_full_disk_harms_no_other_model(self) -> None:
        """
        A model that is loaded on the full node goes on serving, and its files are not touched (LOAD-15).
        """
        other = make_model("other")
        self.successResultOf(self.ensure(self.one, model=other))
        self.workers.errors["stage"] = [NoSpace("full")]
        self.failureResultOf(self.ensure(self.one), LoadFailed)
        self.assertIn("other#0", self.workers.processes)
        self.assertEqual(self.successResultOf(self.ensure(self.two, model=other)).model_name, "other")

    def test_options_that_may_be_paths_are_looked_at(self) -> None:
        """
        The values of a model's free options are offered to the staging, which takes those that are paths (LOAD-13).
        """
        self.model = make_model(options=("vae_path:vae/v.bin", "gpu:off"), overrides=("clip:c.gguf",))
        self.successResultOf(self.ensure(self.one))
        self.assertEqual(self.workers.hints, ("vae/v.bin", "off", "c.gguf"))

    def test_the_scheduling_rule_pins_the_model(self) -> None:
        """
        A model pinned to a label is loaded on the node that has it (WALK-5).
        """
        pinned = self.database.add_node("worker-2", labels={"pin": "yes"})
        self.database.rules["tiny"] = SchedulingRow("tiny", {"pin": "yes"})
        self.assertEqual(self.successResultOf(self.ensure(self.one)).node_id, pinned)

    def test_fifty_requests_are_one_load(self) -> None:
        """
        50 concurrent requests, half on each frontend, are one install, one staging, one LoadModel; all are answered
        (LOAD-5).
        """
        gate = self.hold_at("stage")
        requests = [self.ensure(loads) for loads in (self.one, self.two) * 25]
        gate.callback(None)
        self.clock.advance(0.5)
        replicas = {self.successResultOf(request).address for request in requests}
        self.assertEqual(replicas, {"127.0.0.1:20000"})
        self.assert_steps("list", "install", "stage", "connect", "load", "close")

    def test_the_other_frontend_wakes_within_half_a_second(self) -> None:
        """
        A waiter on a frontend that does not run the load is woken within 0.5 s.
        """
        gate = self.hold_at("load")
        self.ensure(self.one)
        other = self.ensure(self.two)
        self.clock.advance(0.4)
        gate.callback(None)
        self.assertNoResult(other)
        self.clock.advance(0.1)
        self.successResultOf(other)

    def test_the_load_goes_on_when_the_client_leaves(self) -> None:
        """
        A client that goes away does not stop the load it started (LOAD-5).
        """
        gate = self.hold_at("stage")
        request = self.ensure(self.one)
        request.cancel()
        self.failureResultOf(request, CancelledError)
        gate.callback(None)
        self.assertEqual(len(self.database.replicas), 1)

    def test_a_slow_load_delays_no_other_model(self) -> None:
        """
        While one model loads slowly another one is loaded and served (LOAD-9).
        """
        self.hold_at("stage")
        slow = self.ensure(self.one)
        self.workers.gates.clear()
        self.successResultOf(self.ensure(self.one, model=make_model("other")))
        self.assertNoResult(slow)

    def test_a_load_that_was_not_needed_leaves_no_job(self) -> None:
        """
        A claim made just after another frontend's load ended does not load the model twice.
        """
        claim = self.one._tools.table.claim

        async def late_claim(key: str) -> Any:
            self.database.add_replica(self.node, self.model)
            return await claim(key)

        self.one._tools.table.claim = late_claim  # type: ignore[method-assign]
        self.successResultOf(self.ensure(self.one))
        self.assert_steps()
        self.assertEqual(self.database.jobs, {})

    def test_a_changed_configuration_replaces_the_old_replica(self) -> None:
        """
        A model whose configuration changed is loaded anew; the old process is stopped first.
        """
        self.database.add_replica(self.node, make_model(context_size=64), address="127.0.0.1:9")
        self.workers.processes["tiny#0"] = "127.0.0.1:9"
        replica = self.successResultOf(self.ensure(self.one))
        self.assertEqual(replica.config_revision, self.model.revision)
        self.assertEqual(self.workers.steps[:3], ["list", "stop", "install"])


class WaitTests(LoadsCase):
    def test_the_wait_is_the_callers_alone(self) -> None:
        """
        A request waits its time, then learns where the load stands; the load goes on (LOAD-7).
        """
        gate = self.hold_at("stage")
        early, patient = self.ensure(self.one, wait=2.0), self.ensure(self.one, wait=60.0)
        self.clock.pump([1.0, 1.0])
        error = self.failureResultOf(early, StillLoading).value
        assert isinstance(error, StillLoading)
        self.assertEqual((error.status.state, error.status.node), ("staging", "worker-1"))
        self.assertEqual(error.status.total_bytes, 1000)
        self.assertIn("model tiny is staging on node worker-1", str(error))
        self.assertTrue(5 <= error.retry_after <= 60)
        gate.callback(None)
        self.successResultOf(patient)

    def test_no_wait_still_starts_the_load(self) -> None:
        """
        Asking without waiting answers at once and loads all the same.
        """
        gate = self.hold_at("stage")
        asked = self.ensure(self.one, wait=0.0)
        self.clock.advance(0)
        self.failureResultOf(asked, StillLoading)
        gate.callback(None)
        self.assertEqual(len(self.database.replicas), 1)

    def test_status_is_the_same_on_both_frontends(self) -> None:
        """
        Every frontend tells the state of a load, and none when there is none (LOAD-7).
        """
        self.hold_at("load")
        self.ensure(self.one)
        self.clock.advance(1.0)
        for loads in (self.one, self.two):
            status = self.successResultOf(Deferred.fromCoroutine(loads.status("tiny")))
            assert status is not None
            self.assertEqual(status.state, "loading")
            self.assertEqual(self.successResultOf(Deferred.fromCoroutine(loads.jobs())), [status])
            self.assertIsNone(self.successResultOf(Deferred.fromCoroutine(loads.status("other"))))

    def test_eta_only_when_measured(self) -> None:
        """
        An estimate appears once the bytes were watched for a second, and is the same on both frontends (LOAD-7).
        """
        self.hold_at("stage")
        self.ensure(self.one)
        self.clock.advance(1.0)
        self.assertEqual({self.status_of(loads).eta_seconds for loads in (self.one, self.two)}, {None})
        self.one._jobs["tiny"].progress.sent(250)
        self.clock.advance(1.0)
        for loads in (self.one, self.two):
            shown = self.status_of(loads)
            self.assertEqual((shown.rate, shown.eta_seconds, shown.bytes_sent), (250.0, 3.0, 250))

    def test_a_range_once_there_is_a_history(self) -> None:
        """
        After some measured loads on the node a running one tells their range; before that nothing is guessed (LOAD-7).
        """
        self.hold_at("stage")
        self.ensure(self.one)
        self.clock.advance(1.0)
        self.assertIsNone(self.status_of(self.two).eta_range)
        past = Measured(1000, 1000, 100.0, 5.0)
        self.database.endings += [("other", attempt, "", self.node, past) for attempt in range(3)]
        for loads in (self.one, self.two):
            self.assertEqual(self.status_of(loads).eta_range, (15.0, 15.0))

    def test_progress_is_readable_everywhere(self) -> None:
        """
        Node, file, bytes, rate and phase of a running load are read alike on every frontend, all along (LOAD-18).
        """
        gates = {step: self.hold_at(step) for step in ("install", "stage", "load")}
        self.ensure(self.one)
        seen = []
        for step in ("install", "stage", "load"):
            self.clock.advance(1.0)
            shown = [self.status_of(loads) for loads in (self.one, self.two)]
            self.assertEqual(shown[0], shown[1])
            seen.append((shown[0].state, shown[0].phase, shown[0].node, shown[0].total_bytes))
            if step == "stage":
                self.one._jobs["tiny"].progress.phase = "hashing"
                self.clock.advance(1.0)
                self.assertEqual(self.status_of(self.two).phase, "hashing")
            gates[step].callback(None)
        self.assertEqual(
            seen,
            [
                ("installing", "waiting", "worker-1", 0),
                ("staging", "waiting", "worker-1", 1000),
                ("loading", "loading", "worker-1", 1000),
            ],
        )

    def test_progress_never_falls_back_after_a_take_over(self) -> None:
        """
        A frontend that takes a load over tells the bytes that are there before it has asked (LOAD-18, BR-125).
        """
        self.hold_at("stage")
        self.ensure(self.one)
        self.one._jobs["tiny"].progress.sent(600)
        self.clock.advance(1.0)
        self.database.jobs["tiny"].orphaned = True
        self.ensure(self.two)
        self.clock.advance(1.0)
        self.assertEqual(self.database.jobs["tiny"].owner, "two")
        self.assertEqual(self.status_of(self.one).bytes_sent, 600)

    def test_queued_is_visible_before_anything_happens(self) -> None:
        """
        A load that waits for its first step is on the other frontend's list already (LOAD-24).
        """
        self.hold_at("list")
        self.ensure(self.one)
        (job,) = self.successResultOf(Deferred.fromCoroutine(self.two.jobs()))
        self.assertEqual((job.model, job.state), ("tiny", "pending"))
        self.assertEqual(self.workers.steps, ["list"])

    def test_readers_get_a_copy(self) -> None:
        """
        What a reader holds does not change, and changing it changes nothing (LOAD-24).
        """
        self.hold_at("stage")
        self.ensure(self.one)
        self.clock.advance(1.0)
        jobs = self.successResultOf(Deferred.fromCoroutine(self.one.jobs()))
        before = jobs[0]
        self.assertRaises(FrozenInstanceError, setattr, before, "bytes_sent", 5)
        jobs.clear()
        self.one._jobs["tiny"].progress.sent(100)
        self.clock.advance(1.0)
        self.assertEqual(before.bytes_sent, 0)
        self.assertEqual(self.status_of(self.one).bytes_sent, 100)


class FailureTests(LoadsCase):
    def test_a_failure_gives_everybody_the_same_real_cause(self) -> None:
        """
        All waiters on both frontends get the worker's own words, and the 51st request starts afresh (LOAD-5).
        """
        gate = self.hold_at("install")
        self.workers.install = InstallReply(False, error="run.sh: exec format error")
        requests = [self.ensure(loads) for loads in (self.one, self.two) * 25]
        gate.callback(None)
        self.clock.advance(0.5)
        texts = {str(self.failureResultOf(request, LoadFailed).value) for request in requests}
        self.assertEqual(len(texts), 1)
        self.assertIn("run.sh: exec format error", texts.pop())
        self.workers.install = InstallReply(True, address="127.0.0.1:20001")
        self.successResultOf(self.ensure(self.two))

    def test_the_backends_own_words(self) -> None:
        """
        A backend that can't load the model is quoted (LOAD-19).
        """
        self.workers.result = pb.Result(success=False, message="missing shard 3 of 7")
        self.assertIn("missing shard 3 of 7", str(self.failureResultOf(self.ensure(self.one), LoadFailed).value))

    def test_a_failed_load_leaves_no_process(self) -> None:
        """
        The process of a load that failed is stopped, exactly and by force: no row would tell anybody of it.
        """
        self.workers.result = pb.Result(success=False, message="bad magic")
        self.failureResultOf(self.ensure(self.one), LoadFailed)
        self.assertEqual((self.workers.processes, self.workers.force), ({}, [True]))
        self.workers.errors["load"] = [RpcError(StatusCode.INTERNAL, "bad magic")]
        self.failureResultOf(self.ensure(self.two), LoadFailed)
        self.assertEqual(self.workers.processes, {})

    def test_a_process_that_stays_does_not_hide_why_the_load_failed(self) -> None:
        """
        The load's cause is told also when its process can't be stopped, or its worker can't be asked to.
        """
        self.workers.result = pb.Result(success=False, message="bad magic")
        self.workers.immortal = "pid 77 survived SIGKILL"
        self.assertIn("bad magic", str(self.failureResultOf(self.ensure(self.one), LoadFailed).value))
        self.workers.errors["stop"] = [Unreached(Reconnecting("worker-1"))]
        self.assertIn("bad magic", str(self.failureResultOf(self.ensure(self.one), LoadFailed).value))

    def test_a_backends_error_status(self) -> None:
        """
        An error status of LoadModel is the cause, with its details.
        """
        self.workers.errors["load"] = [RpcError(StatusCode.INTERNAL, "bad magic")]
        self.assertIn("bad magic", str(self.failureResultOf(self.ensure(self.one), LoadFailed).value))

    def test_a_load_that_took_too_long_names_the_budget_and_the_knob(self) -> None:
        """
        LoadModel past its budget names the budget, the size and the option that allows more.
        """
        self.workers.errors["load"] = [RpcError(StatusCode.DEADLINE_EXCEEDED, "late", Origin.CALLER)]
        text = str(self.failureResultOf(self.ensure(self.one), LoadFailed).value)
        self.assertIn("5m", text)
        self.assertIn("1000 B", text)
        self.assertIn("LOCALAI_NATS_MODEL_LOAD_TIMEOUT", text)

    def test_no_node_suits(self) -> None:
        """
        When no node can take the model, every waiter reads what each node lacks.
        """
        self.database.rules["tiny"] = SchedulingRow("tiny", {"pin": "yes"})
        self.assertIn("pin=yes", str(self.failureResultOf(self.ensure(self.one), NoPlace).value))

    def test_a_departed_node_is_no_route(self) -> None:
        """
        The only node's tunnel is gone for good: the request is refused with that condition at once (WALK-16).
        """
        self.database.presence[self.node] = PresenceState.DEPARTED
        self.assertEqual(self.outcome_of(self.ensure(self.one)), NoRoute("worker-1", departed=True))

    def test_a_reconnecting_node_is_waited_for_a_little(self) -> None:
        """
        The only node is reconnecting: the request waits the route wait, then reads that condition (WALK-16).
        """
        self.database.presence[self.node] = PresenceState.RECONNECTING
        request = self.ensure(self.one)
        self.clock.pump([0.5] * 9)
        self.assertNoResult(request)
        self.clock.pump([0.5] * 2)
        self.assertEqual(self.outcome_of(request), Reconnecting("worker-1"))

    def test_a_node_that_is_back_in_time_is_used(self) -> None:
        """
        A worker that reconnects within the route wait serves the request (WALK-16).
        """
        self.database.presence[self.node] = PresenceState.RECONNECTING
        request = self.ensure(self.one)
        self.clock.advance(1.0)
        self.database.presence[self.node] = PresenceState.CONNECTED
        self.clock.advance(0.5)
        self.successResultOf(request)

    def test_the_condition_is_the_same_on_the_other_frontend(self) -> None:
        """
        A waiter elsewhere gets the condition itself, not a text about it.
        """
        gate = self.hold_at("install")
        self.workers.errors["install"] = [Unreached(NoRoute("worker-1", departed=True))]
        self.ensure(self.one).addErrback(lambda _: None)
        other = self.ensure(self.two)
        gate.callback(None)
        self.clock.advance(0.5)
        self.assertEqual(self.outcome_of(other), NoRoute("worker-1", departed=True))

    def test_a_fault_of_ours_is_answered_and_logged(self) -> None:
        """
        An unexpected error answers every waiter and is logged; nobody waits for ever.
        """
        self.workers.errors["install"] = [ZeroDivisionError("oops")]
        text = str(self.failureResultOf(self.ensure(self.one), LoadFailed).value)
        self.assertIn("internal error", text)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_silence_ends_the_load_and_the_process(self) -> None:
        """
        A load that makes no progress is ended, says how far it came, and its process is stopped (LOAD-1).
        """
        self.hold_at("load")
        request = self.ensure(self.one)
        self.clock.pump([60.0] * 30)
        text = str(self.failureResultOf(request, LoadFailed).value)
        self.assertIn("deadline exceeded", text)
        self.assertIn("loading: ", text)
        self.assertEqual(self.workers.steps[-1], "stop")
        self.assertEqual(self.workers.processes, {})


class BrokenWayTests(LoadsCase):
    def test_a_lost_tunnel_interrupts_and_does_not_end_it(self) -> None:
        """
        A tunnel lost during the install or the load costs time, not the load (LOAD-11).
        """
        self.workers.errors["install"] = [Unreached(Reconnecting("worker-1")), Unreached(NotServed("cut"))]
        self.workers.errors["load"] = [RpcError(StatusCode.UNAVAILABLE, "connection lost", Origin.TRANSPORT)]
        log: list[LogEvent] = []
        self.patch(LoadJob, "log", Logger(observer=log.append))
        request = self.ensure(self.one)
        self.clock.pump([1.0] * 10)
        self.successResultOf(request)
        told = [event["why"] for event in log if "waits" in event["log_format"]]
        self.assertEqual(len(told), 3)  # each trouble once, whatever number of tries it lasts
        self.assertIn("expected back", told[0])
        self.assertEqual(self.workers.steps.count("install"), 4)
        self.assertEqual(self.workers.steps.count("load"), 2)

    def test_a_load_begins_and_ends_on_the_node_by_name(self) -> None:
        """
        The line at the end of a load names the node as the line at its beginning does.
        """
        log: list[LogEvent] = []
        self.patch(LoadJob, "log", Logger(observer=log.append))
        self.successResultOf(self.ensure(self.one))
        self.assertEqual([event["node"] for event in log if "node" in event], ["worker-1", "worker-1"])

    def test_what_it_waits_for_is_told_everywhere(self) -> None:
        """
        While the frontend that runs a load can't reach its node, waiters on any frontend, the list of operations and
        the answer of a client whose wait is over say why; not any more once it goes on (CLUS-13).
        """
        away = Unreached(PeerUnreachable("fe-3", "refused", address="10.0.0.3:8080"))
        self.workers.errors["install"] = [away] * 4
        first = self.ensure(self.one)
        waiter = self.ensure(self.two, wait=4.0)
        self.clock.pump([1.0] * 4)
        late = self.failureResultOf(waiter, StillLoading).value
        said = "model tiny is installing on node worker-1; it waits: the frontend that holds the tunnel (fe-3"
        self.assertEqual(late.told, f"{said}) can't be reached from here")
        self.assertIn(f"{said} at 10.0.0.3:8080) can't be reached from here: refused", str(late))
        (job,) = self.successResultOf(Deferred.fromCoroutine(self.two.jobs()))
        self.assertIn("10.0.0.3:8080", job.waits)
        self.assertNotIn("10.0.0.3", str(job.as_json()))
        gate = self.hold_at("stage")
        self.clock.pump([1.0] * 30)
        (job,) = self.successResultOf(Deferred.fromCoroutine(self.two.jobs()))
        self.assertEqual((job.state, job.waits), ("staging", ""))
        gate.callback(None)
        self.successResultOf(first)

    def test_a_caller_whose_deadline_passes_is_told_what_the_load_waits_for(self) -> None:
        """
        The 504 of a caller with a deadline of its own says how the load stood, at the frontend that runs it and at any
        other; the load goes on (CLUS-10).
        """
        away = Unreached(PeerUnreachable("fe-3", "refused", address="10.0.0.3:8080"))
        self.workers.errors["install"] = [away] * 4
        for loads in (self.one, self.two):
            deadline = self.clock.seconds() + 3.0
            asked = within(self.clock, deadline, loads.ensure(self.model), granted=3.0)
            self.clock.pump([0.5] * 6)
            late = self.failureResultOf(asked, Unreached).value
            self.assertEqual(
                late.told,
                "the request's own deadline of 3s passed: model tiny is installing on node worker-1; it waits: the "
                "frontend that holds the tunnel (fe-3) can't be reached from here",
            )
        self.clock.pump([1.0] * 30)
        self.assertEqual(len(self.database.replicas), 1)

    def test_what_it_waited_for_is_told_at_the_end(self) -> None:
        """
        A load whose node never came within reach fails with what kept it; the client's text has no address in it.
        """
        away = Unreached(PeerUnreachable("fe-3", "refused", address="10.0.0.3:8080"))
        self.workers.errors["install"] = [away] * 2000
        request = self.ensure(self.one)
        self.clock.pump([5.0] * 400)
        over = self.failureResultOf(request, LoadFailed).value
        self.assertIn("no progress", over.told)
        self.assertIn("(fe-3) can't be reached from here", over.told)
        self.assertNotIn("10.0.0.3", over.told)
        self.assertIn("10.0.0.3:8080", str(over))

    def test_a_node_that_is_waited_for_before_a_load_begins(self) -> None:
        """
        A load that waits for the only node to come back says so while it waits.
        """
        self.database.presence = dict.fromkeys(self.database.presence, PresenceState.RECONNECTING)
        waiter = self.ensure(self.one, wait=2.0)
        self.clock.pump([0.5] * 4)
        late = self.failureResultOf(waiter, StillLoading).value
        self.assertIn("it waits: node worker-1 lost its tunnel", late.told)

    def test_a_backend_that_always_dies_ends_it(self) -> None:
        """
        A backend that dies at each load is given up after a few tries.
        """
        lost = [RpcError(StatusCode.UNAVAILABLE, "connection lost", Origin.TRANSPORT) for _ in range(9)]
        self.workers.errors["load"] = list(lost)
        request = self.ensure(self.one)
        self.clock.pump([1.0] * 30)
        self.failureResultOf(request, LoadFailed)
        self.assertEqual(self.workers.steps.count("load"), 4)

    def test_a_verb_past_its_budget_ends_it(self) -> None:
        """
        An install past its budget is not begun again.
        """
        self.workers.errors["install"] = [Unreached(DeadlineExceeded("the worker did not answer within 15m"))]
        self.assertIsInstance(self.outcome_of(self.ensure(self.one)), DeadlineExceeded)

    def test_a_load_outlives_a_restart_of_the_database(self) -> None:
        """
        A load that is under way while PostgreSQL restarts ends well (WALK-15).
        """
        gate = self.hold_at("stage")
        request = self.ensure(self.one)
        self.database.away = True
        self.clock.advance(3.0)
        gate.callback(None)
        self.clock.advance(3.0)
        self.assertNoResult(request)
        self.database.away = False
        self.clock.advance(1.0)
        self.successResultOf(request)

    def test_without_the_database_nothing_is_known(self) -> None:
        """
        While the database is away a cold request reads "registry unavailable".
        """
        self.database.away = True
        self.assertIsInstance(self.outcome_of(self.ensure(self.one)), RegistryUnknown)


class TakeOverTests(LoadsCase):
    def freeze(self) -> None:
        """The owner goes silent: its row is anybody's."""
        self.database.jobs["tiny"].orphaned = True

    def test_a_waiter_takes_an_orphan_over(self) -> None:
        """
        The frontend that waits for another one's load takes it over when that one is gone (LOAD-6).
        """
        for step in ("install", "stage", "load"):
            self.setUp()
            self.hold_at(step)
            self.ensure(self.one)
            other = self.ensure(self.two)
            self.workers.gates.clear()
            self.freeze()
            self.clock.advance(0.5)
            self.successResultOf(other)

    def test_without_a_waiter_the_sweep_takes_it_over(self) -> None:
        """
        An orphan that nobody waits for is loaded all the same, by the next sweep (LOAD-6).
        """
        self.two.start()
        self.addCleanup(lambda: self.successResultOf(Deferred.fromCoroutine(self.two.stop())))
        self.hold_at("stage")
        self.ensure(self.one)
        self.workers.gates.clear()
        self.freeze()
        self.clock.advance(10.0)
        self.assertEqual(len(self.database.replicas), 1)
        self.assertEqual(self.database.jobs, {})

    def test_a_frozen_owner_that_wakes_does_nothing(self) -> None:
        """
        The old owner finds its attempt fenced: no verb, no row, and its waiters get the new owner's replica (LOAD-6).
        """
        gate = self.hold_at("stage")
        frozen = self.ensure(self.one)
        del self.workers.gates["stage"]
        self.freeze()
        self.successResultOf(self.ensure(self.two))
        before = list(self.workers.steps)
        replicas = dict(self.database.replicas)
        gate.callback(None)
        self.clock.advance(1.0)
        self.assertEqual(self.workers.steps, before)
        self.assertEqual(self.database.replicas, replicas)
        self.assertEqual(self.successResultOf(frozen).address, "127.0.0.1:20000")

    def test_an_old_owners_failure_stops_no_process(self) -> None:
        """
        A load that fails after it was taken over leaves the process alone: it is the new owner's (LOAD-6).
        """
        gate = self.hold_at("load")
        frozen = self.ensure(self.one)
        del self.workers.gates["load"]
        self.freeze()
        self.successResultOf(self.ensure(self.two))
        self.workers.result = pb.Result(success=False, message="bad magic")
        gate.callback(None)
        self.successResultOf(frozen)
        self.assertNotIn("stop", self.workers.steps)
        self.assertEqual(len(self.workers.processes), 1)

    def test_a_beat_that_finds_no_row_stops_the_job(self) -> None:
        """
        The heartbeat notices a take-over also while the job waits for a worker.
        """
        self.hold_at("load")
        mine = self.ensure(self.one)
        self.workers.gates.clear()
        self.freeze()
        self.successResultOf(self.ensure(self.two))
        self.clock.advance(1.0)
        self.successResultOf(mine)
        self.assertEqual(self.workers.steps[-1], "close")

    def test_a_stopping_frontend_hands_its_load_over(self) -> None:
        """
        Stopping ends the load here, tells the waiters, and the other frontend goes on at once.
        """
        self.hold_at("stage")
        request = self.ensure(self.one)
        other = self.ensure(self.two)
        self.successResultOf(Deferred.fromCoroutine(self.one.stop()))
        self.assertIn("stopping", str(self.failureResultOf(request, LoadFailed).value))
        self.workers.gates.clear()
        self.clock.advance(0.5)
        self.successResultOf(other)
        self.assertIn("stopping", str(self.failureResultOf(self.ensure(self.one, model=make_model("x"))).value))

    def test_nothing_is_left_behind(self) -> None:
        """
        After a load no timer, no flight and no waiter is left.
        """
        self.successResultOf(self.ensure(self.one))
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(self.one._flights, {})
