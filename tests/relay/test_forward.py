"""From a node to a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.protocol import Factory

from localai_dist import reach
from localai_dist.ids import InstanceId
from localai_dist.mux.classes import TrafficClass
from localai_dist.net.errors import DialFailed, DialRefused
from localai_dist.net.handshake import write_frame
from localai_dist.net.stream import MuxStream
from localai_dist.reach import Unreached
from localai_dist.registry.presence import Presence, PresenceState, RouteFact
from localai_dist.relay.forward import OWNER_CACHE, Forwarder, GrpcTarget, HttpTarget
from localai_dist.testing.memory import Recorder
from tests.relay.mesh import OWNED_HERE, OWNED_THERE, THERE, MeshCase, N, without

Serve: TypeAlias = Callable[[MuxStream], None]

GRPC = GrpcTarget("127.0.0.1:20001")


class Echo(Recorder):
    """Sends back what it gets."""

    def dataReceived(self, data: bytes) -> None:
        super().dataReceived(data)
        assert self.transport is not None
        self.transport.write(data)


class OwnTunnelTests(MeshCase):
    """The tunnel ends at this very frontend."""

    def setUp(self) -> None:
        super().setUp()
        self.own = self.tunnel(self.here)

    def test_a_tunnel_held_here_is_used_without_asking_the_database(self) -> None:
        """A locally held tunnel costs no query, and the stream is joined to the backend's port."""
        stream = self.result(self.forwarder.open(N, GRPC))
        self.assertEqual((self.worker.requests, self.registry.asked), ([b"grpc 127.0.0.1:20001"], 0))
        self.assert_echoes(stream)

    def test_the_class_is_on_the_stream_and_in_an_http_request(self) -> None:
        """Bulk goes out as bulk and the worker is told so; the usual class is not spelled out."""
        for traffic, request in [
            (TrafficClass.BULK, b"http b"),
            (TrafficClass.CONTROL, b"http c"),
            (TrafficClass.INFERENCE, b"http "),
        ]:
            stream = self.result(self.forwarder.open(N, HttpTarget(), traffic=traffic))
            self.assertEqual((stream.traffic, self.worker.requests[-1]), (traffic, request))
            stream.abortConnection()

    def test_each_reply_of_the_worker(self) -> None:
        """A refusal is the worker's own answer, never a missing route (WALK-16)."""
        for reply, outcome in [
            (b"err unavailable nobody", reach.Answered(reach.Answer.BACKEND_UNAVAILABLE, "nobody")),
            (b"err unknown-tag x", reach.Refused("unknown-tag", "x")),
            (b"err not-served y", reach.NotServed("not-served: y")),
            (b"garbage", reach.NotServed("a reply this build does not know: 'garbage'")),
        ]:
            self.worker.reply = reply
            self.assertEqual(self.outcome(self.forwarder.open(N, GRPC)), outcome)
            self.assertEqual(self.own.server.stream_count, 0)

    def test_no_reply_within_15_s(self) -> None:
        """A worker that takes the stream and says nothing did not serve it."""
        self.worker.reply = None
        opening = self.begin(self.forwarder.open(N, GRPC))
        self.pass_time(14.5)
        self.assertNoResult(opening)
        self.pass_time(1)
        self.assertIsInstance(self.failureResultOf(opening, Unreached).value.outcome, reach.NotServed)

    def test_the_tunnel_dies_before_the_reply(self) -> None:
        """A tunnel lost in the middle of the opening says nothing about the backend."""
        self.worker.reply = None
        opening = self.begin(self.forwarder.open(N, GRPC))
        self.own.server.abort(Exception("pulled"))
        self.settle()
        self.assertIsInstance(self.failureResultOf(opening, Unreached).value.outcome, reach.NotServed)

    def test_the_worker_ends_the_stream_before_the_reply(self) -> None:
        """A stream that ends without a word was not served."""
        self.worker.reply = None
        opening = self.begin(self.forwarder.open(N, GRPC))
        self.worker.streams[0].loseConnection()
        self.settle()
        self.assertIsInstance(self.failureResultOf(opening, Unreached).value.outcome, reach.NotServed)

    def test_a_full_tunnel(self) -> None:
        """A tunnel with 1000 streams serves no further one; that is no missing route."""
        self.own.client.on_stream = lambda stream: stream.accept()
        for _ in range(1000):
            self.own.server.open()
            self.settle()
        outcome = self.outcome(self.forwarder.open(N, GRPC))
        self.assertIsInstance(outcome, reach.NotServed)
        self.assertEqual(self.registry.asked, 0)

    def test_a_tunnel_that_is_going_away_is_not_used(self) -> None:
        """Where the worker moved to is asked of the database once its tunnel here takes no more streams."""
        self.own.client.go_away()
        self.settle()
        self.registry.fact = OWNED_HERE
        self.assertEqual(self.outcome(self.forwarder.open(N, GRPC)), reach.Reconnecting(N))

    def test_cancelling_gives_the_half_open_stream_up(self) -> None:
        """A caller that goes away leaves no stream behind."""
        self.worker.reply = None
        opening = self.begin(self.forwarder.open(N, GRPC))
        opening.cancel()
        self.failureResultOf(opening, CancelledError)
        self.settle()
        self.assertEqual(self.own.server.stream_count, 0)

    def test_an_ordinary_endpoint(self) -> None:
        """A protocol connects to a node as to any endpoint, and fails with the outcome."""
        recorder = Recorder()
        factory = Factory.forProtocol(lambda: recorder)
        self.worker.on_joined = lambda stream: stream.start(Echo())
        connecting = self.forwarder.endpoint(N, GRPC).connect(factory)
        self.settle()
        self.assertIs(self.successResultOf(connecting), recorder)
        assert recorder.transport is not None
        recorder.transport.write(b"hello")
        self.settle()
        self.assertEqual(recorder.data, b"hello")
        self.worker.reply = b"err unavailable gone"
        failing = self.forwarder.endpoint(N, GRPC).connect(factory)
        self.settle()
        self.assert_outcome(reach.Answered(reach.Answer.BACKEND_UNAVAILABLE, "gone"), failing)

    def assert_echoes(self, stream: MuxStream) -> None:
        """What is sent on ``stream`` comes back from the worker."""
        self.worker.streams[-1].start(Echo())
        recorder = Recorder()
        stream.start(recorder)
        stream.write(b"x" * 100_000)
        self.settle()
        self.assertEqual(len(recorder.data), 100_000)


class RelayedTests(MeshCase):
    """The tunnel ends at another frontend."""

    def setUp(self) -> None:
        super().setUp()
        self.tunnel(self.there)
        self.registry.fact = OWNED_THERE

    def open(self, **options: object) -> MuxStream:
        """A relayed stream."""
        return self.result(self.forwarder.open(N, GRPC, **options))  # type: ignore[arg-type]

    def test_bytes_cross_the_relay_both_ways(self) -> None:
        """A stream over the owner carries bytes both ways, as over one's own tunnel (WALK-5)."""
        stream = self.open()
        self.worker.streams[-1].start(Echo())
        recorder = Recorder()
        stream.start(recorder)
        stream.write(b"hello")
        self.settle()
        self.assertEqual((self.worker.requests, recorder.data), ([b"grpc 127.0.0.1:20001"], b"hello"))
        stream.loseConnection()
        self.settle()
        self.assertEqual(self.there.tunnels[N].stream_count, 0)
        self.assertEqual(self.links[0].client.stream_count, 0)

    def test_the_class_is_on_every_leg(self) -> None:
        """A bulk stream is bulk on the peer link, on the owner's tunnel and at the worker's door (MUX-15)."""
        stream = self.result(self.forwarder.open(N, HttpTarget(), traffic=TrafficClass.BULK))
        tunnel_leg = next(iter(self.there.tunnels[N]._streams.values()))
        link_leg = next(iter(self.links[0].server._streams.values()))
        self.assertEqual(
            [stream.traffic, link_leg.traffic, tunnel_leg.traffic, self.worker.requests[-1]],
            [TrafficClass.BULK] * 3 + [b"http b"],
        )

    def test_the_budget_travels(self) -> None:
        """The owner is told what is left of the caller's time, in ms rounded up; nothing if there is no deadline."""
        asked: list[bytes] = []
        self.serve_link = _spy(asked)
        for deadline in (None, self.clock.seconds() + 4.2001, self.clock.seconds() + 1e-9):
            opening = self.begin(self.forwarder.open(N, GRPC, deadline=deadline))
            opening.addErrback(lambda failure: failure.trap(Unreached))
        self.assertEqual(asked, [b"n-1 - i", b"n-1 4201 i", b"n-1 1 i"])
        self.pass_time(16)

    def test_the_owner_is_believed_for_5_s(self) -> None:
        """A remote owner is asked of the database once in 5 s."""
        self.open()
        self.open()
        self.assertEqual(self.registry.asked, 1)
        self.pass_time(OWNER_CACHE)
        self.open()
        self.assertEqual(self.registry.asked, 2)

    def test_a_lost_link_is_no_longer_believed(self) -> None:
        """After the link to the owner ended its ownership is asked again."""
        self.open()
        self.links[0].client.abort(Exception("pulled"))
        self.settle()
        self.open()
        self.assertEqual((self.registry.asked, len(self.dials)), (2, 2))

    def test_not_owner_is_asked_once_more(self) -> None:
        """An owner that has just lost the tunnel is not insisted on: the worker may have come to us meanwhile."""
        self.open()

        def moved(stream: MuxStream, payload: bytes) -> None:
            self.tunnel(self.here)
            write_frame(stream, b"err relay-not-owner gone")

        self.serve_link = _link(moved)
        self.assertIs(self.open().session, self.here.tunnels[N])

    def test_not_owner_and_the_database_knows_another(self) -> None:
        """A refusal by a believed owner leads to the one the database names now."""
        self.open()
        self.serve_link = _answer(b"err relay-not-owner gone")
        other = InstanceId("other")
        self.registry.fact = RouteFact(Presence(PresenceState.CONNECTED, other), other, "10.0.0.3:8080", None)
        opening = self.begin(self.forwarder.open(N, GRPC))
        self.assertEqual([url.split("/")[2] for url, _ in self.dials], ["10.0.0.2:8080", "10.0.0.3:8080"])
        self.assertIsInstance(self.failureResultOf(opening, Unreached).value.outcome, reach.PeerUnreachable)

    def test_not_owner_twice(self) -> None:
        """An owner the database insists on and that denies it is a peer out of reach; nothing is reaped."""
        del self.there.tunnels[N]
        outcome = self.outcome(self.forwarder.open(N, GRPC))
        self.assertIsInstance(outcome, reach.PeerUnreachable)
        self.assertEqual(self.registry.asked, 2)
        self.assertFalse(reach.may_reap(outcome))

    def test_a_believed_owner_that_can_not_be_dialled_is_asked_again(self) -> None:
        """When the link of a believed owner fails, the database may know a newer one."""
        self.open()
        self.links[0].server.go_away()
        self.settle()
        self.dial_error = DialFailed("10.0.0.2:8080: refused")
        self.registry.fact = without(PresenceState.RECONNECTING)
        self.assertEqual(self.outcome(self.forwarder.open(N, GRPC)), reach.Reconnecting(N))
        self.assertEqual((self.registry.asked, len(self.dials)), (2, 2))

    def test_a_failed_owner_is_not_believed_again(self) -> None:
        """Each request that finds its owner out of reach costs one query and one dial."""
        self.dial_error = DialFailed("10.0.0.2:8080: refused")
        for count in (1, 2, 3):
            self.assertIsInstance(self.outcome(self.forwarder.open(N, GRPC)), reach.PeerUnreachable)
            self.assertEqual((self.registry.asked, len(self.dials)), (count, count))

    def test_a_refusal_crosses_the_relay(self) -> None:
        """The worker's own answer is the same over the relay, and frees every leg."""
        self.worker.reply = b"err unavailable nobody"
        outcome = self.outcome(self.forwarder.open(N, GRPC))
        self.assertEqual(outcome, reach.Answered(reach.Answer.BACKEND_UNAVAILABLE, "nobody"))
        self.assertEqual((self.links[0].client.stream_count, self.there.tunnels[N].stream_count), (0, 0))

    def test_a_link_that_dies_during_the_opening(self) -> None:
        """The link's death is the peer's, not the worker's."""
        self.worker.reply = None
        opening = self.begin(self.forwarder.open(N, GRPC))
        self.links[0].client.abort(Exception("pulled"))
        self.settle()
        self.assertIsInstance(self.failureResultOf(opening, Unreached).value.outcome, reach.PeerUnreachable)

    def test_relay_replies_that_are_no_yes(self) -> None:
        """A tunnel that opens no stream, a bad request, an unknown word and silence are all the peer's."""
        for reply in (b"err relay-unavailable x", b"err relay-bad-request x", b"ok", b"\xff", None):
            self.serve_link = _answer(reply)
            opening = self.begin(self.forwarder.open(N, GRPC))
            self.pass_time(15)
            outcome = self.failureResultOf(opening, Unreached).value.outcome
            self.assertIsInstance(outcome, reach.PeerUnreachable, reply)
            self.assertFalse(reach.may_reap(outcome))


class OutcomeTests(MeshCase):
    """Every condition, and none reported as another."""

    def test_routing_facts(self) -> None:
        """Never dialled, departed and reconnecting are what the database says (WALK-16)."""
        for fact, outcome in [
            (without(PresenceState.NEVER_DIALLED), reach.NoRoute(N, departed=False)),
            (without(PresenceState.DEPARTED), reach.NoRoute(N, departed=True)),
            (without(PresenceState.RECONNECTING, 12.5), reach.Reconnecting(N, 12.5)),
            (OWNED_HERE, reach.Reconnecting(N)),
        ]:
            self.registry.fact = fact
            self.assertEqual(self.outcome(self.forwarder.open(N, GRPC)), outcome)
        self.assertEqual(self.dials, [])

    def test_a_failed_query_is_registry_unknown(self) -> None:
        """A database that does not answer says nothing about the route (WALK-15)."""
        self.registry.down = True
        self.assertEqual(self.outcome(self.forwarder.open(N, GRPC)), reach.RegistryUnknown("the database is away"))

    def test_peer_that_can_not_be_dialled(self) -> None:
        """A peer that does not answer, and one that refuses our identity, are condition 3, told apart."""
        self.registry.fact = OWNED_THERE
        for error, rejected in [
            (DialFailed("10.0.0.2:8080: refused"), False),
            (DialRefused(401, {}, "10.0.0.2:8080 answered 401"), True),
            (DialRefused(403, {}, "10.0.0.2:8080 answered 403"), True),
            (DialRefused(404, {}, "10.0.0.2:8080 answered 404"), False),
            (DialRefused(500, {}, "10.0.0.2:8080 answered 500"), False),
        ]:
            self.dial_error = error
            self.assertEqual(
                self.outcome(self.forwarder.open(N, GRPC)),
                reach.PeerUnreachable("there", str(error), rejected, "10.0.0.2:8080"),
            )

    def test_an_owner_without_an_address(self) -> None:
        """An owner that advertises no address can't be relayed to."""
        presence = Presence(PresenceState.CONNECTED, THERE)
        for fact in (RouteFact(presence, THERE, None, None), RouteFact(presence, None, "x:1", None)):
            self.registry.fact = fact
            self.assertIsInstance(self.outcome(self.forwarder.open(N, GRPC)), reach.PeerUnreachable)

    def test_no_peer_links_here(self) -> None:
        """A frontend without an address of its own serves its own tunnels and says why it reaches no other."""
        alone = Forwarder(self.here, None, self.registry, clock=self.clock, grace=90.0)
        self.registry.fact = OWNED_THERE
        outcome = self.outcome(alone.open(N, GRPC))
        self.assertIsInstance(outcome, reach.PeerUnreachable)
        self.assertIn("no advertised address", reach.describe(outcome))
        self.tunnel(self.here)
        self.result(alone.open(N, GRPC)).abortConnection()

    def test_a_stopping_frontend(self) -> None:
        """A frontend that stops blames nobody's route."""
        self.registry.fact = OWNED_THERE
        self.pool.close()
        self.assertEqual(
            self.outcome(self.forwarder.open(N, GRPC)), reach.PeerUnreachable(THERE, "this frontend stops")
        )


class DeadlineTests(MeshCase):
    """The caller's deadline is tested first."""

    def in_time(self, seconds: float) -> float:
        """An instant from now."""
        return self.clock.seconds() + seconds

    def test_an_expired_deadline_asks_nobody(self) -> None:
        """Too late is too late, whatever else is true."""
        self.registry.down = True
        outcome = self.outcome(self.forwarder.open(N, GRPC, deadline=self.in_time(0)))
        self.assertEqual((outcome, self.registry.asked), (reach.DeadlineExceeded(), 0))

    def test_it_passes_while_the_database_hangs(self) -> None:
        """A query that hangs ends at the caller's deadline as the caller's."""
        self.registry.hang = Deferred()
        opening = self.begin(self.forwarder.open(N, GRPC, deadline=self.in_time(3)))
        self.pass_time(3)
        self.assert_outcome(reach.DeadlineExceeded(), opening)

    def test_it_passes_while_the_peer_hangs(self) -> None:
        """A dial that hangs is not blamed on the peer."""
        self.registry.fact = OWNED_THERE
        self.dial_hang = Deferred()
        opening = self.begin(self.forwarder.open(N, GRPC, deadline=self.in_time(3)))
        self.pass_time(3)
        self.assert_outcome(reach.DeadlineExceeded(), opening)

    def test_it_passes_while_the_worker_hangs(self) -> None:
        """A worker that hangs ends at the caller's deadline, relayed or not, and no stream is left."""
        for held, fact in ((self.here, OWNED_HERE), (self.there, OWNED_THERE)):
            self.registry.fact = fact
            self.here.tunnels.clear()
            tunnel = self.tunnel(held)
            self.worker.reply = None
            opening = self.begin(self.forwarder.open(N, GRPC, deadline=self.in_time(3)))
            self.assertNoResult(opening)
            self.pass_time(3)
            self.assert_outcome(reach.DeadlineExceeded(), opening)
            self.assertEqual(tunnel.server.stream_count, 0)

    def test_it_wins_over_a_failure_at_the_same_moment(self) -> None:
        """A peer whose dial fails when the time is up is not to blame."""
        self.registry.fact = OWNED_THERE
        self.dial_error = DialFailed("timed out")
        hang = self.dial_hang = Deferred()
        opening = self.begin(self.forwarder.open(N, GRPC, deadline=self.in_time(3)))
        # the clock has moved on, but the deadline's own timer has not run yet
        self.clock.rightNow += 3
        hang.callback(None)
        self.assert_outcome(reach.DeadlineExceeded(), opening)

    def test_in_time_leaves_no_timer(self) -> None:
        """An open that succeeds in time has its deadline taken off."""
        self.tunnel(self.here)
        stream = self.result(self.forwarder.open(N, GRPC, deadline=self.in_time(3)))
        self.pass_time(10)
        self.assertTrue(stream.is_live)


def _spy(asked: list[bytes]) -> Serve:
    """A peer that notes the relay request and says nothing."""
    return _link(lambda stream, payload: asked.append(payload))


def _answer(reply: bytes | None) -> Serve:
    """A peer that gives one fixed relay reply."""
    return _link(lambda stream, payload: None if reply is None else write_frame(stream, reply))


def _link(then: Callable[[MuxStream, bytes], object]) -> Serve:
    def serve(stream: MuxStream) -> None:
        stream.accept()

        async def read() -> None:
            size = int.from_bytes(await stream.read_exactly(2), "big")
            then(stream, await stream.read_exactly(size))

        Deferred.fromCoroutine(read()).addErrback(lambda failure: None)

    return serve
