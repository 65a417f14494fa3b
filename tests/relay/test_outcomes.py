"""What a worker or a peer answers, or fails to answer, and the one outcome that it is."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import Deferred

from localai_dist import reach
from localai_dist.mux.errors import SessionDead
from localai_dist.net.errors import DialFailed
from localai_dist.net.session import MuxSession
from localai_dist.reach import (
    Answer,
    Answered,
    DeadlineExceeded,
    NotServed,
    Outcome,
    PeerUnreachable,
    Refused,
    Unreached,
)
from localai_dist.registry.presence import PresenceState
from localai_dist.relay.forward import GrpcTarget, HttpTarget
from tests.relay.mesh import OWNED_HERE, OWNED_THERE, MeshCase, N, without

GRPC = GrpcTarget("127.0.0.1:20001")

REPLIES: list[tuple[bytes, Outcome, bool]] = [
    (b"err unavailable connection refused", Answered(Answer.BACKEND_UNAVAILABLE, "connection refused"), True),
    (b"err unknown-tag what is grpc", Refused("unknown-tag", "what is grpc"), False),
    (b"err bad-request no port", Refused("bad-request", "no port"), False),
    (b"err not-served too late", NotServed("not-served: too late"), False),
    (b"err from-a-newer-worker hello", NotServed("from-a-newer-worker: hello"), False),
    (b"err", NotServed("a reply this build does not know: 'err'"), False),
    (b"err ", NotServed("a reply this build does not know: 'err '"), False),
    (b"OK", NotServed("a reply this build does not know: 'OK'"), False),
    (b"ok then", NotServed("a reply this build does not know: 'ok then'"), False),
    (b"", NotServed("a reply this build does not know: ''"), False),
    (b"HTTP/1.1 200 OK", NotServed("a reply this build does not know: 'HTTP/1.1 200 OK'"), False),
]
"""What the worker replies, the outcome, and whether anybody may act on it."""


class WorkerReplyTests(MeshCase):
    """The worker's reply, over one's own tunnel and over the relay."""

    def each_way(self, check: Callable[[MuxSession], None]) -> None:
        """``check`` with the tunnel here, then with the tunnel at the other frontend."""
        for held, fact in ((self.here, OWNED_HERE), (self.there, OWNED_THERE)):
            self.here.tunnels.clear()
            self.registry.fact = fact
            check(self.tunnel(held).server)

    def test_each_reply_is_exactly_one_outcome(self) -> None:
        """Every refusal, an unknown code and garbage have one outcome each, the same over the relay (CLUS-11)."""

        def check(tunnel: MuxSession) -> None:
            for reply, outcome, acts in REPLIES:
                self.worker.reply = reply
                found = self.outcome(self.forwarder.open(N, GRPC))
                self.assertEqual(found, outcome, reply)
                self.assertEqual(reach.may_reap(found), acts, reply)
                self.assertFalse(reach.may_demote(found), reply)
                self.assertEqual(tunnel.stream_count, 0)

        self.each_way(check)

    def test_the_workers_own_server(self) -> None:
        """A reply about the worker's own HTTP server says nothing about any backend: nobody acts on it (CLUS-11)."""

        def check(tunnel: MuxSession) -> None:
            for reply, outcome, _ in REPLIES:
                self.worker.reply = reply
                found = self.outcome(self.forwarder.open(N, HttpTarget()))
                if isinstance(outcome, Answered):
                    self.assertEqual(found, NotServed("unavailable: connection refused"))
                else:
                    self.assertEqual(found, outcome)
                self.assertFalse(reach.may_reap(found) or reach.may_demote(found))

        self.each_way(check)

    def test_bytes_that_are_no_text(self) -> None:
        """A reply that is no text says nothing about the backend; odd bytes after a code do not matter (CLUS-11)."""

        def check(tunnel: MuxSession) -> None:
            for reply in (b"\xff\xfe", b"err \xff refused", b"err unavailable\xff refused"):
                self.worker.reply = reply
                self.assert_not_served(self.outcome(self.forwarder.open(N, GRPC)))
            self.worker.reply = b"err unavailable \xff"
            found = self.outcome(self.forwarder.open(N, GRPC))
            self.assertEqual(found, Answered(Answer.BACKEND_UNAVAILABLE, "\N{REPLACEMENT CHARACTER}"))

        self.each_way(check)

    def test_nothing(self) -> None:
        """A stream that ends, is reset, or hears nothing for 15 s was not served; nobody may act on it (CLUS-11)."""

        def check(tunnel: MuxSession) -> None:
            self.worker.reply = None
            for end in ("close", "reset", "silence"):
                opening = self.begin(self.forwarder.open(N, GRPC))
                stream = self.worker.streams[-1]
                if end == "close":
                    stream.loseConnection()
                    self.settle()
                elif end == "reset":
                    stream.abortConnection()
                    self.settle()
                else:
                    self.pass_time(16)
                self.assert_not_served(self.failureResultOf(opening, Unreached).value.outcome)

        self.each_way(check)

    def test_a_session_that_dies_is_whose_it_is(self) -> None:
        """A tunnel that dies before the reply was not served; a peer link that does is the peer's (CLUS-11)."""
        tunnel = self.tunnel(self.here)
        self.worker.reply = None
        opening = self.begin(self.forwarder.open(N, GRPC))
        tunnel.server.abort(SessionDead("pulled"))
        self.settle()
        self.assert_not_served(self.failureResultOf(opening, Unreached).value.outcome)
        self.registry.fact = OWNED_THERE
        self.tunnel(self.there)
        opening = self.begin(self.forwarder.open(N, GRPC))
        self.links[-1].client.abort(SessionDead("pulled"))
        self.settle()
        self.assertIsInstance(self.failureResultOf(opening, Unreached).value.outcome, PeerUnreachable)

    def test_a_worker_that_says_ok(self) -> None:
        """A control: the same way ends in a stream when the worker says yes (CLUS-11)."""

        def check(tunnel: MuxSession) -> None:
            self.worker.reply = b"ok"
            self.result(self.forwarder.open(N, GRPC)).abortConnection()
            self.settle()

        self.each_way(check)

    def assert_not_served(self, outcome: Outcome) -> None:
        """Nothing is known, so nothing may be done but once more on a fresh stream."""
        self.assertIsInstance(outcome, NotServed)
        self.assertFalse(reach.may_reap(outcome) or reach.may_demote(outcome))
        self.assertIs(reach.may_retry(outcome), reach.Retry.ONCE_FRESH)


class NeverRelayedTests(MeshCase):
    """Frontends without an address."""

    def test_an_owner_without_an_address_is_never_relayed_to(self) -> None:
        """Nobody dials a frontend that advertises nothing; its node is a peer out of reach, not a lost one (CLUS-5)."""
        self.registry.fact = OWNED_THERE.__class__(OWNED_THERE.presence, OWNED_THERE.owner, None, OWNED_THERE.epoch)
        outcome = self.outcome(self.forwarder.open(N, GRPC))
        assert isinstance(outcome, PeerUnreachable)
        self.assertIn("advertises no address", outcome.text)
        self.assertFalse(reach.may_reap(outcome))
        self.assertEqual(self.dials, [])


class DeadlineTests(MeshCase):
    """The caller's deadline, whatever else is true."""

    def at_the_deadline(self, opening: Deferred[object], seconds: float) -> None:
        """It ends with the caller's deadline, then and not before."""
        self.pass_time(seconds - 0.5)
        self.assertNoResult(opening)
        self.pass_time(0.5)
        self.assertEqual(self.failureResultOf(opening, Unreached).value.outcome, DeadlineExceeded())

    def test_whoever_hangs(self) -> None:
        """Database, peer's dial, peer's answer, worker's answer: each that hangs ends at the deadline (CLUS-10)."""
        for hanging in ("database", "dial", "peer", "worker", "worker over the relay"):
            self.setUp()
            self.registry.fact = OWNED_THERE
            if hanging == "database":
                self.registry.hang = Deferred()
            elif hanging == "dial":
                self.dial_hang = Deferred()
            elif hanging == "peer":
                self.serve_link = lambda stream: stream.accept()
            else:
                self.worker.reply = None
                self.tunnel(self.here if hanging == "worker" else self.there)
            deadline = self.clock.seconds() + 3
            self.at_the_deadline(self.begin(self.forwarder.open(N, GRPC, deadline=deadline)), 3)
            self.assertEqual([pair.client.stream_count for pair in self.pairs], [0] * len(self.pairs), hanging)
            self.tearDown()
        self.setUp()

    def test_whatever_fails_when_the_time_is_up(self) -> None:
        """A failure that comes as late as the deadline is the deadline's, and blames nobody (CLUS-10)."""
        self.registry.fact = OWNED_THERE
        for error in (DialFailed("refused"), Unreached(PeerUnreachable("there", "x")), SessionDead("gone")):
            self.dial_error = error
            hang = self.dial_hang = Deferred()
            opening = self.begin(self.forwarder.open(N, GRPC, deadline=self.clock.seconds() + 3))
            self.clock.rightNow += 3  # the timer of the deadline itself has not run yet
            hang.callback(None)
            self.assertEqual(self.failureResultOf(opening, Unreached).value.outcome, DeadlineExceeded())
            self.settle()

    def test_an_expired_deadline_comes_before_everything(self) -> None:
        """With no time left nobody is asked, however wrong everything else is (CLUS-10)."""
        for spoil in (lambda: None, self.no_route, self.no_database):
            spoil()
            found = self.outcome(self.forwarder.open(N, GRPC, deadline=self.clock.seconds()))
            self.assertEqual((found, self.registry.asked, self.dials), (DeadlineExceeded(), 0, []))

    def no_route(self) -> None:
        """The node departed."""
        self.registry.fact = without(PresenceState.DEPARTED)

    def no_database(self) -> None:
        """Nothing is known."""
        self.registry.down = True

    def test_in_time_the_real_reason_is_told(self) -> None:
        """A control: a failure within the deadline is what it is (CLUS-10)."""
        self.registry.fact = OWNED_THERE
        self.dial_error = DialFailed("refused")
        found = self.outcome(self.forwarder.open(N, GRPC, deadline=self.clock.seconds() + 3))
        self.assertIsInstance(found, PeerUnreachable)


class RestartedPeerTests(MeshCase):
    """A peer that comes back elsewhere."""

    def test_it_is_found_again(self) -> None:
        """After the link ended the next request asks for the owner anew and dials its new address (CLUS-9)."""
        self.registry.fact = OWNED_THERE
        self.tunnel(self.there)
        self.result(self.forwarder.open(N, GRPC)).abortConnection()
        fact = OWNED_THERE
        self.registry.fact = fact.__class__(fact.presence, fact.owner, "10.0.0.9:1", fact.epoch)
        self.links[0].server.abort(SessionDead("restarted"))
        self.settle()
        self.result(self.forwarder.open(N, GRPC)).abortConnection()
        self.assertEqual([url.split("/")[2] for url, _ in self.dials], ["10.0.0.2:8080", "10.0.0.9:1"])
        self.assertEqual(self.registry.asked, 2)
