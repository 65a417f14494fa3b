"""Every condition as an HTTP client sees it: the whole site above, doubles below."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.grpcclient.status import Origin, RpcError, StatusCode
from localai_dist.loads.errors import LoadFailed, StillLoading
from localai_dist.loads.status import LoadStatus
from localai_dist.reach import (
    Answered,
    DeadlineExceeded,
    NoRoute,
    PeerUnreachable,
    Reconnecting,
    RegistryUnknown,
    Unreached,
)
from localai_dist.scheduler.placement import NoPlace
from localai_dist.serving.inference import Inference, Waits
from localai_dist.store.errors import StoreUnavailable
from tests.httpapi.doubles import NODE, Exchange, FakePresence, World
from tests.serving.doubles import (
    FakeChannel,
    FakeConnect,
    FakeLoads,
    FakeOwnership,
    FakeReplica,
    FakeReplicas,
    FakeStream,
)
from tests.support.outcomes import TABLE, Says

ROUTE_WAIT = 5.0

ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"model": "tiny", "prompt": "hi"}),
    ("/v1/embeddings", {"model": "tiny", "input": "hi"}),
]
STREAMED = [(path, {**body, "stream": True}) for path, body in ASKS[:2]]

LINES = [says for says in TABLE if says.status != 499]
"""Every outcome a client is still there to hear."""


def world_of(way: Any, *, loads: Any = None, **changes: Any) -> World:
    """A frontend whose one replica is reached like ``way``; a load of the model ends like ``loads``."""
    world = World(way, **changes)
    world.replicas = FakeReplicas([FakeReplica(NODE, "tiny")])
    again = FakeLoads(world.replicas, [loads or FakeReplica(NODE, "tiny")])
    world.connect = FakeConnect([way])
    inference = Inference(
        replicas=world.replicas,
        ownership=FakeOwnership(),
        loads=again,
        connect=world.connect,
        files=world.files,
        clock=world.clock,
        waits=Waits(route=ROUTE_WAIT),
    )
    object.__setattr__(world.api, "inference", inference)
    return world


class ConditionTests(SynchronousTestCase):
    """Each line of design §2's table."""

    def answered(self, world: World, path: str, body: Any, **headers: str) -> tuple[Exchange, float]:
        """The answer, and after how long it came."""
        got = world.send("POST", path, body, **headers)
        waited = 0.0
        while not got.answered and waited < 60:
            world.clock.advance(0.25)
            waited += 0.25
        return got, waited

    def assert_told(self, got: Exchange, says: Says) -> None:
        """The envelope, the status and the headers that the table asks for."""
        what = f"{says.outcome}: {got.raw!r}"
        self.assertEqual(got.status, says.status, what)
        self.assertEqual(got.headers["content-type"], "application/json", what)
        self.assertEqual(set(got.json), {"error"}, what)
        self.assertEqual(set(got.error), {"message", "type", "code", "param"}, what)
        self.assertEqual((got.error["code"], got.error["param"]), (says.code, None), what)
        self.assertEqual(got.error["type"], "server_error", what)
        self.assertEqual(got.headers["x-localai-condition"], says.code, what)
        self.assertTrue(got.headers["x-request-id"], what)
        self.assertEqual("retry-after" in got.headers, says.retry_after, what)
        if says.retry_after:
            self.assertGreater(int(got.headers["retry-after"]), 0)
        if isinstance(says.outcome, NoRoute):
            self.assertIn("no route", got.error["message"])
        if isinstance(says.outcome, Answered) and says.outcome.text:
            self.assertIn(says.outcome.text, got.error["message"])

    def test_every_outcome_streamed_or_not(self) -> None:
        """
        Each condition has its own status, code, header and envelope on every route, streamed or not, within the route
        wait, and leaves no timer and no call counted (CLUS-13).
        """
        for says in LINES:
            for path, body in [*ASKS, *STREAMED]:
                world = world_of(Unreached(says.outcome))
                got, waited = self.answered(world, path, body)
                self.assert_told(got, says)
                self.assertLessEqual(waited, ROUTE_WAIT, f"{says.outcome} took {waited} s")
                self.assertEqual(waited >= ROUTE_WAIT - 0.25, says.waits, f"{says.outcome} took {waited} s")
                self.assertEqual((world.timers, world.replicas.running), ([], 0), str(says.outcome))

    def test_nobody_is_told_another_condition(self) -> None:
        """No two of the four conditions and their neighbours share a code (CLUS-13)."""
        by_code: dict[str, set[type]] = {}
        for says in LINES:
            by_code.setdefault(says.code, set()).add(type(says.outcome))
        self.assertEqual({code: kinds for code, kinds in by_code.items() if len(kinds) > 1}, {})

    def test_a_condition_met_while_loading(self) -> None:
        """Without a replica the same conditions come from the load, and are told the same way (CLUS-13)."""
        for says in LINES:
            errors: list[Exception] = [Unreached(says.outcome)]
            if isinstance(says.outcome, NoRoute | Reconnecting):
                errors.append(NoPlace("every node that suits is out of reach", says.outcome))
            for error in errors:
                for path, body in (ASKS[0], STREAMED[0]):
                    world = world_of(Unreached(says.outcome), loads=error)
                    world.replicas.rows = []
                    got, waited = self.answered(world, path, body)
                    self.assert_told(got, says)
                    self.assertLessEqual(waited, ROUTE_WAIT)

    def test_the_registry_itself(self) -> None:
        """A database that does not answer is told as that, after the route wait, never as a missing model (CLUS-13)."""
        line = next(says for says in LINES if isinstance(says.outcome, RegistryUnknown))
        for path, body in [*ASKS, *STREAMED]:
            world = world_of(FakeChannel())
            world.replicas.trouble = StoreUnavailable("the database is away")
            got, waited = self.answered(world, path, body)
            self.assert_told(got, line)
            self.assertLessEqual(waited, ROUTE_WAIT)

    def test_a_worker_that_comes_back_within_the_wait(self) -> None:
        """A control: a way that opens again within the route wait is an ordinary answer (CLUS-13)."""
        for outcome in (Reconnecting(NODE), PeerUnreachable("f", "x")):
            world = world_of(FakeChannel())
            world.connect.ways = [*[Unreached(outcome)] * 8, FakeChannel()]
            got, waited = self.answered(world, *ASKS[0])
            self.assertEqual(got.status, 200)
            self.assertTrue(1.5 <= waited <= ROUTE_WAIT, waited)

    def test_loading_and_capacity(self) -> None:
        """A load that goes on, one that failed, and no room for one: each by its own code (CLUS-13)."""
        status = LoadStatus("tiny", "staging", "box", 41, 100, 1, 1, eta_seconds=30.0)
        for error, code, answer, retry in [
            (StillLoading(status), 503, "model_loading", True),
            (NoPlace("no node has the disk"), 503, "capacity", True),
            (LoadFailed("the file is truncated"), 500, "model_load_failed", False),
        ]:
            for path, body in (ASKS[0], STREAMED[0]):
                world = world_of(FakeChannel(), loads=error)
                world.replicas.rows = []
                got, _ = self.answered(world, path, body)
                self.assertEqual((got.status, got.error["code"], "retry-after" in got.headers), (code, answer, retry))

    def test_the_callers_deadline_is_the_first(self) -> None:
        """With ``X-LocalAI-Timeout: 2s`` whatever waits, and whoever hangs, ends at 2 s as 504 (CLUS-10)."""
        line = next(says for says in LINES if isinstance(says.outcome, DeadlineExceeded))
        ways: list[Any] = [Unreached(says.outcome) for says in LINES if says.waits]
        for way in [*ways, FakeChannel(hold=Deferred())]:
            for path, body in (ASKS[0], STREAMED[0]):
                world = world_of(way)
                got, waited = self.answered(world, path, body, x_localai_timeout="2s")
                self.assertEqual(waited, 2.0)
                self.assert_told(got, line)
                self.assertEqual(world.timers, [])

    def test_in_a_stream_that_has_begun(self) -> None:
        """A failure after the first token is one error frame in the envelope, no [DONE], and a closed connection."""
        for error, code in [
            (RpcError(StatusCode.UNAVAILABLE, "lost", Origin.TRANSPORT), "worker_unavailable"),
            (RpcError(StatusCode.INTERNAL, "out of memory"), "worker_error"),
        ]:
            for path, body in STREAMED:
                stream = FakeStream()
                world = world_of(FakeChannel(stream=stream))
                got = world.send("POST", path, body)
                stream.feed(b"one", error)
                self.assertEqual(got.status, 200)
                last = got.frames[-1]
                self.assertEqual((set(last), last["error"]["code"]), ({"error"}, code))
                self.assertEqual(set(last["error"]), {"message", "type", "code", "param"})
                self.assertNotIn("[DONE]", got.frames)
                self.assertTrue(got.transport.disconnecting)

    def test_a_stream_that_opened_while_it_waited(self) -> None:
        """A condition found out after a long wait comes as the error frame of the stream that is open (CLUS-13)."""
        for says in LINES:
            if isinstance(says.outcome, DeadlineExceeded):
                continue
            world = world_of(FakeChannel(), loads=Unreached(says.outcome))
            world.replicas.rows = []
            hold: Deferred[None] = Deferred()
            object.__getattribute__(world.api, "inference")._loads.hold = hold
            got = world.send("POST", *STREAMED[0])
            world.clock.advance(10)
            self.assertEqual((got.status, got.frames), (200, []))
            hold.callback(None)
            for _ in range(int(ROUTE_WAIT / 0.25) + 1):
                world.clock.advance(0.25)
            self.assertEqual([list(frame) for frame in got.frames], [["error"]], str(says.outcome))
            self.assertEqual(got.frames[0]["error"]["code"], says.code)

    def test_the_nodes_are_still_listed(self) -> None:
        """While presence can't be read the list says so for each node, and is no error (CLUS-13)."""
        world = World(ownership=FakePresence(StoreUnavailable("away")))
        got = world.send("GET", "/api/nodes")
        self.assertEqual(got.status, 200)
        self.assertEqual({node["tunnel"]["state"] for node in got.json}, {"registry_unavailable"})
