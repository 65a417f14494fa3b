"""Files of single requests through a real tunnel: staged, bounded, released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import NodeId
from localai_dist.reach import DeadlineExceeded, NoRoute, NotServed, Outcome, Reconnecting, Unreached
from localai_dist.staging.errors import NoSpace, SourceMissing, StagingError, UploadRefused
from localai_dist.staging.request_files import STALL, RequestFiles
from localai_dist.staging.stager import Stager
from localai_dist.wire.file_verbs import FILES_RELEASE, ErrorReply, ReleaseRequest
from localai_dist.wire.keys import InvalidKey
from localai_dist.wire.verbs import Verb
from localai_dist.worker import request_files as worker_side
from localai_dist.worker.request_files import RequestLimits
from localai_dist.worker.service import WorkerServer, make_backend_worker
from tests.staging.doubles import Answer, FileServer, Kept, Sink, at_once
from tests.staging.tunnelled import NODE, TunnelCase, reactor


class RequestFilesCase(TunnelCase):
    """A frontend's ``files``."""

    limits: RequestLimits

    def make_worker(self) -> WorkerServer:
        config = self.config(request_limits=self.limits)
        return make_backend_worker(config, reactor=reactor, checks={}, stop_node=lambda: None)

    async def setUp(self) -> None:
        await super().setUp()
        self.files = RequestFiles(self.stager, self.verbs, clock=reactor)

    async def stage(self, request: str, name: str, size: int = 1000) -> Path:
        source = self.folder / name
        source.write_bytes(name.encode() * (size // len(name)))
        remote = Path(await self.files.stage(NODE, request, source))
        self.assertEqual(remote.read_bytes(), source.read_bytes())
        return remote

    async def refused(self, request: str, name: str, size: int = 1000) -> str:
        with self.assertRaises(UploadRefused) as caught:
            await self.stage(request, name, size)
        return str(caught.exception)


class RequestFilesTests(RequestFilesCase):
    limits = RequestLimits(limit=3000)

    async def test_a_requests_life(self) -> None:
        """
        A request's file arrives on the node, is gone after the release, and a late one is refused (LOAD-23).
        """
        image = await self.stage("req-1", "ü 1.png")
        self.assertEqual(image.parts[-4:], ("ephemeral", "req-1", "inputs", "ü 1.png"))
        await self.files.release(NODE, "req-1")
        self.assertFalse(image.exists())
        self.assertIn("410", await self.refused("req-1", "late.png"))
        self.assertTrue((await self.stage("req-2", "other.png")).exists())

    async def test_asking_again_tells_the_worker(self) -> None:
        """
        A file that is there is not sent again, and the worker notes that somebody still wants it (LOAD-23).
        """
        seen: list[str] = []
        await self.stage("req-1", "a.png")
        self.patch(worker_side.RequestFiles, "saw", lambda _, key: seen.append(str(key)))
        await self.stage("req-1", "a.png")
        self.assertEqual(seen, ["ephemeral/req-1/inputs/a.png"])

    async def test_the_byte_limit(self) -> None:
        """
        Over the limit is refused with the numbers; after a release there is room again (LOAD-23).
        """
        for number in range(3):
            await self.stage(f"req-{number}", "a.png")
        text = await self.refused("req-9", "b.png")
        self.assertIn("507", text)
        self.assertIn("2.9 KiB", text)
        await self.files.release(NODE, "req-0")
        await self.stage("req-9", "b.png")

    async def test_what_can_not_be_named(self) -> None:
        """
        An id that is a path, or a file that is not there, is an error of its own (LOAD-14, LOAD-23).
        """
        for request in ("", "..", "a/b", "a\0b"):
            with self.assertRaises(InvalidKey):
                await self.stage(request, "a.png")
        with self.assertRaises(SourceMissing):
            await self.files.stage(NODE, "r", self.folder / "none")
        with self.assertRaises(StagingError):
            await self.files.release(NODE, "a/b")
        self.assertIn("path", (await self.verbs.call(NODE, FILES_RELEASE, ReleaseRequest(".."))).error)


class FreeSpaceTests(RequestFilesCase):
    limits = RequestLimits(floor=10**18)

    async def test_the_floor(self) -> None:
        """
        A disk with too little free space takes no request's file, and says what stays free (LOAD-23).
        """
        text = await self.refused("req-1", "a.png")
        self.assertIn("stay free", text)
        self.assertFalse(list((self.folder / "data").rglob("*.png")))


class Released:
    """Takes releases; ``trouble`` is raised instead, ``hold`` keeps the answer back."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.trouble: Exception | None = None
        self.error = ""
        self.hold: Deferred[None] | None = None

    async def call(self, node: NodeId, verb: Verb[Any, Any], request: ReleaseRequest) -> ErrorReply:
        self.asked.append(request.request_id)
        if self.hold is not None:
            await self.hold
        if self.trouble is not None:
            raise self.trouble
        return ErrorReply(self.error)


class HungServer(FileServer):
    """Takes nothing of a body."""

    async def _take(self, kept: Kept, body: Any) -> None:
        body.pauseProducing()
        await body.startProducing(Sink())


class AttemptTests(SynchronousTestCase):
    """One attempt at one file, whose end is somebody else's to judge."""

    def setUp(self) -> None:
        self.use(FileServer())

    def use(self, server: FileServer) -> None:
        self.clock = Clock()
        self.server = server
        self.verbs = Released()
        folder = Path(self.mktemp())
        folder.mkdir()
        self.file = folder / "a.wav"
        self.file.write_bytes(bytes(range(256)) * 8)
        stager = Stager(server, folder, clock=self.clock, in_thread=at_once, chance=lambda: 1.0, piece=500)
        self.files = RequestFiles(stager, self.verbs, clock=self.clock)

    def stage(self, deadline: float | None = None) -> Deferred[str]:
        return Deferred.fromCoroutine(self.files.stage(NODE, "req", self.file, deadline=deadline))

    def outcome(self, staging: Deferred[str]) -> Outcome:
        return self.failureResultOf(staging, Unreached).value.outcome

    def test_a_broken_way_is_told_and_the_next_attempt_goes_on(self) -> None:
        """
        A cut ends the attempt with what it was; the next one sends only what is not there yet (LOAD-23).
        """
        self.server.cuts = [None, 200]
        self.assertIsInstance(self.outcome(self.stage()), NotServed)
        self.assertEqual(self.server.received, 700)
        self.assertEqual(self.successResultOf(self.stage()), "/worker/ephemeral/req/inputs/a.wav")
        self.assertEqual(self.server.received, 2048)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_conditions_are_passed_on(self) -> None:
        """
        A node without a route is that, one that reconnects is that; nothing is tried again here (LOAD-23, CLUS-12).
        """
        for outcome in (NoRoute(NODE, departed=True), Reconnecting(NODE)):
            self.server.refusals = [Unreached(outcome)]
            self.assertEqual(self.outcome(self.stage()), outcome)
        self.assertEqual(len(self.server.requests), 2)

    def test_an_answer_that_never_comes_is_not_the_clients_deadline(self) -> None:
        """
        A worker that does not answer is told as such when the client set no deadline (LOAD-23).
        """
        self.server.refusals = [Unreached(DeadlineExceeded())]
        self.assertIsInstance(self.outcome(self.stage()), NotServed)

    def test_a_worker_that_is_busy_with_it(self) -> None:
        """
        A worker that can't just now is a way that broke, not a refusal (LOAD-23).
        """
        self.server.refusals = [Answer(503, body=b"later")]
        self.assertIsInstance(self.outcome(self.stage()), NotServed)

    def test_no_room(self) -> None:
        """
        A full node is an error of its own, with the worker's words (LOAD-23).
        """
        self.server.refusals = [Answer(404), Answer(507, body=b"too much: 3 MiB are taken")]
        error = self.failureResultOf(self.stage(), NoSpace).value
        self.assertIn("3 MiB are taken", str(error))

    def test_silence(self) -> None:
        """
        A minute without a byte ends the attempt; a client's own deadline is told as that (LOAD-23).
        """
        self.use(HungServer())
        staging = self.stage()
        self.clock.advance(STALL - 1)
        self.assertNoResult(staging)
        self.clock.advance(1)
        outcome = self.outcome(staging)
        assert isinstance(outcome, NotServed)
        self.assertIn("no progress", outcome.text)
        self.use(HungServer())
        staging = self.stage(deadline=5.0)
        self.clock.advance(5)
        self.assertIsInstance(self.outcome(staging), DeadlineExceeded)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_the_client_goes_away(self) -> None:
        """
        A cancelled attempt is over at once and leaves no timer; one that the way cancelled is the way's (LOAD-23).
        """
        self.use(HungServer())
        staging = self.stage()
        staging.cancel()
        self.failureResultOf(staging, CancelledError)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.use(FileServer())
        self.server.refusals = [Answer(404), CancelledError()]
        self.assertIsInstance(self.outcome(self.stage()), NotServed)

    def test_letting_go(self) -> None:
        """
        A release goes on when nobody waits for it; one that can't be delivered is for the worker's sweep (LOAD-23).
        """
        self.verbs.hold = Deferred()
        self.files.let_go(NODE, "req")
        self.assertEqual((self.verbs.asked, self.files.releasing), (["req"], 1))
        self.verbs.hold.callback(None)
        self.assertEqual(self.files.releasing, 0)
        self.verbs.hold = None
        for self.verbs.trouble, self.verbs.error in ((Unreached(Reconnecting(NODE)), ""), (None, "disk")):
            self.files.let_go(NODE, "req")
            self.assertEqual(self.files.releasing, 0)
