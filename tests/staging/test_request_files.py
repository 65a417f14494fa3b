"""Files of single requests through a real tunnel: staged, bounded, released."""

from __future__ import annotations

from pathlib import Path

from localai_dist.staging.errors import SourceMissing, StagingError, UploadRefused
from localai_dist.staging.request_files import RequestFiles
from localai_dist.wire.file_verbs import FILES_RELEASE, ReleaseRequest
from localai_dist.wire.keys import InvalidKey
from localai_dist.worker.request_files import RequestLimits
from localai_dist.worker.service import WorkerServer, make_backend_worker
from tests.staging.doubles import CountingHold
from tests.staging.tunnelled import NODE, TunnelCase, reactor


class RequestFilesCase(TunnelCase):
    """A frontend's ``files``."""

    limits: RequestLimits

    def make_worker(self) -> WorkerServer:
        config = self.config(request_limits=self.limits)
        return make_backend_worker(config, reactor=reactor, checks={}, stop_node=lambda: None)

    async def setUp(self) -> None:
        await super().setUp()
        self.files = RequestFiles(self.stager, self.verbs)

    async def stage(self, request: str, name: str, size: int = 1000) -> Path:
        source = self.folder / name
        source.write_bytes(name.encode() * (size // len(name)))
        remote = Path(await self.files.stage(NODE, request, source, CountingHold()))
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
            await self.files.stage(NODE, "r", self.folder / "none", CountingHold())
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
