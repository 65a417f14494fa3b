"""The uploader against the worker's real file server, over loopback TCP: both ends of the protocol agree."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.logger import LogEvent, globalLogPublisher
from twisted.trial.unittest import TestCase
from twisted.web.client import Agent
from twisted.web.http_headers import Headers
from twisted.web.iweb import IBodyProducer, IResponse

from localai_dist.ids import NodeId
from localai_dist.mux.classes import TrafficClass
from localai_dist.reach import NotServed, Unreached
from localai_dist.staging.errors import UploadRefused
from localai_dist.staging.plan import StagedFile
from localai_dist.staging.progress import Progress
from localai_dist.staging.source import list_sources
from localai_dist.staging.stager import Stager
from localai_dist.units import KiB, MiB
from localai_dist.worker.containment import Areas
from localai_dist.worker.files import FilesResource
from localai_dist.worker.offload import ThreadOffload
from localai_dist.worker.request_files import RequestFiles
from localai_dist.worker.server import LoopbackServer, make_root
from localai_dist.worker.uploads import Uploads
from tests.staging.doubles import CountingHold
from tests.tunnel.sockets import no_connection_left

TOKEN = "registration-token"
NODE = NodeId("node-1")


class LoopbackHttp:
    """
    ``NodeHttp`` by TCP.

    Attributes:
        cut_after: the coming PUT's connection is lost when so many bytes were taken.
        sent: bytes of bodies taken.
    """

    def __init__(self, port: int, token: str = TOKEN) -> None:
        self._port = port
        self._token = token
        self._agent = Agent(reactor)
        self.cut_after: int | None = None
        self.sent = 0

    async def request(
        self,
        node: NodeId,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: IBodyProducer | None,
        traffic: TrafficClass,
        deadline: float | None,
    ) -> IResponse:
        sent = Headers({name: [value] for name, value in headers.items()})
        sent.addRawHeader("Authorization", f"Bearer {self._token}")
        url = f"http://127.0.0.1:{self._port}{path}".encode()
        asked: Deferred[IResponse] = self._agent.request(method.encode(), url, sent, body)
        if body is not None:
            self._watch(body, asked)
        try:
            return await asked
        except Exception as error:
            raise Unreached(NotServed(f"lost: {error}")) from error

    def _watch(self, body: Any, asked: Deferred[IResponse]) -> None:
        taken = body._taken

        def count(size: int) -> None:
            taken(size)
            self.sent += size
            if self.cut_after is not None and self.sent >= self.cut_after:
                self.cut_after = None
                reactor.callLater(0, asked.cancel)  # type: ignore[attr-defined]

        body._taken = count


class AgainstWorkerTests(TestCase):
    timeout = 60

    def setUp(self) -> None:
        self.source = Path(self.mktemp())
        self.target = Path(self.mktemp())
        for folder in (self.source, self.target / "models", self.target / "data", self.target / "temp"):
            folder.mkdir(parents=True)
        offload = ThreadOffload(reactor)
        areas = Areas(models=self.target / "models", data=self.target / "data", staging=self.target / "temp")
        files = FilesResource(
            TOKEN,
            areas=areas,
            requests=RequestFiles(areas, offload=offload, now=time.time),
            uploads=Uploads(offload=offload, clock=reactor),
            offload=offload,
            temp=self.target / "temp",
        )
        self.server = LoopbackServer(make_root({}, {"files": files}), reactor=reactor)
        self.server.start()
        self.addCleanup(no_connection_left)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.server.stop()))
        self.http = LoopbackHttp(self.server.port)
        self.progress = Progress()
        self.events: list[LogEvent] = []
        globalLogPublisher.addObserver(self.events.append)
        self.addCleanup(globalLogPublisher.removeObserver, self.events.append)

    def stager(self, piece: int = 1 * MiB) -> Stager:
        return Stager(
            self.http,
            self.source,
            clock=reactor,  # type: ignore[arg-type]
            in_thread=deferToThread,
            chance=lambda: 0.0,
            piece=piece,
        )

    async def stage(self, *relatives: str, stager: Stager | None = None) -> tuple[StagedFile, ...]:
        sources = list_sources(self.source, "tiny", relatives)
        return await (stager or self.stager()).stage(NODE, sources.files, self.progress, CountingHold())

    def put(self, relative: str, size: int) -> str:
        path = self.source / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        content = random.Random(size).randbytes(size)
        path.write_bytes(content)
        return hashlib.sha256(content).hexdigest()

    def assert_there(self, staged: StagedFile, sha256: str) -> None:
        path = Path(staged.remote)
        self.assertEqual(hashlib.sha256(path.read_bytes()).hexdigest(), sha256)
        root = Path(os.path.realpath(self.target / "models"))
        self.assertEqual(path, root / "tiny" / staged.source.relative)

    async def test_files_of_every_kind_arrive(self) -> None:
        """
        Nested, empty and oddly named files arrive byte for byte inside the models folder (WALK-10, LOAD-13).
        """
        sums = {name: self.put(name, size) for name, size in (("m.gguf", 3 * MiB + 7), ("a b/ü%#?.bin", 10), ("e", 0))}
        for staged in await self.stage(*sums):
            self.assert_there(staged, sums[staged.source.relative])
        self.assertEqual(self.http.sent, 3 * MiB + 17)

    async def test_a_second_run_moves_nothing(self) -> None:
        """
        Loading again transfers 0 bytes, also for an uploader that remembers nothing (WALK-10).
        """
        self.put("m.gguf", 2 * MiB)
        await self.stage("m.gguf")
        before = self.http.sent
        (again,) = await self.stage("m.gguf", stager=self.stager())
        self.assertEqual((self.http.sent, again.sent), (before, 0))

    async def test_a_cut_resumes(self) -> None:
        """
        A connection lost in the middle costs at most what was under way; the file is right in the end (LOAD-11).
        """
        expected = self.put("m.gguf", 24 * MiB)
        self.http.cut_after = 13 * MiB
        (staged,) = await self.stage("m.gguf", stager=self.stager(piece=64 * MiB))
        self.assert_there(staged, expected)
        self.assertGreater(self.http.sent, 24 * MiB - 1)
        self.assertLess(self.http.sent, 24 * MiB + 8 * MiB)
        self.assertTrue(self.progress.trouble)
        # An uploader that is cut off is an expected event: one line, no traceback.
        told = [event["log_format"] for event in self.events if event["log_namespace"].endswith("worker.resources")]
        self.assertEqual(told, ["the client of {method} {path} left: {why}"])

    async def test_a_changed_file_replaces_the_old_one(self) -> None:
        """
        Another file under the same name is sent whole and replaces what was there.
        """
        self.put("m.gguf", 300 * KiB)
        await self.stage("m.gguf")
        expected = self.put("m.gguf", 200 * KiB)
        (staged,) = await self.stage("m.gguf")
        self.assert_there(staged, expected)

    async def test_a_file_nobody_hashed_is_verified_and_not_sent(self) -> None:
        """
        A right file whose hash the worker lost is hashed there and not sent again (LOAD-3).
        """
        expected = self.put("m.gguf", 3 * MiB)
        there = self.target / "models" / "tiny" / "m.gguf"
        there.parent.mkdir(parents=True)
        there.write_bytes((self.source / "m.gguf").read_bytes())
        (staged,) = await self.stage("m.gguf")
        self.assert_there(staged, expected)
        self.assertEqual(self.http.sent, 0)

    async def test_a_wrong_token_ends_it(self) -> None:
        """
        A worker with another registration token refuses, and the error says so.
        """
        self.put("m.gguf", 10)
        self.http = LoopbackHttp(self.server.port, "other")
        try:
            await self.stage("m.gguf")
        except UploadRefused as error:
            self.assertIn("401", str(error))
        else:
            self.fail("it was not refused")

    async def test_two_uploads_of_one_file_end_well(self) -> None:
        """
        Two frontends that send the same file at once end with one right file (LOAD-10).
        """
        expected = self.put("m.gguf", 4 * MiB)
        one, two = (Deferred.fromCoroutine(self.stage("m.gguf", stager=self.stager(256 * KiB))) for _ in range(2))
        self.assert_there((await one)[0], expected)
        self.assert_there((await two)[0], expected)
