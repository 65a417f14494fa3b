"""One request's way, through every condition, with doubles that behave."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.grpcclient.status import Origin, RpcError, StatusCode
from localai_dist.ids import NodeId
from localai_dist.loads.errors import LoadFailed
from localai_dist.reach import (
    Answer,
    Answered,
    Cancelled,
    NoRoute,
    NotServed,
    PeerUnreachable,
    Reconnecting,
    RegistryUnknown,
    Unreached,
)
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.scheduler.placement import NoPlace
from localai_dist.serving.errors import RequestRefused
from localai_dist.serving.inference import Inference, Waits
from localai_dist.store.errors import StoreUnavailable
from tests.serving.doubles import (
    FakeChannel,
    FakeConnect,
    FakeLoads,
    FakeOwnership,
    FakeReplica,
    FakeReplicas,
    FakeRequestFiles,
    FakeStream,
    make_model,
)

A, B = NodeId("node-a"), NodeId("node-b")
LOST = RpcError(StatusCode.UNAVAILABLE, "the connection was lost", Origin.TRANSPORT)


@dataclass
class World:
    """Everything around one ``Inference``."""

    ways: list[FakeChannel | Unreached]
    rows: list[FakeReplica] = field(default_factory=lambda: [FakeReplica(A)])

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.replicas = FakeReplicas(self.rows)
        self.ownership = FakeOwnership()
        self.loads = FakeLoads(self.replicas, [FakeReplica(B, address="127.0.0.1:20007")])
        self.connect = FakeConnect(self.ways)
        self.files = FakeRequestFiles()
        self.inference = Inference(
            replicas=self.replicas,
            ownership=self.ownership,
            loads=self.loads,
            connect=self.connect,
            files=self.files,
            clock=self.clock,
            waits=Waits(route=5.0, load=60.0, grace=90.0),
        )
        self.model = make_model()

    def predict(self) -> Deferred[pb.Reply]:
        return Deferred.fromCoroutine(self.inference.predict(self.model, pb.PredictOptions()))

    def generate(self) -> Deferred[Any]:
        return Deferred.fromCoroutine(self.inference.generate(self.model, pb.PredictOptions()))


def run(work: Coroutine[Any, Any, Any]) -> Deferred[Any]:
    return Deferred.fromCoroutine(work)


class InferenceTests(SynchronousTestCase):
    def outcome(self, asked: Deferred[Any]) -> object:
        return self.failureResultOf(asked, Unreached).value.outcome

    def assert_nothing_left(self, world: World) -> None:
        """Every begun call was ended once, every channel closed, no timer left."""
        self.assertEqual(world.replicas.running, 0)
        self.assertEqual(len(world.replicas.ended), len(world.replicas.begun))
        self.assertEqual(world.clock.getDelayedCalls(), [])

    def test_warm_replica(self) -> None:
        """
        A loaded model answers from its replica, with that backend's own token; nothing is loaded.
        """
        channel = FakeChannel()
        world = World([channel])
        self.assertEqual(self.successResultOf(world.predict()).message, b"hello")
        self.assertEqual(world.connect.attempts, [(A, "127.0.0.1:20000", "backend-secret")])
        self.assertEqual((world.loads.waits, channel.closed), ([], 1))
        self.assert_nothing_left(world)

    def test_cold_model_is_loaded(self) -> None:
        """
        A model nobody has loaded is loaded, within the load wait, and then answers.
        """
        world = World([FakeChannel()], rows=[])
        self.successResultOf(world.predict())
        self.assertEqual((world.loads.waits, world.connect.attempts[0][0]), ([60.0], B))
        self.assert_nothing_left(world)

    def test_reconnecting_worker_is_waited_for(self) -> None:
        """
        A worker that comes back within the route wait serves the request; its row is not touched (WALK-16).
        """
        lost = Unreached(Reconnecting(A))
        world = World([lost, lost, lost, FakeChannel()])
        asked = world.predict()
        self.assertNoResult(asked)
        world.clock.pump([0.25] * 3)
        self.successResultOf(asked)
        self.assertEqual((world.replicas.reaped, world.loads.waits), ([], []))
        self.assert_nothing_left(world)

    def test_route_wait_ends(self) -> None:
        """
        A worker that does not come back in time is told as reconnecting, at the route wait, and nothing is reaped or
        loaded elsewhere (WALK-16).
        """
        for lost in (Reconnecting(A), PeerUnreachable("frontend-1", "refused")):
            world = World([Unreached(lost)])
            asked = world.predict()
            world.clock.pump([0.25] * 19)
            self.assertNoResult(asked)
            world.clock.pump([0.25] * 2)
            self.assertEqual(self.outcome(asked), lost)
            self.assertEqual((world.replicas.reaped, world.loads.waits), ([], []))
            self.assert_nothing_left(world)

    def test_departed_worker(self) -> None:
        """
        A worker that is gone for good loses its row, and the model is loaded elsewhere in the same request.
        """
        gone = NoRoute(A, departed=True)
        world = World([Unreached(gone), FakeChannel()])
        self.successResultOf(world.predict())
        self.assertEqual((world.replicas.reaped, world.connect.attempts[-1][0]), ([(A, gone)], B))
        self.assert_nothing_left(world)

    def test_nowhere_to_load(self) -> None:
        """
        With the only worker departed the request says no route, at once; with it reconnecting it waits first (WALK-16).
        """
        world = World([FakeChannel()], rows=[])
        world.loads.results = [NoPlace("no node that suits is connected", NoRoute(A, departed=True))]
        self.assertEqual(self.outcome(world.predict()), NoRoute(A, departed=True))
        world.loads.results = [NoPlace("no node that suits is connected", Reconnecting(A))]
        asked = world.predict()
        self.assertNoResult(asked)
        world.clock.pump([0.25] * 21)
        self.assertEqual(self.outcome(asked), Reconnecting(A))
        world.loads.results = [NoPlace("every slot is taken")]
        self.failureResultOf(world.predict(), NoPlace)
        world.loads.results = [LoadFailed("bad file")]
        self.failureResultOf(world.predict(), LoadFailed)

    def test_never_dialled(self) -> None:
        """
        A node that never dialled is told as no route, and its row stays.
        """
        world = World([Unreached(NoRoute(A, departed=False))])
        self.assertEqual(self.outcome(world.predict()), NoRoute(A, departed=False))
        self.assertEqual(world.replicas.reaped, [])

    def test_killed_backend_is_reloaded(self) -> None:
        """
        A backend that is not there any more costs its row, and the same request has it loaded again (WALK-11).
        """
        dead = Answered(Answer.BACKEND_UNAVAILABLE, "connection refused")
        world = World([Unreached(dead), FakeChannel()])
        self.successResultOf(world.predict())
        self.assertEqual((world.replicas.reaped, len(world.loads.waits)), ([(A, dead)], 1))
        self.assert_nothing_left(world)

    def test_backend_holding_another_model(self) -> None:
        """
        A backend that says it holds another model costs only that replica's row.
        """
        other = FakeChannel(reply=RpcError(StatusCode.NOT_FOUND, "model identity mismatch: I have x"))
        world = World([other, FakeChannel()])
        self.successResultOf(world.predict())
        self.assertEqual([node for node, _ in world.replicas.reaped], [A])
        self.assertEqual(other.closed, 1)

    def test_backend_that_always_dies(self) -> None:
        """
        A backend that dies after every load ends the request, it does not load for ever.
        """
        world = World([Unreached(Answered(Answer.BACKEND_UNAVAILABLE, "refused"))])
        self.assertIsInstance(self.outcome(world.predict()), Answered)
        self.assertEqual(len(world.loads.waits), 2)
        self.assert_nothing_left(world)

    def test_lost_connection_is_asked_about_again(self) -> None:
        """
        A connection lost before any reply says nothing: one more try on a fresh stream, and no row is touched.
        """
        world = World([FakeChannel(reply=LOST), FakeChannel()])
        self.successResultOf(world.predict())
        world = World([FakeChannel(reply=LOST)])
        self.assertIsInstance(self.outcome(world.predict()), NotServed)
        self.assertEqual((len(world.connect.attempts), world.replicas.reaped), (2, []))

    def test_another_replica_is_tried(self) -> None:
        """
        With two replicas the connected one is asked first, and the other one when that fails.
        """
        world = World([FakeChannel()], rows=[FakeReplica(A), FakeReplica(B, in_flight=3)])
        world.ownership.down = {A}
        self.successResultOf(world.predict())
        self.assertEqual([node for node, *_ in world.connect.attempts], [B])
        world = World([Unreached(Reconnecting(A)), FakeChannel()], rows=[FakeReplica(A), FakeReplica(B)])
        self.successResultOf(world.predict())
        self.assertEqual([node for node, *_ in world.connect.attempts], [A, B])

    def test_both_replicas_out_of_reach(self) -> None:
        """
        When no replica can be reached, all of them are tried again until the route wait is over.
        """
        world = World([Unreached(Reconnecting(A))], rows=[FakeReplica(A), FakeReplica(B)])
        asked = world.predict()
        world.clock.pump([0.25] * 21)
        self.assertIsInstance(self.outcome(asked), Reconnecting)
        self.assertEqual({node for node, *_ in world.connect.attempts}, {A, B})
        self.assert_nothing_left(world)

    def test_silent_registry(self) -> None:
        """
        A database that does not answer is waited for, then told as such; a restart in between is not seen (WALK-15).
        """
        world = World([FakeChannel()])
        world.replicas.trouble = StoreUnavailable("the database connection was lost")
        asked = world.predict()
        world.clock.pump([0.25] * 4)
        world.replicas.trouble = None
        world.clock.advance(0.25)
        self.successResultOf(asked)
        world.replicas.trouble = StoreUnavailable("the database connection was lost")
        asked = world.predict()
        world.clock.pump([0.25] * 21)
        self.assertIsInstance(self.outcome(asked), RegistryUnknown)

    def test_end_that_can_not_be_counted(self) -> None:
        """
        An answer is given even when the registry can't count its end.
        """
        channel = FakeChannel(hold=Deferred())
        world = World([channel])
        asked = world.predict()
        world.replicas.trouble = StoreUnavailable("gone")
        assert channel.hold is not None
        channel.hold.callback(None)
        self.successResultOf(asked)
        self.assertEqual(len(world.replicas.ended), 1)

    def test_registry_lost_while_dropping(self) -> None:
        """
        A registry that is lost just when a row was to be dropped ends the request as such.
        """
        world = World([Unreached(Answered(Answer.BACKEND_UNAVAILABLE, "refused"))])

        async def lose(replica: FakeReplica, outcome: object) -> bool:
            raise StoreUnavailable("gone")

        self.patch(world.replicas, "reap", lose)
        self.assertIsInstance(self.outcome(world.predict()), RegistryUnknown)
        self.assert_nothing_left(world)

    def test_row_removed_meanwhile(self) -> None:
        """
        A replica removed between choosing and beginning is not used; another way is found.
        """
        unused = FakeChannel()
        world = World([unused, FakeChannel()])
        chosen = world.replicas.rows
        world.replicas.hold_begin = hold = Deferred()
        asked = world.predict()
        world.replicas.rows = []
        world.replicas.hold_begin = None
        hold.callback(None)
        self.successResultOf(asked)
        self.assertEqual(([node for node, *_ in world.connect.attempts], chosen[0].node_id), ([A, B], A))
        self.assertEqual((unused.closed, unused.asked), (1, []))
        self.assert_nothing_left(world)

    def test_a_removed_row_costs_no_retry(self) -> None:
        """
        A backend that was killed: the request whose connection broke, and which then finds the row removed by another
        request, gets a new replica, not an error.
        """
        broken = FakeChannel(reply=LOST)
        for removed in (1, 3):
            world = World([broken] + [FakeChannel()] * (removed + 1))
            world.replicas.vanish = removed
            self.assertEqual(self.successResultOf(world.predict()).message, b"hello")
            self.assertEqual(len(world.loads.waits), removed)
            self.assert_nothing_left(world)

    def test_rows_that_vanish_for_ever(self) -> None:
        """
        A request whose replica is removed each time it was chosen is answered in the end.
        """
        world = World([FakeChannel(reply=LOST), FakeChannel()])
        world.replicas.vanish = 1000
        self.assertEqual(self.outcome(world.predict()), NotServed("its replica was removed just now"))
        self.assertEqual(len(world.loads.waits), 3)
        self.assert_nothing_left(world)

    def test_request_the_backend_refuses(self) -> None:
        """
        A request the backend calls invalid is the client's fault, told in the backend's own words.
        """
        world = World([FakeChannel(reply=RpcError(StatusCode.INVALID_ARGUMENT, "the prompt has 300 tokens"))])
        error = self.failureResultOf(world.predict(), RequestRefused)
        self.assertIn("300 tokens", str(error.value))
        self.assert_nothing_left(world)

    def test_cancel_while_answering(self) -> None:
        """
        A client that leaves cancels the call on the backend, and everything is returned (WALK-7).
        """
        channel = FakeChannel(hold=Deferred())
        world = World([channel])
        asked = world.predict()
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        self.assertEqual((channel.cancelled, channel.closed), (True, 1))
        self.assert_nothing_left(world)

    def test_cancel_while_waiting(self) -> None:
        """
        A client that leaves while its request waits for a worker leaves nothing behind.
        """
        world = World([Unreached(Reconnecting(A))])
        asked = world.predict()
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        self.assert_nothing_left(world)

    def test_cancel_while_counting(self) -> None:
        """
        A client that leaves while its call is being counted: the count goes down again once it went up.
        """
        channel = FakeChannel()
        world = World([channel])
        world.replicas.hold_begin = hold = Deferred()
        asked = world.predict()
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        self.assertEqual((world.replicas.begun, world.replicas.ended), ([], []))
        hold.callback(None)
        self.assertEqual((len(world.replicas.begun), len(world.replicas.ended)), (1, 1))
        self.assertEqual((channel.closed, channel.asked), (1, []))

    def test_embeddings_come_from_one_replica(self) -> None:
        """
        Several inputs are embedded in order over one channel.
        """
        vectors = [pb.EmbeddingResult(embeddings=[n]) for n in (1.0, 2.0)]
        world = World([FakeChannel(vectors=vectors)])
        inputs = [pb.PredictOptions(Embeddings=text) for text in ("a", "b")]
        results = self.successResultOf(run(world.inference.embed(world.model, inputs, deadline=9.0)))
        self.assertEqual(([list(one.embeddings) for one in results], world.connect.deadlines), ([[1.0], [2.0]], [9.0]))
        self.assert_nothing_left(world)


class GenerationTests(SynchronousTestCase):
    def test_replies_are_pulled(self) -> None:
        """
        Replies come when they are asked for, not before: a reader that stops stops the backend (WALK-6).
        """
        stream = FakeStream()
        world = World([FakeChannel(stream=stream)])
        asked = world.generate()
        self.assertNoResult(asked)
        stream.feed(b"a", b"b", b"c")
        generation = self.successResultOf(asked)
        self.assertEqual((generation.node, stream.pulled), (A, 1))
        self.assertEqual(self.successResultOf(run(generation.__anext__())).message, b"a")
        self.assertEqual(stream.pulled, 1)
        self.assertEqual(self.successResultOf(run(generation.__anext__())).message, b"b")
        self.assertEqual((stream.pulled, world.replicas.running), (2, 1))
        generation.close()
        generation.close()
        self.assertEqual((stream.cancelled, world.replicas.running, world.connect.ways[0].closed), (True, 0, 1))

    def test_whole_answer(self) -> None:
        """
        An answer read to its end is not cancelled; the lease goes back once.
        """
        stream = FakeStream()
        stream.feed(b"a", b"b")
        stream.finish()
        world = World([FakeChannel(stream=stream)])

        async def read() -> list[bytes]:
            generation = await world.inference.generate(world.model, pb.PredictOptions())
            try:
                return [reply.message async for reply in generation]
            finally:
                generation.close()

        self.assertEqual(self.successResultOf(run(read())), [b"a", b"b"])
        self.assertEqual((stream.cancelled, world.replicas.running), (False, 0))

    def test_empty_answer(self) -> None:
        """
        A model that says nothing ends at once.
        """
        stream = FakeStream()
        stream.finish()
        world = World([FakeChannel(stream=stream)])
        generation = self.successResultOf(world.generate())
        self.failureResultOf(run(generation.__anext__()), StopAsyncIteration)
        generation.close()
        self.assertFalse(stream.cancelled)

    def test_failure_before_the_first_reply_tries_elsewhere(self) -> None:
        """
        Until the first reply is here a failed stream is tried again; after it, never.
        """
        broken, good = FakeStream(), FakeStream()
        broken.feed(LOST)
        good.feed(b"x", LOST)
        world = World([FakeChannel(stream=broken), FakeChannel(stream=good)])
        generation = self.successResultOf(world.generate())
        self.assertTrue(broken.cancelled)
        self.assertEqual(self.successResultOf(run(generation.__anext__())).message, b"x")
        failure = self.failureResultOf(run(generation.__anext__()), Unreached)
        self.assertIsInstance(failure.value.outcome, NotServed)
        self.failureResultOf(run(generation.__anext__()), StopAsyncIteration)
        generation.close()
        self.assertEqual(world.replicas.running, 0)

    def test_call_that_can_not_start(self) -> None:
        """
        A call that fails before it began is like any other failed attempt.
        """
        gone = RpcError(StatusCode.CANCELLED, "closed", Origin.CALLER)
        world = World([FakeChannel(stream=gone)])
        failure = self.failureResultOf(world.generate(), Unreached)
        self.assertEqual(failure.value.outcome, Cancelled())
        self.assertEqual(world.replicas.running, 0)

    def test_cancel_before_the_first_reply(self) -> None:
        """
        A client that leaves before the first token cancels the call on the backend (WALK-7).
        """
        stream = FakeStream()
        world = World([FakeChannel(stream=stream)])
        asked = world.generate()
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        self.assertEqual((stream.cancelled, world.replicas.running), (True, 0))
