"""Registering, beating, registering again, leaving; over a scripted HTTP agent and a test clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from twisted.logger import LogEvent, Logger, formatEvent
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.client import ResponseDone, ResponseNeverReceived
from twisted.web.http_headers import Headers

from localai_dist.backoff import Backoff
from localai_dist.ids import NodeId
from localai_dist.worker.errors import NotReached, RegistrationRefused
from localai_dist.worker.frontends import ANSWER_WITHIN, Frontends
from localai_dist.worker.gpus import Gpu
from localai_dist.worker.identity import Identity, IdentityFile
from localai_dist.worker.readings import NodeReadings, Readings
from localai_dist.worker.registration import GOODBYE_WITHIN, Profile, Registration
from tests.worker.support import reactor

A, B = "http://a:8080", "https://b/base"


class FakeResponse:
    """An answer with a small body."""

    def __init__(self, status: int, body: bytes) -> None:
        self.code, self._body, self.length = status, body, len(body)

    def deliverBody(self, protocol: Any) -> None:
        """All at once."""
        protocol.makeConnection(None)
        protocol.dataReceived(self._body)
        protocol.connectionLost(Failure(ResponseDone()))


class Sink:
    """Collects a request's body."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        """More of it."""
        self.data += data


class FakeAgent:
    """Answers by script; a rule is a status, a status and an object, an exception, or None for silence."""

    def __init__(self) -> None:
        self.rules: dict[str, Any] = {}
        self.asked: list[tuple[str, str, dict[str, Any] | None, Headers]] = []

    def request(self, method: bytes, uri: bytes, headers: Headers, body: Any) -> Deferred[Any]:
        """See ``twisted.web.iweb.IAgent``."""
        sink = Sink()
        if body is not None:
            body.startProducing(sink)
        sent = json.loads(sink.data) if sink.data else None
        self.asked.append((method.decode(), uri.decode(), sent, headers))
        rule = next((rule for part, rule in self.rules.items() if part in uri.decode()), 404)
        if callable(rule):
            rule = rule(sent)
        if rule is None:
            return Deferred()
        if isinstance(rule, Exception):
            return fail(rule)
        status, fields = rule if isinstance(rule, tuple) else (rule, {})
        return succeed(FakeResponse(status, json.dumps(fields).encode()))

    def paths(self) -> list[str]:
        """What was asked, oldest first, forgotten afterwards."""
        asked, self.asked = self.asked, []
        return [uri.split("/", 3)[3] for _method, uri, _sent, _headers in asked]


class FrontendsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock, self.agent = Clock(), FakeAgent()
        self.frontends = Frontends(reactor=self.clock, urls=[A + "/", B], registration_token="reg", agent=self.agent)

    def post(self, **more: Any) -> Deferred[Any]:
        return Deferred.fromCoroutine(self.frontends.post("/api/x", {"a": 1}, **more))

    def hosts(self) -> list[str]:
        asked, self.agent.asked = self.agent.asked, []
        return [uri.split("/")[2] for _method, uri, _sent, _headers in asked]

    def test_request(self) -> None:
        """A frontend is asked with the registration token, the node's own token and JSON."""
        self.agent.rules = {A: (200, {"id": "n"})}
        answer = self.successResultOf(self.post(node_token="own"))
        self.assertEqual((answer.status, answer.fields), (200, {"id": "n"}))
        method, uri, sent, headers = self.agent.asked[0]
        self.assertEqual((method, uri, sent), ("POST", f"{A}/api/x", {"a": 1}))
        self.assertEqual(headers.getRawHeaders("authorization"), ["Bearer reg"])
        self.assertEqual(headers.getRawHeaders("x-localai-node-token"), ["own"])

    def test_the_next_one_at_once(self) -> None:
        """A frontend that refuses, hangs or is starting is passed over; the one that worked is asked first after."""
        for trouble in (
            ConnectionRefusedError(),
            503,
            502,
            OSError("no such host"),
            ValueError("invalid hostname: a_b"),
        ):
            self.setUp()
            self.agent.rules = {A: trouble, B: 200}
            self.assertEqual(self.successResultOf(self.post()).status, 200)
            self.assertEqual(self.hosts(), ["a:8080", "b"])
            self.assertEqual(self.successResultOf(self.post()).status, 200)
            self.assertEqual(self.hosts(), ["b"], "the one that worked comes first")
        self.assertEqual([call for call in self.clock.getDelayedCalls() if call.active()], [])

    def test_silence(self) -> None:
        """A frontend that never answers costs its time once, then the next is asked."""
        self.agent.rules = {A: None, B: 200}
        asking = self.post()
        self.assertNoResult(asking)
        self.clock.advance(ANSWER_WITHIN)
        self.assertEqual(self.successResultOf(asking).url, B)

    def test_nobody(self) -> None:
        """When nobody answers, the last one tried and the reason are named."""
        self.agent.rules = {A: ConnectionRefusedError(), B: 503}
        error = self.failureResultOf(self.post(), NotReached).value
        self.assertIn(f"{B}: 503", str(error))
        empty = Frontends(reactor=self.clock, urls=[], registration_token="", agent=self.agent)
        self.failureResultOf(Deferred.fromCoroutine(empty.get("/x")), NotReached)

    def test_tls_that_nobody_speaks(self) -> None:
        """A failure without words of its own is named by its kind, and an https address hints at a plain frontend."""
        self.agent.rules = {A: 503, B: ResponseNeverReceived([Failure(TimeoutError())])}
        error = self.failureResultOf(self.post(), NotReached).value
        self.assertIn("TimeoutError (if it speaks no TLS, its address begins with http://)", str(error))

    def test_a_refusal_is_an_answer(self) -> None:
        """A 4xx or a 500 is the frontend's answer, with its message out of either envelope."""
        for fields in ({"error": {"message": "why"}}, {"error": "why"}, {"message": "why"}):
            self.agent.rules = {A: (401, fields)}
            answer = self.successResultOf(self.post())
            self.assertEqual((answer.status, answer.text), (401, "why"))

    def test_cancel(self) -> None:
        """Giving up leaves nothing behind."""
        self.agent.rules = {A: None}
        asking = self.post()
        asking.addErrback(lambda _: None)
        asking.cancel()
        self.assertEqual([call for call in self.clock.getDelayedCalls() if call.active()], [])


class RegistrationCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock, self.agent = Clock(), FakeAgent()
        self.file = IdentityFile(Path(self.mktemp()))
        self.refused: list[RegistrationRefused] = []
        self.times: list[float] = []
        self.held: list[bool] = []
        self.registration = self.make()
        self.addCleanup(self.check_clean)

    def check_clean(self) -> None:
        self.registration.stopService()
        self.assertEqual([call for call in self.clock.getDelayedCalls() if call.active()], [])

    def make(self, profile: Profile | None = None) -> Registration:
        async def readings() -> Readings:
            return Readings(Gpu(100, 50, "nvidia", "9.0"), (10, 5), (20, 2))

        return Registration(
            reactor=self.clock,
            frontends=Frontends(reactor=self.clock, urls=[A], registration_token="reg", agent=self.agent),
            registration_token="reg",
            profile=profile or Profile("box", "backend", "boot-1", {"zone": "x"}, 2, "80%"),
            identity_file=self.file,
            readings=readings,
            backoff=Backoff(first=1.0, cap=4.0),
            chance=lambda: 1.0,
            on_refused=self.refused.append,
            on_registered=lambda: self.times.append(self.clock.seconds()),
            on_tunnel_held=self.held.append,
        )

    def accept(self, status: str = "healthy", token: str = "tok", node: str = "node-1") -> Callable[[Any], Any]:
        return lambda _sent: (201, {"id": node, "status": status, "tunnel_token": token})

    def sent(self, number: int = 0) -> dict[str, Any]:
        found = self.agent.asked[number][2]
        assert found is not None
        return found


class WhyNotTests(RegistrationCase):
    """What /readyz says while the node is not registered."""

    def test_nobody_answers(self) -> None:
        """With no frontend to reach, the address and the cause are told."""
        self.agent.rules = {A: ConnectionRefusedError()}
        self.registration.startService()
        self.assertIn(A, self.registration.why_not())
        self.assertIn("refused", self.registration.why_not())
        self.agent.rules = {"register": self.accept()}
        self.clock.advance(4)
        self.assertEqual(self.registration.why_not(), "")

    def test_waiting_for_an_operator(self) -> None:
        """A newcomer whose beat is not taken says which command admits it."""
        self.agent.rules = {"register": self.accept("pending"), "heartbeat": 401}
        self.registration.startService()
        self.clock.advance(10)
        self.assertEqual(self.registration.why_not(), "waits for approval: localai-dist nodes approve box")

    def test_a_name_that_is_taken(self) -> None:
        """
        A worker whose name another one has says so once, with the frontend's words, in its log and on /readyz; and
        that it was admitted afterwards (CLUS-8).
        """
        events: list[LogEvent] = []
        self.patch(Registration, "_log", Logger(observer=events.append))
        taken = {"id": "node-1", "status": "pending", "tunnel_token": "parked", "message": "box exists\nalready"}
        self.agent.rules = {"register": (201, taken), "heartbeat": 403}
        self.registration.startService()
        for _ in range(6):
            self.clock.advance(10)
        self.assertGreater([path.rpartition("/")[2] for path in self.agent.paths()].count("register"), 2)
        [said] = [formatEvent(event) for event in events]
        self.assertIn("the name box is taken, and this worker waits: box exists already", said)
        self.assertNotIn("parked", said)
        command = "waits for approval: localai-dist nodes approve box"
        self.assertEqual(self.registration.waiting(), f"{command}; box exists already")
        self.agent.rules = {"register": self.accept(), "heartbeat": 200}
        for _ in range(4):
            self.clock.advance(10)
        self.assertEqual((self.registration.status, self.registration.waiting()), ("healthy", command))
        self.assertIn("registered with", formatEvent(events[-1]))

    def registrations_in_four_beats(self) -> int:
        """How often it registers within four beats from now."""
        self.agent.paths()
        for _ in range(4):
            self.clock.advance(10)
        return [path.rpartition("/")[2] for path in self.agent.paths()].count("register")

    def test_an_admitted_newcomer_registers_once_more(self) -> None:
        """A newcomer that was handed the name registers again, so that its row tells of its own process."""
        self.agent.rules = {"register": self.accept("pending"), "heartbeat": 403}
        self.registration.startService()
        self.clock.advance(10)
        self.clock.advance(4)
        self.agent.rules = {"register": self.accept(), "heartbeat": 200}
        self.assertEqual(self.registrations_in_four_beats(), 1)
        self.assertEqual((self.registration.status, self.registration.why_not()), ("healthy", ""))

    def test_a_newcomer_admitted_before_its_first_beat(self) -> None:
        """A newcomer that was handed the name at once, so that none of its beats was refused, registers again too."""
        taken = {"id": "node-1", "status": "pending", "tunnel_token": "parked", "message": "box exists already"}
        self.agent.rules = {"register": (201, taken), "heartbeat": 200}
        self.registration.startService()
        self.agent.rules = {"register": self.accept(), "heartbeat": 200}
        self.assertEqual(self.registrations_in_four_beats(), 1)
        self.assertEqual((self.registration.status, self.registration.why_not()), ("healthy", ""))


class RegisterTests(RegistrationCase):
    def test_registers_without_an_address(self) -> None:
        """A worker tells what it has and no address; id and token are kept for the next start (WALK-8)."""
        self.agent.rules = {"register": self.accept()}
        self.registration.startService()
        self.assertEqual(
            self.sent(),
            {
                "name": "box",
                "node_type": "backend",
                "boot_id": "boot-1",
                "token": "reg",
                "labels": {"zone": "x"},
                "max_replicas_per_model": 2,
                "vram_budget": "80%",
                "total_vram": 100,
                "available_vram": 50,
                "gpu_vendor": "nvidia",
                "gpu_compute_capability": "9.0",
                "total_ram": 10,
                "available_ram": 5,
                "total_disk": 20,
                "available_disk": 2,
            },
        )
        self.assertEqual(self.file.load(), Identity(NodeId("node-1"), "tok"))
        self.assertEqual((self.registration.node_id(), self.registration.node_token()), ("node-1", "tok"))
        self.assertEqual((self.registration.status, self.registration.why_not()), ("healthy", ""))
        self.successResultOf(self.registration.when_registered())

    def test_presents_its_identity(self) -> None:
        """A node that was registered before presents its own token, and keeps it if none comes back (WALK-9)."""
        self.file.save(Identity(NodeId("node-1"), "kept"))
        self.agent.rules = {"register": (201, {"id": "node-1", "status": "pending"})}
        self.registration.startService()
        self.assertEqual(self.agent.asked[0][3].getRawHeaders("x-localai-node-token"), ["kept"])
        self.assertEqual(self.file.load(), Identity(NodeId("node-1"), "kept"))
        self.assertEqual(self.registration.status, "pending")

    def test_agent_tells_less(self) -> None:
        """An agent worker tells its name and type; its key for the API is kept when it comes."""
        self.registration = self.make(Profile("agent-box", "agent", "boot"))
        self.agent.rules = {"register": (201, {"id": "n", "status": "healthy", "api_token": "key"})}
        self.registration.startService()
        self.assertEqual(set(self.sent()), {"name", "node_type", "boot_id", "token"})
        self.assertEqual(self.registration.api_token, "key")

    def test_retries_for_ever(self) -> None:
        """No frontend, or one in trouble, is asked again and again, less and less often."""
        waiting = self.registration.when_registered()
        for trouble in (ConnectionRefusedError(), 503, 500, 404, (201, {"id": ""})):
            self.agent.rules = {"register": trouble}
            if not self.registration.running:
                self.registration.startService()
            self.clock.advance(4)
        self.assertEqual(self.refused, [])
        self.assertNotEqual(self.registration.why_not(), "")
        self.assertNoResult(waiting)
        self.agent.asked.clear()
        self.clock.pump([1] * 12)
        self.assertEqual(len(self.agent.asked), 3)
        self.agent.rules = {"register": self.accept()}
        self.clock.advance(4)
        self.successResultOf(waiting)

    def test_a_name_that_can_not_be(self) -> None:
        """A worker whose name the frontends refuse says so, and what to set (WALK-8)."""
        error = {"message": "name: 'models' can't be a node's name: /api/nodes/models is a route", "param": "name"}
        self.agent.rules = {"register": (400, {"error": error})}
        self.registration.startService()
        [refused] = self.refused
        self.assertIn(f"(400): {error['message']}; set LOCALAI_NODE_NAME to another", str(refused))

    def test_refused_for_good(self) -> None:
        """A wrong token or request ends the daemon with one clear line, and is not asked again."""
        for status in (400, 401):
            self.setUp()
            self.agent.rules = {"register": (status, {"error": {"message": "invalid registration token"}})}
            self.registration.startService()
            [refused] = self.refused
            self.assertIn("invalid registration token", str(refused))
            self.assertNotIn("reg", str(refused).replace("registration", "").replace("register", "").lower().split())
            self.clock.advance(100)
            self.assertEqual(len(self.agent.asked), 1)

    def test_damaged_identity(self) -> None:
        """A damaged identity file fails the start, before any frontend is asked."""
        self.file.path.parent.mkdir(parents=True)
        self.file.path.write_text("{")
        self.assertRaises(Exception, self.registration.load_identity)

    def test_unwritable_identity(self) -> None:
        """An identity that can't be kept ends the daemon: it would be a stranger after the next start."""
        self.file.path.parent.parent.mkdir(parents=True, exist_ok=True)
        self.file.path.parent.write_text("a file, not a folder")
        self.patch(self.file, "load", lambda: None)
        self.agent.rules = {"register": self.accept()}
        self.registration.startService()
        self.assertIn("node.json", str(self.refused[0]))


class BeatTests(RegistrationCase):
    def setUp(self) -> None:
        super().setUp()
        self.agent.rules = {"register": self.accept(), "heartbeat": 200}
        self.registration.startService()
        self.agent.asked.clear()

    def test_beats(self) -> None:
        """Every ten seconds the node tells what is free, under its own token."""
        self.clock.pump([10, 10])
        self.assertEqual(self.sent(), {
            "total_vram": 100, "available_vram": 50, "gpu_vendor": "nvidia",
            "total_ram": 10, "available_ram": 5, "total_disk": 20, "available_disk": 2,
        })  # fmt: skip
        self.assertEqual(self.agent.asked[0][3].getRawHeaders("x-localai-node-token"), ["tok"])
        self.assertEqual(self.agent.paths(), ["api/node/node-1/heartbeat"] * 2)

    def test_keeps_beating(self) -> None:
        """A beat that fails changes nothing: the next one comes in time."""
        for trouble in (ConnectionRefusedError(), 500, 503):
            self.agent.rules["heartbeat"] = trouble
            self.clock.advance(10)
        self.assertEqual(self.registration.why_not(), "")
        self.assertEqual(len(self.agent.paths()), 3)

    def test_the_tunnel_dials_when_a_frontend_answers_again(self) -> None:
        """The first good beat after none was answered lets the tunnel dial at once; the ones after it do not."""
        self.agent.rules["heartbeat"] = ConnectionRefusedError()
        self.clock.advance(10)
        before = list(self.times)
        self.agent.rules["heartbeat"] = 200
        self.clock.pump([10, 10])
        self.assertEqual(len(self.times), len(before) + 1)

    def test_what_the_registry_knows_of_the_tunnel(self) -> None:
        """A beat's answer says whether a frontend owns the tunnel; one that fails, or an older frontend's, does not."""
        for rule in (200, (200, {"tunnel_held": "no"}), (503, {"tunnel_held": False})):
            self.agent.rules["heartbeat"] = rule
            self.clock.advance(10)
        self.assertEqual(self.held, [])
        for held in (True, False, False):
            self.agent.rules["heartbeat"] = (200, {"tunnel_held": held})
            self.clock.advance(10)
        self.assertEqual(self.held, [True, False, False])

    def test_registers_again_when_forgotten(self) -> None:
        """A node that is no longer known registers again within seconds, with its own token."""
        for status in (404, 401, 403):
            self.agent.rules["heartbeat"] = status
            self.clock.advance(10)
            self.assertFalse(self.registration.is_registered)
            self.agent.rules["heartbeat"] = 200
            self.clock.advance(1)
            self.assertTrue(self.registration.is_registered)
            self.assertEqual(self.agent.paths(), ["api/node/node-1/heartbeat", "api/node/register"])

    def test_a_new_identity_is_kept(self) -> None:
        """An identity that came anew (the node was removed) replaces the old one, and the tunnel is told."""
        self.agent.rules = {"heartbeat": 404, "register": self.accept(node="node-2", token="tok-2")}
        self.clock.pump([10, 1])
        self.assertEqual(self.file.load(), Identity(NodeId("node-2"), "tok-2"))
        self.assertEqual(self.times, [0, 11])

    def test_refusal_later_is_not_the_end(self) -> None:
        """A 401 of a later registration (the cluster's token changed) never ends a running daemon."""
        self.agent.rules = {"heartbeat": 401, "register": 401}
        self.clock.pump([10] + [1] * 30)
        self.assertEqual(self.refused, [])
        self.agent.rules = {"heartbeat": 200, "register": self.accept()}
        self.clock.advance(4)
        self.assertTrue(self.registration.is_registered)

    def test_register_again_on_request(self) -> None:
        """A tunnel that is refused makes the node register at once."""
        self.registration.register_again()
        self.assertEqual(self.agent.paths(), ["api/node/register"])
        self.assertTrue(self.registration.is_registered)

    def test_stop(self) -> None:
        """A stopped service asks nobody any more."""
        self.registration.stopService()
        self.clock.advance(100)
        self.assertEqual(self.agent.asked, [])


class LeaveTests(RegistrationCase):
    def setUp(self) -> None:
        super().setUp()
        self.agent.rules = {"register": self.accept(), "drain": 200, "deregister": 200, "models": (200, [])}
        self.registration.startService()
        self.agent.asked.clear()

    def leave(self, patience: float = 30) -> Deferred[None]:
        return Deferred.fromCoroutine(self.registration.leave(patience))

    def test_waits_for_what_runs(self) -> None:
        """A node that leaves drains, waits until nothing runs on it, then deregisters."""
        self.agent.rules["models"] = (200, [{"in_flight": 0}, {"in_flight": 1}])
        leaving = self.leave()
        self.clock.pump([0.5] * 3)
        self.assertNoResult(leaving)
        self.agent.rules["models"] = (200, [{"in_flight": 0}])
        self.clock.advance(0.5)
        self.successResultOf(leaving)
        paths = self.agent.paths()
        self.assertEqual([paths[0], paths[-1]], ["api/node/node-1/drain", "api/node/node-1/deregister"])

    def test_not_for_ever(self) -> None:
        """What runs on is left when the patience is over."""
        self.agent.rules["models"] = (200, [{"in_flight": 1}])
        leaving = self.leave(2)
        self.clock.pump([0.5] * 5)
        self.successResultOf(leaving)
        self.assertEqual(self.agent.paths()[-1], "api/node/node-1/deregister")

    def test_nobody_to_tell(self) -> None:
        """Leaving never fails: a frontend that can't be asked finds out by itself."""
        self.agent.rules = {"api": ConnectionRefusedError()}
        self.successResultOf(self.leave())

    def test_frozen_frontend(self) -> None:
        """A frontend that takes the goodbye and never answers does not keep the node."""
        self.agent.rules = {"api": None}
        leaving = self.leave(2)
        self.clock.advance(2 + GOODBYE_WITHIN)
        self.successResultOf(leaving)

    def test_never_registered(self) -> None:
        """A node that never was registered has nobody to tell."""
        self.registration.stopService()
        self.registration = self.make()
        self.file.path.unlink()
        self.agent.asked.clear()
        self.successResultOf(self.leave())
        self.assertEqual(self.agent.asked, [])


class NodeReadingsTests(TestCase):
    async def test_this_machine(self) -> None:
        """Memory and disk of this machine are read; a models folder that is not there yet is no obstacle."""
        readings = await NodeReadings(reactor=reactor, folder=Path(self.mktemp()) / "not" / "yet").take()
        for reading in (readings.ram, readings.disk):
            assert reading is not None
            self.assertGreater(reading[0], 0)
            self.assertGreaterEqual(reading[0], reading[1])

    async def test_nvidia_smi(self) -> None:
        """Graphics memory is asked of nvidia-smi; one that fails or hangs is no reading."""
        folder = Path(self.mktemp()).absolute()
        folder.mkdir()
        readings = NodeReadings(reactor=reactor, folder=folder)
        for name, script, expected in (
            ("ok", "echo '100, 40, 8.9'", 40 * 1024**2),
            ("broken", "echo 'Failed to initialize NVML'; exit 9", None),
        ):
            program = folder / name
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
            readings._nvidia_smi = str(program)
            gpu = (await readings.take()).gpu
            self.assertEqual(None if gpu is None else gpu.available_vram, expected)
