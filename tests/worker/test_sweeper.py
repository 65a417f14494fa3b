"""Left-over files go, others stay."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.wire.files import ContentRange, PutRequest
from localai_dist.wire.keys import parse_key
from localai_dist.worker.containment import Areas
from localai_dist.worker.errors import NoRoom, RequestOver
from localai_dist.worker.request_files import LEFT_OVER, RequestFiles, RequestLimits
from localai_dist.worker.sweeper import EVERY, STALE, Sweeper
from localai_dist.worker.uploads import Uploads
from tests.worker.test_uploads import FakeBody, Steps, digest, payload

NOW = 1_900_000_000.0


class SweepCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        self.models, self.staging = self.root / "models", self.root / "staging"
        self.areas = Areas(models=self.models, data=self.root / "data", staging=self.staging)
        self.clock = Clock()
        self.steps = Steps()
        self.now = NOW
        self.uploads = Uploads(offload=self.steps, clock=self.clock)
        self.requests = self.fresh()
        self.sweeper = self.sweeper_with()

    def sweeper_with(self, **more: Any) -> Sweeper:
        """One for these folders."""
        return Sweeper(
            self.areas,
            uploads=self.uploads,
            requests=self.requests,
            offload=self.steps,
            clock=self.clock,
            now=lambda: self.now,
            **more,
        )

    def fresh(self, limit: int = 10**9) -> RequestFiles:
        """As after a start of the worker."""
        limits = RequestLimits(limit, 0)
        return RequestFiles(self.areas, offload=self.steps, now=lambda: self.now, limits=limits)

    def run_(self, coroutine: Any) -> Any:
        return self.successResultOf(Deferred.fromCoroutine(coroutine))

    def failed(self, coroutine: Any, *kinds: type[Exception]) -> Exception:
        error: Exception = self.failureResultOf(Deferred.fromCoroutine(coroutine), *kinds).value
        return error

    def sweep(self) -> None:
        self.run_(self.sweeper.sweep())

    def put(self, path: Path, data: bytes, total: bytes) -> Any:
        request = PutRequest(ContentRange(0, len(data) - 1, len(total)), digest(total), len(data))
        return self.run_(self.uploads.put(path, request, FakeBody(data)))

    def age(self, folder: Path, seconds: float) -> None:
        """Everything in ``folder`` was last touched so long ago."""
        for parent, folders, names in os.walk(folder):
            for name in [*folders, *names]:
                os.utime(Path(parent, name), (self.now - seconds,) * 2, follow_symlinks=False)
        os.utime(folder, (self.now - seconds,) * 2)

    def left(self, folder: Path) -> list[str]:
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


class PartialTests(SweepCase):
    def test_an_old_partial_goes_a_young_one_stays(self) -> None:
        """An unfinished file is kept for a day across everything, then it is removed with its mark (LOAD-16)."""
        total = payload(1000)
        self.put(self.models / "m" / "a.gguf", total[:500], total)
        self.put(self.models / "m" / "b.gguf", total, total)
        self.age(self.models, STALE - 1)
        self.sweep()
        self.assertEqual(self.left(self.models), ["m/a.gguf", "m/a.gguf.sha256.target", "m/b.gguf", "m/b.gguf.sha256"])
        self.age(self.models, STALE + 1)
        self.sweep()
        self.assertEqual(self.left(self.models), ["m/b.gguf", "m/b.gguf.sha256"])

    def test_after_it_was_swept_it_starts_anew(self) -> None:
        """An upload that comes back too late starts from 0 and ends well (LOAD-16)."""
        total = payload(1000)
        path = self.models / "m" / "a.gguf"
        self.put(path, total[:500], total)
        self.age(self.models, STALE + 1)
        self.sweep()
        request = PutRequest(ContentRange(500, 999, 1000), digest(total), 500)
        answer = self.run_(self.uploads.put(path, request, FakeBody(total[500:])))
        self.assertEqual((answer.size, answer.wrong_offset), (0, True))
        self.put(path, total, total)
        self.assertEqual(path.read_bytes(), total)

    def test_only_the_age_of_the_last_byte_counts(self) -> None:
        """An upload that has lasted for days but still moves is left alone (LOAD-16)."""
        total = payload(1000)
        self.put(self.models / "a", total[:500], total)
        self.age(self.models, STALE + 1)
        os.utime(self.models / "a", (self.now - 5,) * 2)
        self.sweep()
        self.assertEqual(self.left(self.models), ["a", "a.sha256.target"])

    def test_one_that_is_being_written_stays(self) -> None:
        """An upload under way is not swept, whatever the clock says (LOAD-16)."""
        total = payload(1000)
        self.put(self.models / "a", total[:500], total)
        body = FakeBody(b"")
        stuck: Deferred[list[bytes]] = Deferred()
        body.gather = lambda count: stuck  # type: ignore[method-assign,assignment,return-value]
        request = PutRequest(ContentRange(500, 999, 1000), digest(total), 500)
        going = Deferred.fromCoroutine(self.uploads.put(self.models / "a", request, body))
        self.age(self.models, STALE + 1)
        self.sweep()
        self.assertEqual(self.left(self.models), ["a", "a.sha256.target"])
        stuck.callback([])
        self.successResultOf(going)
        self.age(self.models, STALE + 1)
        self.sweep()
        self.assertEqual(self.left(self.models), [])

    def test_other_leftovers(self) -> None:
        """A draft and a mark without its file go; a whole file's late mark goes alone (LOAD-16)."""
        total = payload(100)
        self.put(self.models / "whole", total, total)
        for name in ("whole.sha256.target", "lone.sha256.target", "draft.upload-tmp"):
            (self.models / name).write_bytes(b"x")
        self.age(self.models, STALE + 1)
        self.sweep()
        self.assertEqual(self.left(self.models), ["whole", "whole.sha256"])

    def test_links_are_not_followed(self) -> None:
        """What a link leads to is not swept (LOAD-16)."""
        outside = self.root / "outside"
        outside.mkdir()
        for name in ("a", "a.sha256.target"):
            (outside / name).write_bytes(b"x")
        self.models.mkdir()
        (self.models / "link").symlink_to(outside)
        self.age(outside, STALE + 1)
        self.sweep()
        self.assertEqual(self.left(outside), ["a", "a.sha256.target"])

    def test_rounds(self) -> None:
        """The first round is at the start, the next ones every quarter of an hour, none after the stop (LOAD-16)."""
        total = payload(1000)
        seen = []
        self.sweeper.start()
        for _ in range(2):
            self.put(self.models / "a", total[:500], total)
            self.age(self.models, STALE + 1)
            self.clock.advance(EVERY)
            seen.append(self.left(self.models))
        self.run_(self.sweeper.stop())
        self.assertEqual((seen, self.clock.getDelayedCalls()), ([[], []], []))

    def test_a_disk_that_says_no(self) -> None:
        """A round that fails is logged, and the next one comes (LOAD-16)."""
        self.models.mkdir()
        self.patch(self.sweeper, "_areas", None)
        self.sweeper.start()
        self.assertEqual(len(self.flushLoggedErrors(AttributeError)), 1)
        self.patch(self.sweeper, "_areas", self.areas)
        self.clock.advance(EVERY)
        self.run_(self.sweeper.stop())


class RequestFilesTests(SweepCase):
    def write(self, key: str, data: bytes, requests: RequestFiles | None = None) -> Any:
        """One PUT as the file server does it."""

        async def whole() -> Any:
            parsed = parse_key(key)
            request = PutRequest(None, None, len(data))
            async with (requests or self.requests).writing(parsed, request):
                return await self.uploads.put(self.areas.path(parsed), request, FakeBody(data))

        return whole()

    def test_release_removes_and_refuses(self) -> None:
        """Released: its files are gone, a late one is refused, another request's stays (LOAD-23)."""
        self.run_(self.write("ephemeral/r1/inputs/a.png", b"12345"))
        self.run_(self.write("ephemeral/r2/inputs/a.png", b"12345"))
        self.run_(self.requests.release("r1"))
        self.assertEqual(self.left(self.staging), ["ephemeral/r2/inputs/a.png", "ephemeral/r2/inputs/a.png.sha256"])
        self.failed(self.write("ephemeral/r1/inputs/b.png", b"1"), RequestOver)
        self.run_(self.requests.release("never-seen"))

    def test_released_while_it_is_written(self) -> None:
        """A release in the middle of an upload takes effect when that ends: nothing is left (LOAD-23)."""
        started: Deferred[None] = Deferred()

        async def writing() -> None:
            async with self.requests.writing(parse_key("ephemeral/r1/inputs/a"), PutRequest(None, None, 3)):
                self.put(self.staging / "ephemeral/r1/inputs/a", b"123", b"123456")
                await started

        going = Deferred.fromCoroutine(writing())
        self.run_(self.requests.release("r1"))
        self.assertNotEqual(self.left(self.staging), [])
        started.callback(None)
        self.successResultOf(going)
        self.assertEqual(self.left(self.staging), [])

    def test_the_limit_holds_over_a_restart(self) -> None:
        """What an earlier run left counts; over the limit is refused before a byte is written (LOAD-23)."""
        self.run_(self.write("ephemeral/r1/inputs/a", b"x" * 60))
        after = self.fresh(limit=400)
        self.failed(self.write("ephemeral/r2/inputs/a", b"x" * 341, after), NoRoom)
        self.assertEqual([name for name in self.left(self.staging) if "r2" in name], [])
        self.run_(self.write("ephemeral/r2/inputs/a", b"x" * 200, after))

    def test_keys_that_name_no_file_of_a_request(self) -> None:
        """A file outside a request's folder, or one of unknown size, is refused; other keys pass (LOAD-23)."""
        from localai_dist.errors import InvalidName

        self.failed(self.write("ephemeral/loose", b"1"), InvalidName)

        async def unsized() -> None:
            async with self.requests.writing(parse_key("ephemeral/r/a"), PutRequest()):
                raise AssertionError("taken")

        self.failed(unsized(), InvalidName)
        for bad in ("", "..", "a/b"):
            self.failed(self.requests.release(bad), InvalidName)
        self.run_(self.write("other/loose", b"1"))

    def test_leftovers_are_swept(self) -> None:
        """Nobody released it: after an hour it goes, but not while it is written (LOAD-23)."""
        self.run_(self.write("ephemeral/r1/inputs/a", b"x"))
        self.later(LEFT_OVER - 1)
        self.assertTrue(self.left(self.staging))

        async def sweep_while_written() -> None:
            async with self.requests.writing(parse_key("ephemeral/r1/inputs/b"), PutRequest(None, None, 3)):
                self.now += LEFT_OVER + 1
                await self.sweeper.sweep()

        self.run_(sweep_while_written())
        self.assertTrue(self.left(self.staging))
        self.sweep()
        self.assertEqual(self.left(self.staging), [])
        self.failed(self.write("ephemeral/r1/inputs/late", b"1"), RequestOver)

    def test_a_request_that_is_asked_about_goes_on(self) -> None:
        """A request that waits for its turn keeps its file while its frontend asks about it now and then (LOAD-23)."""
        self.run_(self.write("ephemeral/r1/inputs/a", b"x"))
        for _ in range(5):
            self.later(LEFT_OVER - 1)
            self.requests.saw(parse_key("ephemeral/r1/inputs/a"))
        self.requests.saw(parse_key("ephemeral"))
        self.requests.saw(parse_key("models/m/f"))
        self.assertTrue(self.left(self.staging))
        self.later(LEFT_OVER + 1)
        self.assertEqual(self.left(self.staging), [])

    def test_room_that_nobody_used_is_given_back(self) -> None:
        """What was reserved for a file whose sender died before the first byte is free after an hour (LOAD-23)."""
        requests = self.fresh(limit=100)

        async def dying() -> None:
            async with requests.writing(parse_key("ephemeral/r1/inputs/a"), PutRequest(None, None, 90)):
                pass

        self.run_(dying())
        self.failed(self.write("ephemeral/r2/inputs/a", b"x" * 20, requests), NoRoom)
        self.now += LEFT_OVER + 1
        self.assertEqual(self.run_(requests.sweep()), [])
        self.run_(self.write("ephemeral/r2/inputs/a", b"x" * 20, requests))

    def test_the_floor_counts_files_on_their_way(self) -> None:
        """Two files that arrive at once do not both take the disk's last free bytes (LOAD-23)."""
        free = shutil.disk_usage(self.root).free
        requests = RequestFiles(
            self.areas,
            offload=self.steps,
            now=lambda: self.now,
            limits=RequestLimits(limit=10 * free, floor=free // 4),
        )
        half, done = free // 2, Deferred[None]()

        async def slowly() -> None:
            async with requests.writing(parse_key("ephemeral/r1/inputs/a"), PutRequest(None, None, half)):
                await done

        going = Deferred.fromCoroutine(slowly())
        self.failed(self.reserve(requests, "ephemeral/r2/inputs/a", half), NoRoom)
        done.callback(None)
        self.successResultOf(going)
        self.run_(self.reserve(requests, "ephemeral/r2/inputs/a", half))

    async def reserve(self, requests: RequestFiles, key: str, size: int) -> None:
        async with requests.writing(parse_key(key), PutRequest(None, None, size)):
            pass

    def later(self, seconds: float) -> None:
        """So much later there is a round."""
        self.now += seconds
        self.sweep()

    def test_the_newest_file_keeps_the_request(self) -> None:
        """A request whose last file came a moment ago is not left over (LOAD-23)."""
        self.run_(self.write("ephemeral/r1/inputs/deep/a", b"x"))
        self.now += LEFT_OVER + 1
        self.age(self.staging, LEFT_OVER + 1)
        os.utime(self.staging / "ephemeral/r1/inputs/deep/a", (self.now - 5,) * 2)
        self.sweep()
        self.assertTrue(self.left(self.staging))

    def test_links_are_never_followed(self) -> None:
        """A link in place of a request's folder, in one, or in place of all of them costs nothing outside (LOAD-23)."""
        outside = self.root / "outside"
        outside.mkdir()
        (outside / "precious").write_bytes(b"x")
        ephemeral = self.staging / "ephemeral"
        (ephemeral / "r1").mkdir(parents=True)
        (ephemeral / "r1" / "link").symlink_to(outside)
        (ephemeral / "r2").symlink_to(outside)
        self.age(self.staging, LEFT_OVER + 1)
        self.age(outside, LEFT_OVER + 1)
        self.sweep()
        self.run_(self.requests.release("r2"))
        self.assertEqual((self.left(outside), (ephemeral / "r1").exists()), (["precious"], False))
        shutil.rmtree(ephemeral)
        ephemeral.symlink_to(outside)
        self.run_(self.fresh().sweep())
        self.run_(self.fresh().release("precious"))
        self.assertEqual(self.left(outside), ["precious"])
