"""Files by way of a real S3-compatible server, through a real tunnel, into a real worker."""

from __future__ import annotations

import hashlib
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from localai_dist.objects.body import ObjectBody
from localai_dist.objects.bucket import Bucket, object_key
from localai_dist.objects.errors import ObjectAbsent, StoreAway, StoreRefused
from localai_dist.objects.store import ObjectStore
from localai_dist.relay.body import BytesBody
from localai_dist.staging import by_store
from localai_dist.staging.by_store import StoreStager
from localai_dist.staging.errors import HoldExpired, UploadRefused
from localai_dist.staging.hold_timer import HoldTimer
from localai_dist.staging.plan import StagedFile
from localai_dist.staging.progress import Progress
from localai_dist.staging.source import list_sources
from localai_dist.staging.stager import Stager
from localai_dist.units import KiB, MiB
from localai_dist.wire import file_verbs as wire
from localai_dist.wire.verbs import MODEL_DELETE, Empty, ModelDeleteRequest
from localai_dist.worker import fetch, object_cache, object_files
from localai_dist.worker.service import WorkerServer, make_backend_worker
from tests.staging.doubles import CountingHold
from tests.staging.tunnelled import NODE, TunnelCase, reactor
from tests.support.object_server import ACCESS_KEY, BUCKET, SECRET_KEY, shared_server


class StoreCase(TunnelCase):
    """One bucket for all tests; each test has other bytes."""

    worker_bucket = True
    cache_limit = 3 * MiB

    async def setUp(self) -> None:
        self.server = shared_server()
        self.bucket = Bucket(self.server.url, BUCKET, "us-east-1", ACCESS_KEY, SECRET_KEY)
        await super().setUp()
        self.progress, self.hold = Progress(), CountingHold()

    def make_worker(self) -> WorkerServer:
        bucket = self.bucket if self.worker_bucket else None
        config = self.config(bucket=bucket, cache_limit=self.cache_limit)
        return make_backend_worker(config, reactor=reactor, checks={}, stop_node=lambda: None)

    def make_store(self) -> ObjectStore:
        return ObjectStore(self.bucket, reactor=reactor, now=lambda: datetime.now(UTC))

    def make_stager(self) -> Stager:
        self.store = self.make_store()
        return StoreStager(
            self.http,
            self.models,
            store=self.store,
            verbs=self.verbs,
            clock=reactor,
            in_thread=deferToThread,
            chance=lambda: 0.0,
        )

    def put(self, name: str, size: int) -> str:
        content = random.Random(f"{self.id()} {name}").randbytes(size)
        (self.models / name).write_bytes(content)
        return hashlib.sha256(content).hexdigest()

    async def stage(self, *names: str, model: str = "tiny") -> tuple[StagedFile, ...]:
        sources = list_sources(self.models, model, names)
        return await self.stager.stage(NODE, sources.files, self.progress, self.hold)

    def assert_right(self, staged: StagedFile, sha256: str) -> None:
        path = Path(staged.remote)
        self.assertEqual(hashlib.sha256(path.read_bytes()).hexdigest(), sha256)
        self.assertEqual(path, self.folder / "models" / "tiny" / staged.source.relative)

    def cached(self) -> list[str]:
        folder = self.folder / "data" / "files" / "cache"
        return sorted(path.name for path in folder.glob("*") if "." not in path.name) if folder.exists() else []


class ByStoreTests(StoreCase):
    async def test_files_of_every_kind(self) -> None:
        """
        A file of several parts, a small one, an empty and an oddly named one arrive by way of the store; each is there
        once, by its content (LOAD-20).
        """
        self.patch(by_store, "part_size", lambda total: 5 * MiB)
        sums = {name: self.put(name, size) for name, size in (("m.gguf", 12 * MiB + 7), ("ü a%.bin", 10), ("e", 0))}
        for staged in await self.stage(*sums):
            self.assert_right(staged, sums[staged.source.relative])
        self.assertLessEqual({object_key(sha256) for sha256 in sums.values()}, set(self.server.keys()))
        self.assertEqual((self.progress.bytes_sent, self.progress.moved), (12 * MiB + 17, 12 * MiB + 17))

    async def test_parts_that_are_not_needed_are_thrown_away(self) -> None:
        """
        A store that breaks in the middle of the parts: they are thrown away, and the file is given anew (LOAD-20).
        """
        self.patch(by_store, "part_size", lambda total: 5 * MiB)
        sha256, kept = self.put("m.gguf", 11 * MiB), self.store.put_part
        numbers = []

        async def put_part(key: str, upload: str, number: int, body: Any) -> str:
            numbers.append(number)
            if numbers == [1, 2]:
                raise StoreAway("broken")
            return await kept(key, upload, number, body)

        self.patch(self.store, "put_part", put_part)
        self.assert_right((await self.stage("m.gguf"))[0], sha256)
        self.assertEqual((numbers, self.server.uploads()), ([1, 2, 1, 2, 3], []))

    async def test_a_second_run_moves_nothing(self) -> None:
        """
        Loading again moves no byte; another model with the same file gives nothing to the store (LOAD-20).
        """
        sha256 = self.put("m.gguf", 2 * MiB)
        await self.stage("m.gguf")
        self.progress = Progress()
        (again,) = await self.stage("m.gguf")
        self.assertEqual((again.sent, self.progress.moved), (0, 0))
        self.server.delete(object_key(sha256))  # nor does it ask the store
        (copy,) = await self.stage("m.gguf", model="other")
        self.assertEqual((copy.sent, Path(copy.remote).stat().st_nlink), (0, 3))

    async def test_the_same_hold_and_progress(self) -> None:
        """
        Hashing, giving and fetching each move the hold; bytes count for the node when the node has them (LOAD-20).
        """
        self.patch(object_files, "ANSWER_WITHIN", 0.0)
        phases = []

        class Watching(CountingHold):
            def observe(hold) -> None:
                phases.append((self.progress.phase, self.progress.bytes_sent > 0))
                super().observe()

        self.hold = Watching()
        self.put("m.gguf", 4 * MiB)
        await self.stage("m.gguf")
        # Given to the store: progress, but no byte of it is on the node; then fetched by the node.
        self.assertEqual(list(dict.fromkeys(phases)), [("hashing", False), ("sending", False), ("sending", True)])

    async def test_silence_ends_it(self) -> None:
        """
        A store that takes nothing is ended by the hold, which says that nothing moved (LOAD-20).
        """
        self.put("m.gguf", MiB)
        stuck: Deferred[None] = Deferred()
        self.patch(self.store, "put", lambda key, body: stuck)
        hold = HoldTimer(reactor, base=1.0, stall=0.5)
        sources = list_sources(self.models, "tiny", ["m.gguf"])
        with self.assertRaises(HoldExpired) as caught:
            await hold.run(self.stager.stage(NODE, sources.files, self.progress, hold))
        self.assertRegex(str(caught.exception), "^deadline exceeded: no progress (for|within) ")

    async def test_a_fetch_resumes(self) -> None:
        """
        The store breaks off in the middle: the fetch goes on where it was (LOAD-20, LOAD-11).
        """
        sha256 = self.put("m.gguf", 4 * MiB)
        starts: list[int] = []
        read, break_off = ObjectStore.read, ObjectBody.dataReceived

        async def noted(store: ObjectStore, key: str, start: int) -> ObjectBody:
            body = await read(store, key, start)  # the first one finds nothing
            starts.append(start)
            return body

        def broken(body: Any, data: bytes) -> None:
            break_off(body, data)
            if len(starts) == 1 and body.taken > MiB:
                body.transport.loseConnection()

        self.patch(ObjectStore, "read", noted)
        self.patch(ObjectBody, "dataReceived", broken)
        (staged,) = await self.stage("m.gguf")
        self.assert_right(staged, sha256)
        self.assertEqual((len(starts), starts[0]), (2, 0))
        self.assertGreater(starts[1], MiB)

    async def test_a_damaged_object_is_given_again(self) -> None:
        """
        An object that is not what it is called is found by its hash, given again, and never used (LOAD-16, LOAD-20).
        """
        sha256 = self.put("m.gguf", MiB)
        self.server.put(object_key(sha256), b"x" * MiB)
        (staged,) = await self.stage("m.gguf")
        self.assert_right(staged, sha256)
        self.assertIn("SHA-256", self.progress.trouble)

    async def test_an_object_that_stays_damaged_ends_it(self) -> None:
        """
        A store that keeps other bytes than it was given ends the load with that reason (LOAD-20).
        """
        sha256 = self.put("m.gguf", MiB)
        self.server.put(object_key(sha256), b"x" * MiB)
        self.patch(self.store, "put", lambda key, body: succeed(None))
        with self.assertRaises(UploadRefused) as caught:
            await self.stage("m.gguf")
        self.assertIn("SHA-256", str(caught.exception))

    async def test_keys_stay_inside(self) -> None:
        """
        A key that climbs is refused by this way too, and so is nonsense (LOAD-14, LOAD-20).
        """
        for key in ("models/../x", "/etc/x", "models", ""):
            request = wire.EnsureRequest(key, "o", "0" * 64, 1)
            self.assertTrue((await self.verbs.call(NODE, wire.FILES_ENSURE, request)).error, key)
        request = wire.EnsureRequest("models/m/x", "o", "zz", 1)
        self.assertTrue((await self.verbs.call(NODE, wire.FILES_ENSURE, request)).error)

    async def test_a_cancelled_load_stops_the_fetch(self) -> None:
        """
        A fetch nobody asks for any more stops, keeps what came, and the next one goes on there (LOAD-17, LOAD-20).
        """
        self.patch(object_files, "ANSWER_WITHIN", 0.0)
        self.patch(fetch, "UNASKED", -1.0)
        sha256 = self.put("m.gguf", MiB)
        await self.store.put(object_key(sha256), BytesBody((self.models / "m.gguf").read_bytes()))
        request = wire.EnsureRequest("models/tiny/m.gguf", object_key(sha256), sha256, MiB)
        while not (reply := await self.verbs.call(NODE, wire.FILES_ENSURE, request)).error:
            pass
        self.assertEqual((reply.error, reply.passing), ("nobody asks for this file any more", True))
        self.patch(fetch, "UNASKED", 60.0)
        self.assert_right((await self.stage("m.gguf"))[0], sha256)

    async def stalled(self) -> tuple[str, wire.EnsureRequest]:
        """A file in the store, which gives two megabytes of it and then falls silent; its hash, and how to ask."""
        sha256 = self.put("m.gguf", 4 * MiB)
        await self.store.put(object_key(sha256), BytesBody((self.models / "m.gguf").read_bytes()))
        received = ObjectBody.dataReceived

        def silent(body: Any, data: bytes) -> None:
            received(body, data)
            if self.silent and body.taken > 2 * MiB:
                body.transport.pauseProducing()
                self.patch(ObjectBody, "dataReceived", lambda *_: None)

        self.silent = True
        self.patch(ObjectBody, "dataReceived", silent)
        self.heal = lambda: self.patch(ObjectBody, "dataReceived", received)
        return sha256, wire.EnsureRequest("models/tiny/m.gguf", object_key(sha256), sha256, 4 * MiB)

    async def until(self, fact: Any, what: str) -> None:
        """Wait for a fact."""
        for _ in range(600):
            if fact():
                return
            await deferLater(reactor, 0.05)
        self.fail(f"waited 30 s for: {what}")

    @property
    def partial(self) -> Path:
        """Where the file comes to be."""
        return self.folder / "models" / "tiny" / "m.gguf"

    async def test_a_caller_that_leaves_stops_the_fetch(self) -> None:
        """
        The call that asks is cancelled while the store is silent: the fetch stops soon and keeps what came; without
        the caller it would have waited for a minute (LOAD-17, LOAD-20).
        """
        sha256, request = await self.stalled()
        self.patch(object_files, "ANSWER_WITHIN", 600.0)
        asking = Deferred.fromCoroutine(self.verbs.call(NODE, wire.FILES_ENSURE, request, timeout=600.0))
        await self.until(lambda: self.partial.exists() and self.partial.stat().st_size >= MiB, "the first bytes")
        asking.cancel()
        asking.addErrback(lambda failure: None)
        fetches = self.worker_objects()._fetches
        await self.until(lambda: all(one._over for one in fetches.values()), "the end of the fetch")
        self.assertGreaterEqual(self.partial.stat().st_size, MiB)
        self.heal()
        self.assert_right((await self.stage("m.gguf"))[0], sha256)

    async def test_another_that_asks_keeps_it(self) -> None:
        """
        Who asks again before the second is over finds the same fetch, which goes on: a way that broke costs nothing.
        """
        _, request = await self.stalled()
        self.patch(object_files, "ANSWER_WITHIN", 600.0)
        self.patch(fetch, "LEFT_ALONE", 60.0)  # asked again before that, on any machine
        asking = Deferred.fromCoroutine(self.verbs.call(NODE, wire.FILES_ENSURE, request, timeout=600.0))
        await self.until(lambda: self.partial.exists() and self.partial.stat().st_size >= MiB, "the first bytes")
        [running] = self.worker_objects()._fetches.values()
        await self.until(lambda: running.reply.received > 2 * MiB, "all that the store gives")
        asking.cancel()
        asking.addErrback(lambda failure: None)
        await self.until(lambda: running._leaving is not None, "the first one's leaving")
        ending = running._leaving
        assert ending is not None
        self.patch(object_files, "ANSWER_WITHIN", 0.2)
        reply = await self.verbs.call(NODE, wire.FILES_ENSURE, request)
        self.assertEqual((reply.error, running.stopped, ending.active()), ("", False, False))
        self.assertGreater(reply.received, MiB)
        await self.worker_objects().stop()

    async def test_a_deleted_model_ends_its_fetch(self) -> None:
        """
        A model's files are deleted while the silent store has more of them: the fetch ends first, nothing comes back,
        and the next one begins anew (LOAD-17, LOAD-20).
        """
        sha256, request = await self.stalled()
        self.patch(object_files, "ANSWER_WITHIN", 0.0)
        while (await self.verbs.call(NODE, wire.FILES_ENSURE, request)).received < MiB:
            pass
        [running] = self.worker_objects()._fetches.values()
        reply = await self.verbs.call(NODE, MODEL_DELETE, ModelDeleteRequest("tiny"))
        self.assertEqual((reply.success, running._over, self.worker_objects()._fetches), (True, True, {}))
        self.assertFalse(self.partial.parent.exists())
        self.heal()
        self.patch(object_files, "ANSWER_WITHIN", 2.0)
        self.assert_right((await self.stage("m.gguf"))[0], sha256)

    def worker_objects(self) -> object_files.ObjectFiles:
        """The worker's side of the store."""
        return next(one for one in self.worker._beside if isinstance(one, object_files.ObjectFiles))

    async def test_the_other_verbs(self) -> None:
        """
        A worker's file goes into the store, a temporary one is made, a folder is listed (LOAD-20).
        """
        self.put("m.gguf", 100 * KiB)
        await self.stage("m.gguf")
        reply = await self.verbs.call(NODE, wire.FILES_STAGE, wire.StageRequest("models/tiny/m.gguf", "out/m"))
        self.assertEqual((reply.error, len(self.server.get("out/m"))), ("", 100 * KiB))
        self.assertTrue((await self.verbs.call(NODE, wire.FILES_STAGE, wire.StageRequest("models/no", "out/m"))).error)
        temporary = await self.verbs.call(NODE, wire.FILES_TEMP, Empty())
        self.assertTrue(Path(temporary.local_path).is_file())
        listed = await self.verbs.call(NODE, wire.FILES_LISTDIR, wire.ListRequest("models/tiny"))
        self.assertEqual(listed.files, ["m.gguf"])
        self.assertTrue((await self.verbs.call(NODE, wire.FILES_LISTDIR, wire.ListRequest("models/none"))).error)


class CacheTests(StoreCase):
    async def test_a_deleted_models_files_are_kept_up_to_the_bound(self) -> None:
        """
        After a delete the bytes are still here, the oldest go first when it is too much, and what a model uses costs
        nothing (LOAD-20).
        """
        sums = [self.put(f"{number}.gguf", 2 * MiB) for number in range(3)]
        await self.stage(*(f"{number}.gguf" for number in range(3)))
        self.assertEqual(self.cached(), sorted(sums))  # 6 MiB over a bound of 3: all of it is the model's
        await self.verbs.call(NODE, MODEL_DELETE, ModelDeleteRequest("tiny"))
        await self.stage("0.gguf")
        self.put("new.gguf", KiB)
        await self.stage("new.gguf")  # makes room: 1 and 2 are nobody's, 4 MiB
        self.assertIn(sums[0], self.cached())
        self.assertEqual(len(set(sums) & set(self.cached())), 2)
        self.progress = Progress()
        self.server.delete(object_key(sums[2]))
        (staged,) = await self.stage("2.gguf") if sums[2] in self.cached() else await self.stage("1.gguf")
        self.assertEqual((staged.sent, self.progress.moved), (0, 0))

    async def test_a_cached_file_that_was_changed_is_not_used(self) -> None:
        """
        A file in the cache that was changed is thrown away and fetched again (LOAD-16, LOAD-20).
        """
        sha256 = self.put("m.gguf", MiB)
        await self.stage("m.gguf")
        await self.verbs.call(NODE, MODEL_DELETE, ModelDeleteRequest("tiny"))
        with (self.folder / "data" / "files" / "cache" / sha256).open("r+b") as file:
            file.write(b"changed")
        (staged,) = await self.stage("m.gguf")
        self.assert_right(staged, sha256)

    async def test_no_hard_links_no_cache(self) -> None:
        """
        Where hard links can't be made the file is staged all the same (LOAD-20).
        """

        def no(*_: Any) -> None:
            raise OSError(18, "another file system")

        self.patch(object_cache.os, "link", no)
        sha256 = self.put("m.gguf", MiB)
        self.assert_right((await self.stage("m.gguf"))[0], sha256)
        self.assertEqual(self.cached(), [])


class WithoutStoreTests(StoreCase):
    worker_bucket = False

    async def test_a_worker_without_a_store_gets_it_over_the_tunnel(self) -> None:
        """
        A worker that knows no object store answers 404, and is sent the file over its tunnel (LOAD-20).
        """
        sha256 = self.put("m.gguf", MiB)
        before = self.server.keys()
        self.assert_right((await self.stage("m.gguf"))[0], sha256)
        self.assertEqual(self.server.keys(), before)


class RefusalTests(StoreCase):
    async def test_what_the_store_says(self) -> None:
        """
        A missing bucket is the store's own words; one that is not there passes by itself (LOAD-20).
        """
        self.put("m.gguf", KiB)
        self.bucket = Bucket(self.server.url, "none", "us-east-1")
        self.stager = self.make_stager()
        with self.assertRaises(UploadRefused) as caught:
            await self.stage("m.gguf")
        self.assertIn("NoSuchBucket", str(caught.exception))
        with self.assertRaises(ObjectAbsent):
            await self.store.read("none", 0)
        with self.assertRaises(StoreRefused):
            await self.store.begin("x")
        self.assertIsNone(await self.store.size("none"))
        self.bucket = Bucket("http://127.0.0.1:1", "b", "r")
        with self.assertRaises(StoreAway):
            await self.make_store().size("x")
