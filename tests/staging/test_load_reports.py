"""What users reported of staging, with the real uploader, tunnel, splice and worker server."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IConsumer
from twisted.internet.task import deferLater
from twisted.web.iweb import IBodyProducer
from zope.interface import implementer

from localai_dist.catalog.parse import parse_model
from localai_dist.ids import folder_of
from localai_dist.mux.classes import TrafficClass
from localai_dist.staging.plan import StagedFile
from localai_dist.staging.progress import Progress
from localai_dist.units import MiB
from localai_dist.wire.files import CONTENT_RANGE, CONTENT_SHA256, FILE_SIZE, FILES_PATH
from localai_dist.wire.verbs import MODEL_DELETE, ModelDeleteRequest
from localai_dist.worker import blocks
from tests.staging.tunnelled import NODE, TunnelCase, reactor

SIZE = 10 * MiB
PIECE = 1 * MiB


@implementer(IBodyProducer)
class Stuck:
    """A body that says it has ``length`` bytes, gives some and then nothing, as a dead link does."""

    def __init__(self, length: int, given: bytes) -> None:
        self.length = length
        self.given = given
        self.begun: Deferred[None] = Deferred()

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        """Give what there is."""
        consumer.write(self.given)
        self.begun.callback(None)
        return Deferred()

    def pauseProducing(self) -> None:
        """Nothing comes anyway."""

    def resumeProducing(self) -> None:
        """Nothing comes anyway."""

    def stopProducing(self) -> None:
        """Over."""


class ReportCase(TunnelCase):
    """A frontend's models folder and a worker."""

    def write(self, relative: str, content: bytes) -> Path:
        path = self.models / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    async def stage(self, model: str, *relatives: str) -> tuple[StagedFile, ...]:
        sources = await self.stager.sources(model, relatives)
        return await self.stager.stage(NODE, sources.files, Progress())

    def arrived(self, model: str) -> dict[str, str]:
        """Every file on the worker, without hash files: its name and its hash."""
        return hashes(self.folder / "models" / folder_of(model))


def hashes(root: Path) -> dict[str, str]:
    """Every file below ``root`` but hash files."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and not path.name.endswith((".sha256", ".sha256.target"))
    }


class DeadWriterTests(ReportCase):
    """A link that died where the worker can't see it."""

    async def test_the_sender_converges_by_itself(self) -> None:
        """
        A dead stream still holds the file when its sender comes back: it learns the offset from the worker, goes on
        there, and the whole file is there in seconds, unharmed; a wrong offset is told the right one (BR-070).
        """
        self.patch(blocks, "WANTED_SILENCE", 0.2)
        data = hashlib.shake_128(b"br-070").digest(SIZE)
        self.write("m.gguf", data)
        sha256, path = hashlib.sha256(data).hexdigest(), FILES_PATH + "models/m/m.gguf"
        dead = Stuck(SIZE, data[: 2 * MiB + 17])
        headers = {CONTENT_SHA256: sha256, CONTENT_RANGE: f"bytes 0-{SIZE - 1}/{SIZE}"}
        hanging = self.begin("PUT", path, headers, dead)
        await dead.begun
        partial = self.folder / "models" / "m" / "m.gguf"
        while not partial.exists() or partial.stat().st_size < 1 * MiB:
            await deferLater(reactor, 0.01)
        began = reactor.seconds()
        [staged] = await self.stage("m", "m.gguf")
        self.assertLess(reactor.seconds() - began, 10)
        self.assertLessEqual(staged.sent, SIZE - 2 * MiB + PIECE)
        self.assertEqual(self.arrived("m"), {"m.gguf": sha256})
        hanging.addBoth(lambda _: None)
        hanging.cancel()
        other = {CONTENT_SHA256: "0" * 64, CONTENT_RANGE: f"bytes 100-199/{SIZE}"}
        answer = await self.begin("PUT", FILES_PATH + "models/m/other", other, Stuck(100, bytes(100)))
        self.assertEqual((answer.code, answer.headers.getRawHeaders(FILE_SIZE)), (416, ["0"]))

    def begin(self, method: str, path: str, headers: dict[str, str], body: Any) -> Deferred[Any]:
        """A request on a stream of its own."""

        async def asked() -> Any:
            return await self.http.request(
                NODE, method, path, headers=headers, body=body, traffic=TrafficClass.BULK, deadline=None
            )

        return Deferred.fromCoroutine(asked())


class KeptTests(ReportCase):
    """What is left of a transfer that did not end well."""

    async def broken_off(self) -> tuple[str, int]:
        """A transfer given up at 80 %: the file's hash, and the bytes that are on the worker."""
        data = hashlib.shake_128(b"br-095").digest(SIZE)
        self.write("m.gguf", data)
        progress = Progress()
        sources = await self.stager.sources("m", ["m.gguf"])
        going = Deferred.fromCoroutine(self.stager.stage(NODE, sources.files, progress))
        while progress.in_file < SIZE * 4 // 5:
            await deferLater(reactor, 0)
        going.cancel()
        await self.assertFailure(going, CancelledError)
        answer = await self.begin_head()
        return hashlib.sha256(data).hexdigest(), answer

    async def begin_head(self) -> int:
        """Bytes on the worker once the broken stream's writer has ended."""
        size = -1
        while True:
            answer = await self.http.request(
                NODE,
                "HEAD",
                FILES_PATH + "models/m/m.gguf",
                headers={},
                body=None,
                traffic=TrafficClass.CONTROL,
                deadline=None,
            )
            found = int(answer.headers.getRawHeaders(FILE_SIZE)[0])
            if found == size:
                return found
            size = found
            await deferLater(reactor, 0.05)

    async def test_what_was_sent_is_not_sent_again(self) -> None:
        """
        A transfer that ended at 80 % without anybody wanting it gone: the next one sends only the rest (BR-095).

        BR-095 says "cancel". An operator's cancel is another thing (LOAD-17, decision 0007): see the next test.
        """
        sha256, kept = await self.broken_off()
        self.assertGreaterEqual(kept, SIZE * 4 // 5 - PIECE)
        [staged] = await self.stage("m", "m.gguf")
        self.assertLessEqual(staged.sent, SIZE - kept)
        self.assertEqual(self.arrived("m"), {"m.gguf": sha256})

    async def test_what_an_operator_cancelled_is_sent_again(self) -> None:
        """
        After an operator's cancel nothing is left on the worker, and the next load sends everything (LOAD-17).

        This contradicts the words of BR-095 ("cancel at 80 %, re-request -> sends only 20 %"); LOAD-17 is followed.
        """
        _sha256, _kept = await self.broken_off()
        reply = await self.verbs.call(NODE, MODEL_DELETE, ModelDeleteRequest("m"))  # as loads/cancel.py does
        self.assertTrue(reply.success)
        self.assertFalse((self.folder / "models" / "m").exists())
        [staged] = await self.stage("m", "m.gguf")
        self.assertEqual(staged.sent, SIZE)


class TreeTests(ReportCase):
    """A model that is a folder, with companions, under several names."""

    async def test_a_whole_model_arrives_under_each_name(self) -> None:
        """
        Nested folders, 60 files, an empty one, spaces and other letters, a projector: the worker's tree is identical, a
        second name for the same files works alike, and a second run moves only what is missing (BR-107).
        """
        tree = {f"repo/shard {number:02}/größe-{number}.bin": bytes([number]) * 1000 for number in range(57)}
        tree |= {"repo/a/b/c/deep.json": b"{}", "repo/empty": b"", "repo/模型.txt": b"text", "mmproj.gguf": b"p" * 5000}
        for relative, content in tree.items():
            self.write(relative, content)
        expected = hashes(self.models)
        self.assertEqual(len(expected), 61)
        for name in ("real", "alias", "virtual/of-it"):
            text = f"name: {name}\nbackend: b\nparameters:\n  model: repo\nmmproj: mmproj.gguf\n"
            model = parse_model(text, source=f"{name}.yaml")
            staged = await self.stage(name, *model.files())
            self.assertEqual(self.arrived(name), expected)
            root = self.folder / "models" / folder_of(name)
            self.assertEqual({one.remote for one in staged}, {str(root / relative) for relative in expected})
            self.assertEqual(sum(one.sent for one in await self.stage(name, *model.files())), 0)
        (self.folder / "models" / "real" / "repo" / "模型.txt").unlink()
        again = await self.stage("real", "repo", "mmproj.gguf")
        self.assertEqual({one.source.relative: one.sent for one in again if one.sent}, {"repo/模型.txt": 4})
        self.assertEqual(self.arrived("real"), expected)
