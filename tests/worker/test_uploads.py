"""Staged files: resumable, hashed as they arrive, one writer per key."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.units import MiB
from localai_dist.wire.files import ContentRange, PutRequest, Target
from localai_dist.worker import sums
from localai_dist.worker.answers import (
    Absent,
    Conflict,
    Incomplete,
    Partial,
    Staged,
    Unusable,
    Verifying,
    Whole,
)
from localai_dist.worker.blocks import BLOCK_BYTES, BODY_SILENCE, WANTED_SILENCE, Blocks
from localai_dist.worker.timing import TooLate
from localai_dist.worker.uploads import Uploads


class FakeBody:
    """A body that arrives as it is asked for, in chunks, then ends, breaks off, or goes silent."""

    def __init__(
        self, data: bytes, *, chunk: int = 100_000, error: Exception | None = None, hang: bool = False
    ) -> None:
        self.data, self.chunk, self.error, self.hang = data, chunk, error, hang
        self.received = 0
        self.here: list[bytes] = []
        self.waiting: Deferred[None] | None = None

    async def gather(self, count: int) -> list[bytes]:
        """``count`` bytes or more, less at the end."""
        while self.data and sum(map(len, self.here)) < count:
            self.arrive(self.chunk)
        if count and self.hang and sum(map(len, self.here)) < count:
            self.waiting = Deferred()
            await self.waiting
        if count and not self.here and self.error is not None:
            raise self.error
        taken, self.here = self.here, []
        return taken

    def arrive(self, size: int) -> None:
        """The next bytes come."""
        self.here.append(self.data[:size])
        self.received += len(self.here[-1])
        self.data = self.data[size:]


class Steps:
    """An offload whose work waits until the test lets it go; ``free`` runs it at once."""

    def __init__(self) -> None:
        self.free = True
        self.queue: list[tuple[Deferred[Any], Any]] = []

    async def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run it, or wait for the test."""
        if not self.free:
            turn: Deferred[None] = Deferred()
            self.queue.append((turn, function))
            await turn
        return function(*args, **kwargs)

    def run(self, *, only: str = "", limit: int = 10_000) -> None:
        """Let queued work go, the oldest first, as long as its name fits."""
        while limit and self.queue and only in getattr(self.queue[0][1], "__qualname__", ""):
            limit -= 1
            self.queue.pop(0)[0].callback(None)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def payload(size: int) -> bytes:
    return hashlib.shake_128(str(size).encode()).digest(size)


class UploadCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()
        self.path = self.folder / "m" / "file.gguf"
        self.clock = Clock()
        self.steps = Steps()
        self.restart()

    def restart(self) -> None:
        """As after a restart of the worker: nothing is remembered."""
        self.uploads = Uploads(offload=self.steps, clock=self.clock)

    def start(self, coroutine: Any) -> Deferred[Any]:
        return Deferred.fromCoroutine(coroutine)

    def put(self, data: bytes, start: int, total: bytes, **body: Any) -> Any:
        return self.successResultOf(self.begin_put(data, start, total, **body))

    def begin_put(self, data: bytes, start: int, total: bytes, **body: Any) -> Deferred[Any]:
        """PUT ``data``, the piece of ``total`` that begins at ``start``; the body may be shorter (``sent``)."""
        sent = body.pop("sent", data)
        range_ = ContentRange(start, start + len(data) - 1, len(total))
        request = PutRequest(range_, body.pop("sha256", digest(total)), len(data), body.pop("fingerprint", None))
        return self.start(self.uploads.put(self.path, request, FakeBody(sent, **body)))

    def head(self) -> Any:
        return self.successResultOf(self.start(self.uploads.head(self.path)))

    def beside(self) -> list[str]:
        return sorted(path.name for path in self.path.parent.iterdir())


class PieceTests(UploadCase):
    def test_in_pieces(self) -> None:
        """A file sent in pieces is byte-identical on the worker, verified, with its hash beside it (WALK-10)."""
        whole = payload(3 * MiB + 17)
        self.assertEqual(self.head(), Absent())
        self.assertEqual(self.put(whole[:MiB], 0, whole), Incomplete(MiB))
        self.assertEqual(self.head(), Partial(MiB, self.path, Target(digest(whole), len(whole))))
        self.assertEqual(self.put(whole[MiB : 2 * MiB], MiB, whole), Incomplete(2 * MiB))
        self.assertEqual(self.put(whole[2 * MiB :], 2 * MiB, whole), Staged(self.path))
        self.assertEqual(self.path.read_bytes(), whole)
        self.assertEqual(self.head(), Whole(len(whole), self.path, digest(whole)))
        self.assertEqual(self.beside(), ["file.gguf", "file.gguf.sha256"])

    def test_begun_under_a_fingerprint(self) -> None:
        """
        A file begun before its hash was known ends under its hash, and after a crash it is checked by that (LOAD-11).
        """
        whole, mark = payload(3 * MiB), digest(b"fingerprint")
        self.assertEqual(self.put(whole[:MiB], 0, whole, sha256=mark), Incomplete(MiB))
        self.assertEqual(self.head(), Partial(MiB, self.path, Target(mark, len(whole))))
        again = self.put(whole[MiB : 2 * MiB], MiB, whole, fingerprint=mark)
        self.assertEqual(again, Incomplete(2 * MiB))
        self.assertEqual(self.head(), Partial(2 * MiB, self.path, Target(digest(whole), len(whole))))
        with self.path.open("ab") as file:
            file.write(whole[2 * MiB :])
        self.restart()
        self.assertEqual(self.head(), Whole(len(whole), self.path, digest(whole)))

    def test_its_way_to_the_disk_begins_at_once(self) -> None:
        """The disk begins with each 16 MiB as they are complete, so that the last flush of a large file is short."""
        begun: list[tuple[int, int]] = []
        self.patch(os, "posix_fadvise", lambda _, start, length, advice: begun.append((start, length)))
        whole = payload(40 * MiB)
        self.assertEqual(self.put(whole, 0, whole), Staged(self.path))
        self.assertEqual(begun, [(0, 16 * MiB), (16 * MiB, 16 * MiB)])

    def test_no_second_pass(self) -> None:
        """A file that arrives in one go is hashed as it arrives and never read again."""
        reads: list[int] = []
        self.patch(sums.RunningHash, "follow", lambda *_: reads.append(1))
        whole = payload(2 * MiB + 5)
        self.assertEqual(self.put(whole[:MiB], 0, whole), Incomplete(MiB))
        self.assertEqual(self.put(whole[MiB:], MiB, whole), Staged(self.path))
        self.assertEqual(reads, [])

    def test_cut_in_the_middle(self) -> None:
        """An upload cut in the middle keeps what had arrived, and goes on exactly there (WALK-10)."""
        whole = payload(2 * MiB + 100)
        cut = self.begin_put(whole, 0, whole, sent=whole[: MiB + 70_000], error=ConnectionLost())
        self.failureResultOf(cut, ConnectionLost)
        kept = MiB + 70_000
        self.assertEqual(self.head(), Partial(kept, self.path, Target(digest(whole), len(whole))))
        self.assertEqual(self.put(whole, 0, whole), Incomplete(kept, wrong_offset=True))
        self.assertEqual(self.put(whole[kept:], kept, whole), Staged(self.path))
        self.assertEqual(self.path.read_bytes(), whole)

    def test_resume_after_a_restart(self) -> None:
        """A worker that was restarted goes on with the file, and verifies all of it (WALK-10)."""
        whole = payload(3 * MiB)
        self.put(whole[:MiB], 0, whole)
        self.restart()
        self.assertEqual(self.head(), Partial(MiB, self.path, Target(digest(whole), len(whole))))
        self.assertEqual(self.put(whole[MiB:], MiB, whole), Staged(self.path))
        self.assertEqual(self.path.read_bytes(), whole)

    def test_corruption_on_the_disk_is_found(self) -> None:
        """A beginning that changed on the disk while the worker was down is found by the hash, and thrown away."""
        whole = payload(2 * MiB)
        self.put(whole[:MiB], 0, whole)
        self.path.write_bytes(b"\0" + whole[1:MiB])
        self.restart()
        self.assertIsInstance(self.put(whole[MiB:], MiB, whole), Unusable)
        self.assertEqual(self.head(), Absent())
        self.assertEqual(self.beside(), [])

    def test_wrong_content(self) -> None:
        """Bytes that do not hash to what was said are thrown away."""
        whole = payload(1000)
        answer = self.put(whole, 0, whole, sha256=digest(b"something else"))
        self.assertIsInstance(answer, Unusable)
        self.assertEqual(self.head(), Absent())

    def test_another_file(self) -> None:
        """Going on with another file's beginning is a conflict that wipes it; then it starts again from 0."""
        mine, other = payload(2000), payload(3000)
        self.put(other[:1000], 0, other)
        self.assertIsInstance(self.put(mine[1000:], 1000, mine), Conflict)
        self.assertEqual(self.head(), Absent())
        self.assertEqual(self.put(mine, 0, mine), Staged(self.path))

    def test_another_file_from_the_start(self) -> None:
        """A first piece of another file replaces what was there; whoever has the old one open keeps it."""
        mine, other = payload(2000), payload(3000)
        self.put(other, 0, other)
        with self.path.open("rb") as mapped:
            self.assertEqual(self.put(mine, 0, mine), Staged(self.path))
            self.assertEqual(mapped.read(), other)
        self.assertEqual(self.path.read_bytes(), mine)

    def test_again(self) -> None:
        """A file that is there already is not written a second time."""
        whole = payload(2000)
        self.put(whole, 0, whole)
        inode = self.path.stat().st_ino
        self.assertEqual(self.put(whole, 0, whole), Staged(self.path))
        self.assertEqual(self.path.stat().st_ino, inode)

    def test_short_body(self) -> None:
        """A body that ends too early is refused, and what came is kept for the next piece."""
        whole = payload(2000)
        self.assertIsInstance(self.put(whole, 0, whole, sent=whole[:1500]), Unusable)
        self.assertEqual(self.put(whole[1500:], 1500, whole), Staged(self.path))

    def test_long_body(self) -> None:
        """Bytes beyond the announced piece are not written."""
        whole = payload(2 * MiB)
        self.assertEqual(self.put(whole[:MiB], 0, whole, sent=whole), Incomplete(MiB))
        self.assertEqual(self.path.stat().st_size, MiB)

    def test_silent_body(self) -> None:
        """A client that goes silent loses its turn; what it had sent is kept."""
        whole = payload(2000)
        silent = self.begin_put(whole, 0, whole, sent=whole[:500], hang=True)
        waiting = self.begin_put(whole[500:], 500, whole)
        self.assertNoResult(waiting)
        self.clock.advance(BODY_SILENCE)
        self.failureResultOf(silent, TooLate)
        self.assertEqual(self.successResultOf(waiting), Staged(self.path))

    def test_a_client_that_left_while_waiting_changes_nothing(self) -> None:
        """A request that waited for its turn and whose client is gone by then throws nothing away."""
        whole, other = payload(2000), payload(3000)
        slow = self.begin_put(whole[:1000], 0, whole, sent=whole[:500], hang=True)
        gone = self.begin_put(other, 0, other, sent=b"", error=ConnectionLost())
        self.clock.advance(BODY_SILENCE)
        self.failureResultOf(slow, TooLate)
        self.failureResultOf(gone, ConnectionLost)
        self.assertEqual(self.head(), Partial(500, self.path, Target(digest(whole), len(whole))))

    def test_disk_full(self) -> None:
        """A disk that is full is the answer; what was written stays, and the upload goes on later."""
        whole = payload(4 * MiB)
        writes: list[int] = []
        real = sums.write_at

        def full(descriptor: int, offset: int, block: Sequence[bytes]) -> int:
            writes.append(offset)
            if len(writes) > 1:
                real(descriptor, offset, [block[0][:1000]])
                raise OSError(28, "No space left on device")
            return real(descriptor, offset, block)

        patch = self.patch(sums, "write_at", full)
        failure = self.failureResultOf(self.begin_put(whole, 0, whole), OSError)
        self.assertEqual(failure.value.errno, 28)
        patch.restore()
        kept = self.path.stat().st_size
        self.assertEqual(kept % 100_000, 1000)
        self.assertEqual(self.put(whole[kept:], kept, whole), Staged(self.path))


class VerifyTests(UploadCase):
    def test_verification_tells_how_far_it_is(self) -> None:
        """A file of unknown hash is hashed in steps; HEAD tells how far, and the hash at the end."""
        whole = payload(20 * MiB)
        self.path.parent.mkdir()
        self.path.write_bytes(whole)
        self.steps.free = False
        seen: list[int] = []
        while True:
            asked = self.start(self.uploads.head(self.path))
            answer = None
            for _ in range(8):
                self.steps.run(limit=1)
                self.clock.advance(0.3)
                if asked.called:
                    answer = self.successResultOf(asked)
                    break
            if isinstance(answer, Whole):
                break
            assert isinstance(answer, Verifying), answer
            seen.append(answer.verified)
        self.assertEqual(answer.sha256, digest(whole))
        self.assertTrue(seen and seen == sorted(seen) and seen[-1] <= len(whole))

    def test_small_file_is_answered_at_once(self) -> None:
        """A small file put there by hand is hashed within the HEAD that asks for it."""
        self.path.parent.mkdir()
        self.path.write_bytes(b"hello")
        self.assertEqual(self.head(), Whole(5, self.path, digest(b"hello")))

    def test_every_byte_there_but_never_checked(self) -> None:
        """A file whose last byte came just before a crash is checked by the next HEAD: kept if right, else removed."""
        for content, answer in ((payload(5000), Whole), (payload(5001)[:5000], Absent)):
            sums.begin(self.path, Target(digest(payload(5000)), 5000))
            self.path.write_bytes(content)
            self.restart()
            self.assertIsInstance(self.head(), answer)
            sums.wipe(self.path)

    def test_changed_file(self) -> None:
        """A file that somebody changed is hashed again, even when it kept its size."""
        whole = payload(2000)
        self.put(whole, 0, whole)
        for content in (b"edited", b"EDITED"):
            self.path.write_bytes(content)
            (self.folder / "m" / "file.gguf.sha256").unlink()
            self.assertEqual(self.head(), Whole(6, self.path, digest(content)))

    def test_stale_hash_file(self) -> None:
        """A hash file older than its file is not believed."""
        whole = payload(2000)
        self.put(whole, 0, whole)
        self.path.write_bytes(b"edited")
        later = time.time() + 10
        os.utime(self.path, (later, later))
        self.assertEqual(self.head(), Whole(6, self.path, digest(b"edited")))
        self.assertTrue((self.folder / "m" / "file.gguf.sha256").stat().st_mtime >= later - 1)

    def test_changed_between_pieces(self) -> None:
        """A beginning that somebody changed between two pieces is found, even when it kept its size."""
        whole = payload(2 * MiB)
        self.put(whole[:MiB], 0, whole)
        self.path.write_bytes(b"\0" + whole[1:MiB])
        earlier = time.time() - 10
        os.utime(self.path, (earlier, earlier))
        self.assertIsInstance(self.put(whole[MiB:], MiB, whole), Unusable)

    def test_piece_while_verifying(self) -> None:
        """Pieces that arrive while the beginning is read again are taken, and the whole is verified (WALK-10)."""
        whole = payload(24 * MiB)
        self.put(whole[: 12 * MiB], 0, whole)
        self.restart()
        self.steps.free = False
        putting = self.begin_put(whole[12 * MiB :], 12 * MiB, whole)
        seen: set[int] = set()
        for _ in range(200):
            if putting.called:
                break
            self.steps.run(limit=1)
            entry = self.uploads._entries[self.path]
            if entry.catching_up:
                seen.add(entry.verified)
        self.steps.run()
        self.assertEqual(self.successResultOf(putting), Staged(self.path))
        self.assertTrue(len(seen) > 2)
        self.assertEqual(self.path.read_bytes(), whole)

    def test_unreadable_file(self) -> None:
        """A file that can't be read is an error of the HEAD after, not a wait without end."""
        self.path.parent.mkdir()
        self.path.write_bytes(b"hello")

        def broken(*_: Any) -> None:
            raise OSError(5, "Input/output error")

        self.patch(sums.RunningHash, "follow", broken)
        self.failureResultOf(self.start(self.uploads.head(self.path)), OSError)

    def test_folder(self) -> None:
        """A folder is no file."""
        self.path.mkdir(parents=True)
        self.failureResultOf(self.start(self.uploads.head(self.path)), OSError)


class WholeTests(UploadCase):
    def whole(self, data: bytes, sha256: str | None = None, length: int | None = None, **body: Any) -> Deferred[Any]:
        return self.start(self.uploads.put(self.path, PutRequest(None, sha256, length), FakeBody(data, **body)))

    def test_in_one_go(self) -> None:
        """A file can be sent in one request, with or without its hash and length; an empty one too."""
        for data in (b"", payload(2 * MiB + 3)):
            for sha256, length in ((None, None), (digest(data), len(data))):
                self.assertEqual(self.successResultOf(self.whole(data, sha256, length)), Staged(self.path))
                self.assertEqual(self.head(), Whole(len(data), self.path, digest(data)))

    def test_what_is_wrong_leaves_the_old_one(self) -> None:
        """A request that is wrong or breaks off leaves what was there."""
        self.successResultOf(self.whole(b"old"))
        self.assertIsInstance(self.successResultOf(self.whole(b"new", digest(b"other"))), Unusable)
        self.assertIsInstance(self.successResultOf(self.whole(b"new", None, 5)), Unusable)
        self.failureResultOf(self.whole(b"new", error=ConnectionLost()), ConnectionLost)
        self.assertEqual(self.path.read_bytes(), b"old")
        self.assertEqual(self.beside(), ["file.gguf", "file.gguf.sha256"])


class BlocksTests(SynchronousTestCase):
    def all(self, blocks: Blocks) -> list[bytes]:
        got = []
        while block := self.successResultOf(Deferred.fromCoroutine(blocks.next())):
            got.append(b"".join(block))
        return got

    def test_every_chunking(self) -> None:
        """However a body comes, its blocks are full but the last, by a chunk too long at most, and say the same."""
        data = payload(3 * BLOCK_BYTES + 5)
        for chunk in (BLOCK_BYTES - 1, BLOCK_BYTES, 70_001):
            got = self.all(Blocks([data[:chunk]], FakeBody(data[chunk:], chunk=chunk), None, Clock()))
            for block in got[:-1]:
                self.assertTrue(BLOCK_BYTES <= len(block) < BLOCK_BYTES + chunk)
            self.assertEqual(b"".join(got), data)

    def test_limit(self) -> None:
        """No more than was asked for is taken."""
        self.assertEqual(self.all(Blocks([b"ab"], FakeBody(b"cdef"), 3, Clock())), [b"abc"])
        self.assertEqual(self.all(Blocks([b"ab", b"cd"], FakeBody(b""), 2, Clock())), [b"ab"])
        self.assertEqual(self.all(Blocks([b"ab"], FakeBody(b"", hang=True), 2, Clock())), [b"ab"])

    def test_breaking_off(self) -> None:
        """What came before a break comes first, then the break's cause."""
        blocks = Blocks([b"ab"], FakeBody(b"cd", error=ConnectionLost()), None, Clock())
        self.assertEqual(self.successResultOf(Deferred.fromCoroutine(blocks.next())), [b"ab", b"cd"])
        self.failureResultOf(Deferred.fromCoroutine(blocks.next()), ConnectionLost)

    def test_silence_is_counted_from_the_last_byte(self) -> None:
        """A slow body is no silent one: what it gave is kept when it goes silent, and only then is it given up."""
        clock, body = Clock(), FakeBody(b"", hang=True)
        blocks = Blocks([b"ab"], body, None, clock, lambda: True)
        block = Deferred.fromCoroutine(blocks.next())
        for _ in range(10):
            clock.advance(WANTED_SILENCE - 1)
            body.data = b"c"
            body.arrive(1)
        self.assertNoResult(block)
        clock.pump([WANTED_SILENCE, WANTED_SILENCE])
        chunks = self.successResultOf(block)
        self.assertEqual(b"".join(chunks), b"ab" + 10 * b"c")
        self.failureResultOf(Deferred.fromCoroutine(blocks.next()), TooLate)
