"""What a client may be told, and what only operators are: addresses, folders and the database's whereabouts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from twisted.logger import globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

import localai_dist.httpapi as httpapi
from localai_dist import reach
from localai_dist.catalog.snapshot import ModelProblem
from localai_dist.errors import InvalidName, LocalAIDistError
from localai_dist.httpapi.errors import ApiError, api_error_of, model_not_found
from localai_dist.loads.errors import LoadCancelled, LoadFailed, StillLoading, UnloadFailed
from localai_dist.loads.status import LoadStatus
from localai_dist.reach import Answer, Outcome, Unreached
from localai_dist.registry.errors import NotApproved, NotPending, UnknownNode
from localai_dist.registry.records import BadRegistration
from localai_dist.scheduler.placement import NoPlace
from localai_dist.serving.errors import DiskFull, RequestRefused
from localai_dist.staging.errors import NoSpace, SourceMissing
from localai_dist.store.errors import StatementFailed, StoreUnavailable
from tests.httpapi.doubles import World

DATABASE = (
    'connection to server at "db.internal", port 5432 failed: password of user "alice" (alice@db.internal:5432/x)'
)
PEER = "10.0.0.2:8080"
WORKER = "127.0.0.1:20003"
FOLDER = "/srv/secret/models"

COORDINATES = ("db.internal", "alice", "5432", PEER, "10.0.0.2", WORKER, "127.0.0.1", "/srv", "secret")
"""Words of those texts that nobody may see who merely uses the API."""

OUTCOMES: list[Outcome] = [
    reach.Answered(Answer.ERROR, "out of memory"),
    reach.Answered(Answer.BACKEND_UNAVAILABLE, f"nothing listens on {WORKER}"),
    reach.Refused("bad-request", f"no port in {WORKER}"),
    reach.NotServed(f"could not connect to {WORKER}, log in {FOLDER}/x.log"),
    reach.VerbNotServed("/v1/control/new"),
    reach.NoRoute("node-1", departed=True, name="box"),
    reach.Reconnecting("node-1", name="box"),
    reach.PeerUnreachable("front-1", f"{PEER}: refused", address=PEER),
    reach.RegistryUnknown(DATABASE),
    reach.DeadlineExceeded(f"no answer of ws://{PEER}/api within 3 s"),
    reach.Cancelled(),
]

WAITING = LoadStatus("tiny", "staging", "box", waits=f"front-1 at {PEER} is away", waits_told="front-1 is away")

ERRORS: list[LocalAIDistError] = [
    *map(Unreached, OUTCOMES),
    StillLoading(WAITING),
    LoadCancelled("the load of tiny was cancelled: by an operator"),
    LoadFailed(f"tiny.gguf is not in {FOLDER}", "tiny.gguf is not in its models folder"),
    UnloadFailed(f"tiny#0 on node box still listens on {WORKER}"),
    NoPlace(f"no node has room; asked {PEER}"),
    NoPlace(DATABASE, reach.RegistryUnknown(DATABASE)),
    NoSpace(f"staging {FOLDER}/x on node box: the worker answered 507"),
    DiskFull(f"no room in {FOLDER}"),
    RequestRefused("the prompt is too long"),
    StoreUnavailable(DATABASE),
    UnknownNode("node-1"),
    NotPending("box"),
    NotApproved("box"),
    BadRegistration("name: want 1 to 255 printable characters"),
    InvalidName("'x/y' is not a node id"),
    model_not_found("odd", [], [ModelProblem("odd.yaml", "odd", f"{FOLDER}/odd.yaml can't be read")]),
]

ELSEWHERE = {
    "forbidden",
    "internal_error",
    "invalid_api_key",
    "method_not_allowed",
    "model_disabled",
    "request_too_large",
}
"""Codes whose texts are made of the request alone, or say nothing but where the log has it."""


class ToldTests(SynchronousTestCase):
    """Each error as a client sees it, and as an operator does."""

    def assert_withheld(self, text: str) -> None:
        """Nothing of the whereabouts is in ``text``."""
        self.assertEqual([word for word in COORDINATES if word in text], [], text)

    def test_every_code_is_decided(self) -> None:
        """Each code an answer can have is among those that are looked at here: a new one has to be, too."""
        folder = Path(httpapi.__file__).parent
        sources = [path.read_text() for path in folder.rglob("*.py")]
        written = {code for text in sources for code in re.findall(r'(?:ApiError|told)\([^"()]*\b\d{3}, "(\w+)"', text)}
        outcomes = {reach.client_answer(outcome).code for outcome in OUTCOMES}
        seen = {error.code for each in ERRORS if (error := api_error_of(each)) is not None}
        self.assertEqual({type(outcome) for outcome in OUTCOMES}, set(get_args(Outcome)))
        self.assertEqual(written - seen - ELSEWHERE, set())
        self.assertEqual(outcomes - seen, set())
        self.assertGreater(len(written), 10)

    def test_a_client_is_told_the_cause_and_no_coordinates(self) -> None:
        """
        Whatever goes wrong, neither message nor body names the database, a folder or another machine; the operator's
        text has all of it.
        """
        for each in ERRORS:
            error = api_error_of(each)
            assert error is not None
            self.assert_withheld(str(error.body()))
            self.assertTrue(error.message, each)
            self.assertIn(each.detail if isinstance(each, ApiError) else str(each), error.detail)

    def test_the_cause_is_still_said(self) -> None:
        """The text without coordinates says what is the matter."""
        for each, said in [
            (StoreUnavailable(DATABASE), "the registry database can't be reached"),
            (Unreached(OUTCOMES[7]), "the frontend that holds the tunnel (front-1) can't be reached from here"),
            (Unreached(OUTCOMES[5]), "no route to node box"),
            (Unreached(OUTCOMES[8]), "the registry database can't be reached"),
            (StillLoading(WAITING), "model tiny is staging on node box; it waits: front-1 is away"),
        ]:
            error = api_error_of(each)
            assert error is not None
            self.assertIn(said, error.message)

    def test_own_words_are_passed_on(self) -> None:
        """What a backend said of a load or a request is told as it said it (LOAD-19)."""
        words = "tiny on node box: /models/tiny.gguf: bad magic at 127.0.0.1:1"
        for each in (LoadFailed(words), RequestRefused(words), Unreached(reach.Answered(Answer.ERROR, words))):
            error = api_error_of(each)
            assert error is not None
            self.assertEqual(error.message, words)

    def test_a_statement_is_never_quoted(self) -> None:
        """What the database said of a statement is for the log."""
        self.assert_withheld(StatementFailed(DATABASE, "42P01").told)
        self.assertEqual(SourceMissing(f"{FOLDER}/a.gguf can't be read").told, "a.gguf can't be read")

    def test_by_route(self) -> None:
        """An inference client gets the cause, the log gets the details; an operator's route answers with them."""
        world, events = World(), []
        world.loads.result = StoreUnavailable(DATABASE)
        world.replicas.rows = []
        globalLogPublisher.addObserver(events.append)
        self.addCleanup(globalLogPublisher.removeObserver, events.append)
        body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        for _ in range(3):
            # An id of our own: the digits of a random one may be those of a port.
            got = world.send("POST", "/v1/chat/completions", body, x_request_id="told")
            world.clock.pump([0.5] * 20)  # the route wait
            self.assertEqual((got.status, got.error["code"]), (503, "registry_unavailable"))
            self.assert_withheld(got.raw.decode())
        logged = [str(event["why"]) for event in events if event.get("code") == "registry_unavailable"]
        self.assertTrue(logged and all(DATABASE in why for why in logged), logged)
        got = world.send("POST", "/backend/load", {"model": "tiny"})
        self.assertEqual((got.status, got.error["message"]), (503, DATABASE))

    def test_what_goes_on_is_logged_once_a_while(self) -> None:
        """The same cause is in the log once, and again when it still goes on ten seconds later or another came."""
        world, whys = World(), []
        globalLogPublisher.addObserver(observer := lambda event: whys.append(event.get("why")))
        self.addCleanup(globalLogPublisher.removeObserver, observer)

        def ask(text: str) -> int:
            async def status(_: str) -> None:
                raise StoreUnavailable(text)

            object.__setattr__(world.loads, "status", status)
            self.assertEqual(world.send("GET", "/api/models/tiny/load-status").status, 503)
            return whys.count(text)

        self.assertEqual([ask(DATABASE) for _ in range(3)], [1, 1, 1])
        self.assertEqual(ask("another"), 1)
        world.clock.advance(10.0)
        self.assertEqual((ask("another"), ask("another")), (2, 2))

    def test_a_load_is_told_by_route(self) -> None:
        """Why a load waits is in its status for clients, without the address; in the operations with it."""
        world = World()
        world.loads.running = [WAITING, replace(WAITING, model="words", state="failed", waits="", error=FOLDER + "/w")]
        got = world.send("GET", "/api/models/tiny/load-status")
        self.assertEqual(got.json["waits"], "front-1 is away")
        self.assertEqual(world.send("GET", "/api/models/words/load-status").json["error"], "w")
        shown = {one["name"]: one for one in world.send("GET", "/api/operations").json["operations"]}
        self.assertEqual(shown["tiny"]["waits"], f"front-1 at {PEER} is away")
        self.assertIn(PEER, shown["tiny"]["message"])
        self.assertNotIn("waits", shown["words"])

    def test_readiness(self) -> None:
        """``/readyz`` says what is not well to everybody, and where it is to who shows an operator's key."""
        world = World()
        world.readiness.note("database", False, DATABASE, StoreUnavailable(DATABASE).told)
        world.readiness.note("membership", False, f"{PEER} is away")
        for key in (None, "another"):
            got = world.send("GET", "/readyz", key=key, x_request_id="told")
            self.assertEqual(got.status, 503)
            self.assertIn("can't be reached", got.json["checks"]["database"]["reason"])
            self.assert_withheld(got.raw.decode())
        checks = world.send("GET", "/readyz").json["checks"]
        self.assertEqual((checks["database"]["reason"], checks["membership"]["reason"]), (DATABASE, f"{PEER} is away"))
        self.assert_withheld(World(keys=()).send("GET", "/readyz", x_request_id="told").raw.decode())
