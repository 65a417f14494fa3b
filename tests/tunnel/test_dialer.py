"""A worker keeps one tunnel open, whichever frontend admits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

from automat import NoTransition
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import ILogObserver, LogLevel, formatEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from localai_dist import __version__
from localai_dist.backoff import Backoff
from localai_dist.ids import NodeId
from localai_dist.net.errors import DialFailed, DialRefused, SessionSilent
from localai_dist.tunnel.dialer import CLOSE_TIMEOUT, TunnelClient
from localai_dist.tunnel.link import Core, Link, make_link
from localai_dist.tunnel.urls import Rotation
from tests.tunnel.doubles import ASession

A, B, C = "http://a", "http://b", "http://c"
LATER = {"x-localai-dist-version": "9.9.9"}


class Frontends:
    """What the worker dials: each dial is answered by the test, in order."""

    def __init__(self) -> None:
        self.dials: list[tuple[str, dict[str, Any], Deferred[Any]]] = []

    def __call__(self, reactor: Any, url: str, **options: Any) -> Deferred[Any]:
        """Remember the dial."""
        answer: Deferred[Any] = Deferred()
        self.dials.append((url, options, answer))
        return answer

    @property
    def hosts(self) -> str:
        """Which hosts were dialled, in order."""
        return "".join(url.removeprefix("http://")[0] for url, _, _ in self.dials)


class DialerCase(SynchronousTestCase):
    """A started client on a clock."""

    urls = (A, B)

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1000)
        self.frontends = Frontends()
        self.node: NodeId | None = NodeId("n-1")
        self.token: str | None = "t0ken"
        self.unauthorised = 0
        self.logged: list[Any] = []
        observer = cast(ILogObserver, self.logged.append)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        self.client = TunnelClient(
            name="box",
            reactor=self.clock,
            urls=self.urls,
            node_id=lambda: self.node,
            token=lambda: self.token,
            on_stream=lambda stream: None,
            chance=lambda: 1.0,
            on_unauthorised=self.count,
            dial=self.frontends,
        )
        self.client.startService()

    def tearDown(self) -> None:
        """A stopped client leaves no timer and no session."""
        if self.client.running:
            stopping = self.client.stopService()
            self.clock.advance(CLOSE_TIMEOUT)
            self.successResultOf(stopping)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def count(self) -> None:
        """One 401 more."""
        self.unauthorised += 1

    def admit(self) -> ASession:
        """The frontend that was dialled last admits the worker."""
        session = ASession(self.clock.seconds())
        self.frontends.dials[-1][2].callback(session)
        return session

    def refuse(self, status: int | None = None) -> None:
        """The frontend that was dialled last refuses (with a status), or is not there."""
        error = DialFailed("refused") if status is None else DialRefused(status, LATER, f"HTTP {status}")
        self.frontends.dials[-1][2].errback(error)


class TunnelClientTests(DialerCase):
    """The service."""

    def test_presents_its_own_credential_on_each_dial(self) -> None:
        """A dial carries the node's id, its own token and the release; a new token counts on the next dial (WALK-9)."""
        url, options, _ = self.frontends.dials[0]
        self.assertEqual(url, "http://a/api/cluster/connect?id=n-1")
        self.assertEqual(options["headers"], {"Authorization": "Bearer t0ken", "X-LocalAI-Dist-Version": __version__})
        self.assertIs(options["client"], True)
        self.token = "other"
        self.refuse()
        self.assertEqual(self.frontends.dials[1][1]["headers"]["Authorization"], "Bearer other")

    def test_without_a_credential_nothing_is_dialled(self) -> None:
        """A node that is not registered yet waits instead of dialling, and dials at once when told."""
        self.token = None
        self.refuse()
        self.assertEqual(self.frontends.hosts, "a")
        self.assertIn("no credential yet", self.client.state.reason)
        self.token = "t"
        self.client.retry_now()
        self.assertEqual(self.frontends.hosts, "aa")

    def test_state_follows_the_tunnel(self) -> None:
        """Readiness says whether a tunnel is open, since when, and why not (WALK-16)."""
        self.assertEqual((self.client.connected, self.client.state.since), (False, None))
        tunnel = self.admit()
        self.assertEqual((self.client.state.connected, self.client.state.since), (True, 1000.0))
        self.clock.advance(5)
        tunnel.end()
        self.assertEqual((self.client.state.connected, self.client.state.since), (False, 1005.0))
        self.assertIn("connection was lost", self.client.state.reason)

    def test_why_there_is_no_tunnel_is_told_in_words(self) -> None:
        """Readiness names the frontend that gave no tunnel and why, not the dial's HTTP."""
        gateway = DialRefused(403, {}, "403 not the upgrade")
        for error, refused, words in (
            (DialRefused(403, LATER, "403 not the upgrade"), 403, "waiting for approval"),
            (gateway, None, "a proxy or gateway"),
            (DialFailed("refused"), None, "http://b: refused"),
        ):
            for _ in self.urls:
                self.frontends.dials[-1][2].errback(error)
            self.assertEqual(self.client.state.refused, refused)
            self.assertIn(words, self.client.state.reason)
            self.client.retry_now()
        self.admit().end()
        self.assertIn("connection was lost", self.client.state.reason)

    def test_each_loss_and_each_recovery_is_one_line(self) -> None:
        """20 tunnels ended by a balancer after a minute each, then ten minutes without: lines and count (BR-117)."""
        for _ in range(20):
            tunnel = self.admit()
            self.clock.advance(60)
            tunnel.end()
            while self.frontends.dials[-1][2].called:
                self.clock.advance(1)
        for _ in range(600):
            if not self.frontends.dials[-1][2].called:
                self.refuse()
            self.clock.advance(1)
        while self.frontends.dials[-1][2].called:
            self.clock.advance(1)
        self.admit()
        ours = [event for event in self.logged if event["log_namespace"].startswith("localai_dist.tunnel")]
        said = [formatEvent(event) for event in ours if event["log_level"] >= LogLevel.info]
        lost = [line for line in said if "the tunnel ended after 60.0 s" in line]
        again = [line for line in said if "tunnel open again" in line]
        self.assertEqual((len(lost), len(again), self.client.state.losses), (20, 20, 20))
        self.assertIn("20 lost so far", again[-1])
        away = float(again[-1].split(" after ")[1].split(" s")[0])
        self.assertGreaterEqual(away, 600)
        # In ten minutes of outage each frontend is complained of once, not on every try.
        self.assertLess(len(said), 20 + 20 + 10)

    def test_refused_the_next_one_at_once_and_back_off_after_a_whole_round(self) -> None:
        """Each frontend is tried before any wait; then the waits double to 30 s."""
        self.refuse()
        self.assertEqual(self.frontends.hosts, "ab")
        waits = []
        for _ in range(8):
            self.refuse(503)
            (call,) = self.clock.getDelayedCalls()
            waits.append(call.getTime() - self.clock.seconds())
            self.clock.advance(waits[-1])
            self.refuse()
        self.assertEqual(waits, [0.5, 1, 2, 4, 8, 16, 30, 30])

    def test_the_last_that_worked_is_tried_first(self) -> None:
        """After a lost tunnel the same frontend is tried first."""
        self.refuse()
        self.admit().end()
        self.clock.advance(1)
        self.assertEqual(self.frontends.hosts, "abb")

    def test_a_silent_frontend_is_not_tried_first(self) -> None:
        """A frontend that fell silent would cost the whole dial timeout: its neighbour is tried first."""
        self.admit().end(SessionSilent("nothing received"))
        self.clock.advance(1)
        self.assertEqual(self.frontends.hosts, "ab")

    def test_every_refusal_is_retried_and_logged_in_its_own_words(self) -> None:
        """Every refusal is tried again; the log says which it was in its own words, never the token (WALK-23)."""
        said = set()
        for status in (401, 403, 404, 426, 503, 418, None):
            del self.logged[:]
            self.refuse(status)
            warnings = [event for event in self.logged if event["log_level"].name == "warn"]
            self.assertEqual([event["status"] for event in warnings], [status])
            said.add(warnings[0]["log_format"])
            self.assertNotIn("t0ken", repr(self.logged))
            if status == 403:
                self.assertIn("run 'localai-dist nodes approve box' there", formatEvent(warnings[0]))
            self.clock.advance(30)
        self.assertEqual(len(said), 7)
        self.assertEqual(self.unauthorised, 1)

    def test_a_refusal_of_something_on_the_way(self) -> None:
        """A 403 of a gateway does not send the operator to the approvals: it names the gateway (BR-001)."""
        del self.logged[:]
        self.frontends.dials[-1][2].errback(DialRefused(403, {}, "HTTP 403"))
        warning = next(event for event in self.logged if event["log_level"].name == "warn")
        self.assertIn("403 from something at http://a", formatEvent(warning))
        self.assertIn("gateway", formatEvent(warning))

    def test_another_release_is_named_and_dialled_again(self) -> None:
        """A worker refused for its release says both releases and the upgrade order, and keeps trying (CLUS-28)."""
        dials = len(self.frontends.dials)
        del self.logged[:]
        self.refuse(426)
        warning = next(event for event in self.logged if event["log_level"].name == "warn")
        said = formatEvent(warning)
        self.assertIn(__version__, said)
        self.assertIn("9.9.9", said)
        self.assertIn("upgrade all frontends first, then the workers", said)
        self.clock.advance(30)
        self.assertGreater(len(self.frontends.dials), dials)
        self.assertEqual(self.unauthorised, 0)

    def test_401_lets_the_worker_register_anew(self) -> None:
        """A 401 tells the worker, and only a 401."""
        self.refuse(403)
        self.assertEqual(self.unauthorised, 0)
        self.refuse(401)
        self.assertEqual(self.unauthorised, 1)

    def test_short_sessions_back_off_and_a_long_one_resets(self) -> None:
        """Tunnels that are lost at once are redialled ever more slowly; after one of 30 s the waits start anew."""
        waits = []
        for lasted in (1, 1, 1, 30, 1):
            tunnel = self.admit()
            self.clock.advance(lasted)
            tunnel.end()
            (call,) = self.clock.getDelayedCalls()
            waits.append(call.getTime() - self.clock.seconds())
            self.clock.advance(waits[-1])
        self.assertEqual(waits, [0.5, 1, 2, 0.5, 1])

    def test_make_before_break(self) -> None:
        """On go-away the next tunnel is dialled at once, elsewhere; the old one stays until its streams are done."""
        old = self.admit()
        old.stream_count = 2
        self.clock.advance(60)
        assert old.on_go_away is not None
        old.on_go_away()
        self.clock.advance(0)
        self.assertEqual(self.frontends.hosts, "ab")
        self.assertTrue(self.client.connected)
        self.assertTrue(old.is_open)
        new = self.admit()
        self.assertTrue(old.is_open and new.is_open)
        assert old.on_idle is not None
        old.on_idle()
        self.assertTrue(old.closed_here)
        self.assertTrue(self.client.connected and new.is_open)
        self.assertEqual(self.frontends.hosts, "ab")

    def test_a_tunnel_that_nobody_owns_is_replaced(self) -> None:
        """
        Two heartbeats in a row by which no frontend owns the open tunnel: the next one is opened elsewhere, once, and
        the old one stays until its streams are done. One such heartbeat, or none in a row, changes nothing.
        """
        old = self.admit()
        old.stream_count = 1
        self.clock.advance(60)
        for held in (False, True, False, True):
            self.client.registry_says(held)
            self.clock.advance(10)
        self.assertEqual(self.frontends.hosts, "a")
        for _ in range(4):
            self.client.registry_says(False)
        self.clock.advance(0)
        self.assertEqual(self.frontends.hosts, "ab")
        self.assertTrue(self.client.connected and old.is_open)
        self.client.registry_says(False)  # the new one is not open yet
        new = self.admit()
        self.client.registry_says(False)  # asked before the new frontend's claim
        self.clock.advance(10)
        self.assertTrue(old.is_open and new.is_open)
        self.assertEqual(self.frontends.hosts, "ab")
        assert old.on_idle is not None
        old.on_idle()
        self.assertTrue(old.closed_here and self.client.connected)

    def test_a_tunnel_that_nobody_owns_is_kept_while_nobody_else_admits(self) -> None:
        """As long as every other frontend refuses, the tunnel there is goes on; the tries follow the backoff."""
        old = self.admit()
        self.clock.advance(60)
        for _ in range(2):
            self.client.registry_says(False)
        self.clock.advance(0)
        self.refuse()
        self.refuse(500)
        self.assertTrue(self.client.connected and old.is_open)
        for _ in range(3):
            self.client.registry_says(False)
        self.assertEqual(self.frontends.hosts, "aba")
        self.clock.advance(30)
        self.assertEqual(self.frontends.hosts, "abab")
        new = self.admit()
        self.assertTrue(old.closed_here and new.is_open)

    def test_a_heartbeat_without_a_tunnel_says_nothing(self) -> None:
        """While there is no tunnel, that nobody owns one is no news."""
        for _ in range(3):
            self.client.registry_says(False)
        tunnel = self.admit()
        self.client.registry_says(False)
        self.clock.advance(1)
        self.assertEqual(self.frontends.hosts, "a")
        self.assertTrue(tunnel.is_open)

    def test_a_retiring_tunnel_without_streams_is_closed(self) -> None:
        """The frontend that said go-away does not have to wait for a tunnel nobody uses."""
        old = self.admit()
        assert old.on_go_away is not None
        old.on_go_away()
        self.clock.advance(0)
        self.assertTrue(old.is_open)
        new = self.admit()
        self.assertTrue(old.closed_here)
        # Its end is not the new one's: nothing is dialled in its place.
        self.assertTrue(self.client.connected and new.is_open)
        self.clock.advance(29)
        self.assertEqual(self.frontends.hosts, "ab")

    def test_go_away_and_nobody_else_takes_it(self) -> None:
        """While no other frontend admits the worker the old tunnel goes on; its end starts no second round."""
        old = self.admit()
        assert old.on_go_away is not None
        old.on_go_away()
        self.clock.advance(0)
        self.refuse()
        self.refuse(503)
        self.assertTrue(self.client.connected)
        old.end()
        self.assertFalse(self.client.connected)
        self.assertEqual(len(self.clock.getDelayedCalls()), 1)
        self.clock.advance(30)
        self.assertEqual(self.frontends.hosts, "abab"[: len(self.frontends.hosts)])
        self.admit()
        self.assertTrue(self.client.connected)

    def test_lost_while_the_next_is_dialled(self) -> None:
        """The old tunnel may end before the next is open: the dial under way goes on."""
        old = self.admit()
        assert old.on_go_away is not None
        old.on_go_away()
        self.clock.advance(0)
        old.end()
        self.assertFalse(self.client.connected)
        self.assertEqual(self.frontends.hosts, "ab")
        self.admit()
        self.assertTrue(self.client.connected)

    def test_a_rolling_restart_is_followed_at_once(self) -> None:
        """However many frontends go away one after the other, the next tunnel is dialled without a wait (CLUS-22)."""
        for _ in range(6):
            tunnel = self.admit()
            self.clock.advance(3)
            assert tunnel.on_go_away is not None
            tunnel.on_go_away()
            dials = len(self.frontends.dials)
            self.clock.advance(0)
            self.assertEqual(len(self.frontends.dials), dials + 1)

    def test_frontends_that_send_on_in_a_row_make_no_busy_loop(self) -> None:
        """Two workers with one identity push each other out: after each frontend said go once, the waits grow."""
        waits = []
        for _ in range(6):
            tunnel = self.admit()
            assert tunnel.on_go_away is not None
            tunnel.on_go_away()
            tunnel.end()
            (call,) = self.clock.getDelayedCalls()
            waits.append(call.getTime() - self.clock.seconds())
            self.clock.advance(waits[-1])
        self.assertEqual(waits[0], 0)
        self.assertTrue(all(wait > 0 for wait in waits[2:]), waits)
        self.assertEqual(waits, sorted(waits))

    def test_stop_closes_and_waits(self) -> None:
        """Stopping closes every tunnel, also one that retires, and waits until they have ended."""
        old = self.admit()
        old.stream_count = 1
        assert old.on_go_away is not None
        old.on_go_away()
        self.clock.advance(0)
        new = self.admit()
        self.successResultOf(self.client.stopService())
        self.assertTrue(old.closed_here and new.closed_here)

    def test_stop_while_dialling(self) -> None:
        """Stopping cancels the dial under way, and no other follows."""
        self.successResultOf(self.client.stopService())
        self.assertTrue(self.frontends.dials[-1][2].called)
        self.clock.advance(60)
        self.assertEqual(self.frontends.hosts, "a")

    def test_an_answer_after_the_stop(self) -> None:
        """A dial that can't be cancelled any more and is answered after the stop loses its session at once."""
        late = ASession(self.clock.seconds())

        def admitted_all_the_same(cancelled: Deferred[Any]) -> None:
            cancelled.callback(late)

        self.refuse()
        self.frontends.dials[-1][2]._canceller = admitted_all_the_same
        self.successResultOf(self.client.stopService())
        self.assertTrue(late.closed_here)
        self.assertFalse(self.client.connected)

    def test_go_away_on_a_tunnel_that_retires_already(self) -> None:
        """Only the current tunnel's go-away counts."""
        old = self.admit()
        old.stream_count = 1
        assert old.on_go_away is not None
        old.on_go_away()
        old.on_go_away()  # while the next is dialled
        self.clock.advance(0)
        self.admit()
        old.on_go_away()
        self.clock.advance(60)
        self.assertEqual(self.frontends.hosts, "ab")

    def test_stop_while_waiting_and_start_again(self) -> None:
        """A stopped service makes no further try; started again it dials."""
        self.refuse()
        self.refuse()
        self.successResultOf(self.client.stopService())
        self.clock.advance(100)
        self.assertEqual(self.frontends.hosts, "ab")
        self.client.startService()
        self.assertEqual(self.frontends.hosts, "aba")

    def test_a_session_that_does_not_close_is_cut(self) -> None:
        """A frontend that does not take part in the closing holds the worker up for 5 s at most."""
        tunnel = self.admit()
        tunnel.close = lambda: None  # type: ignore[method-assign]
        stopping = self.client.stopService()
        self.assertNoResult(stopping)
        self.clock.advance(CLOSE_TIMEOUT)
        self.successResultOf(stopping)
        self.assertFalse(tunnel.is_open)

    def test_an_unforeseen_error_is_logged_and_the_service_goes_on(self) -> None:
        """A defect in the dialling is a line in the log, not the end of the worker."""
        self.frontends.dials[-1][2].errback(ZeroDivisionError("oops"))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.clock.advance(1)
        self.assertEqual(self.frontends.hosts, "aa")


class MachineTests(SynchronousTestCase):
    """Every state against every input."""

    INPUTS = ("start", "stop", "dialled", "round_failed", "told_to_go", "lost", "retry")
    WAYS: ClassVar[dict[str, tuple[str, ...]]] = {
        "resting": (),
        "dialling": ("start",),
        "waiting": ("start", "round_failed"),
        "up": ("start", "dialled"),
        "lingering": ("start", "dialled", "told_to_go"),
        "replacing": ("start", "dialled", "told_to_go", "retry"),
        "stopped": ("stop",),
    }
    ILLEGAL = frozenset(
        {
            *((state, "dialled") for state in ("resting", "waiting", "up", "lingering", "stopped")),
            *((state, "round_failed") for state in ("resting", "waiting", "up", "lingering", "stopped")),
            *((state, "told_to_go") for state in ("resting", "dialling", "waiting")),
            *((state, "lost") for state in ("resting", "dialling", "waiting")),
        }
    )

    def machine(self, state: str) -> Link:
        """A machine in ``state``, on a core that records nothing and does nothing but its own work."""
        core = Core(Clock(), Rotation([A]), Backoff(), lambda: 1.0, lambda url: Deferred(), lambda reason: None)
        link = make_link(core)
        for step in self.WAYS[state]:
            self.give(link, step)
        return link

    def give(self, link: Link, name: str) -> None:
        """One input."""
        if name == "dialled":
            session: Any = ASession()
            link.dialled(session)
        else:
            step: Callable[[], None] = getattr(link, name)
            step()

    def test_every_pair_is_decided(self) -> None:
        """Each input in each state either has a transition or is one that can't happen, and raises."""
        for state in self.WAYS:
            for name in self.INPUTS:
                link = self.machine(state)
                with self.subTest(state=state, input=name):
                    if (state, name) in self.ILLEGAL:
                        self.assertRaises(NoTransition, self.give, link, name)
                    else:
                        self.give(link, name)
