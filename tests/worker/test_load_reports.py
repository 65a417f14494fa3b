"""What users reported of uploads, at the worker: a lock left behind, partial files, names that lead outside."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from twisted.internet.defer import Deferred

from localai_dist.wire.files import ContentRange, PutRequest, Target
from localai_dist.worker import sweeper
from localai_dist.worker.answers import Incomplete, Partial, Staged
from localai_dist.worker.blocks import BODY_SILENCE, WANTED_SILENCE
from localai_dist.worker.sweeper import RESUMED_WITHIN, STALE
from localai_dist.worker.timing import TooLate
from tests.worker.test_server import ServerCase
from tests.worker.test_sweeper import SweepCase
from tests.worker.test_uploads import FakeBody, UploadCase, digest, payload


class DeadWriterTests(UploadCase):
    """A sender whose way was cut without the worker noticing."""

    def test_the_next_upload_takes_over(self) -> None:
        """
        The sender comes back at once: within seconds it has the key, goes on where the bytes end, and is never told to
        wait for a human; the dead one's late bytes never land (BR-070).
        """
        whole = payload(3000)
        dead = FakeBody(whole[:1000], hang=True)
        request = PutRequest(ContentRange(0, 2999, 3000), digest(whole), 3000)
        before = self.start(self.uploads.put(self.path, request, dead))
        self.assertEqual(self.head(), Partial(0, self.path, Target(digest(whole), 3000)))  # its block is not full yet
        again = self.begin_put(whole, 0, whole)
        self.clock.advance(WANTED_SILENCE)
        self.failureResultOf(before, TooLate)
        self.assertEqual(self.successResultOf(again), Incomplete(1000, wrong_offset=True))  # 416 with the right one
        assert dead.waiting is not None
        dead.data = b"late" * 500
        self.assertTrue(dead.waiting.called)  # it was cancelled: nothing of what comes now is read
        self.assertEqual(self.put(whole[1000:], 1000, whole), Staged(self.path))
        self.assertEqual(self.path.read_bytes(), whole)
        self.assertLess(WANTED_SILENCE, 10)

    def test_a_slow_one_that_nobody_displaces_is_waited_for(self) -> None:
        """A silent upload that nobody waits for keeps its turn for two minutes, and then still has its bytes."""
        whole = payload(2000)
        slow = self.begin_put(whole, 0, whole, sent=whole[:500], hang=True)
        self.clock.pump([WANTED_SILENCE] * int(BODY_SILENCE / WANTED_SILENCE - 1))
        self.assertNoResult(slow)
        self.clock.advance(WANTED_SILENCE)
        self.failureResultOf(slow, TooLate)
        self.assertEqual(self.head(), Partial(500, self.path, Target(digest(whole), len(whole))))


class KeptPartialTests(SweepCase):
    """How long unfinished files are kept, and how much of the disk they may hold."""

    def bounded(self, most: int) -> None:
        self.sweeper = self.sweeper_with(most=most)

    def partial(self, name: str, age: float) -> Path:
        """An unfinished file of 500 bytes whose last one came so long ago."""
        total = payload(1000)
        path = self.models / name / "a.gguf"
        self.put(path, total[:500], total)
        self.age(path.parent, age)
        return path

    def test_one_older_than_a_day_goes(self) -> None:
        """A partial older than the day it is kept for is removed, a younger one stays (BR-095)."""
        old, young = self.partial("old", STALE + 1), self.partial("young", STALE - 1)
        self.sweep()
        self.assertEqual((old.exists(), young.exists()), (False, True))

    def test_all_together_are_bounded(self) -> None:
        """More than the disk's share of them: the oldest go, as many as need be, and whole files never (BR-095)."""
        files = [self.partial(f"m{number}", number * RESUMED_WITHIN + 1) for number in range(1, 6)]
        total = payload(5000)
        self.put(self.models / "whole.gguf", total, total)
        self.age(self.models / "whole.gguf", STALE)
        self.bounded(1200)
        self.sweep()
        self.assertEqual([path.exists() for path in files], [True, True, False, False, False])
        self.assertTrue((self.models / "whole.gguf").exists())
        self.sweep()
        self.assertEqual([path.exists() for path in files], [True, True, False, False, False])

    def test_one_in_use_is_never_removed(self) -> None:
        """However little room: one touched within the hour, one being written, and the newest stay (BR-095)."""
        self.bounded(0)
        newest = self.partial("newest", RESUMED_WITHIN + 1)
        self.sweep()
        self.assertTrue(newest.exists())
        recent, written = self.partial("recent", RESUMED_WITHIN - 1), self.partial("written", RESUMED_WITHIN + 9)
        request = PutRequest(ContentRange(500, 999, 1000), digest(payload(1000)), 500)
        going = Deferred.fromCoroutine(self.uploads.put(written, request, FakeBody(b"", hang=True)))
        self.sweep()
        self.assertEqual([path.exists() for path in (newest, recent, written)], [False, True, True])
        self.clock.pump([WANTED_SILENCE] * 40)
        self.failureResultOf(going, TooLate)

    def test_the_bound_is_half_of_the_disk(self) -> None:
        """Without a number of its own the bound is a share of the disk the models are on."""
        files = [self.partial(f"m{number}", number * RESUMED_WITHIN + 1) for number in range(1, 4)]
        self.sweep()
        self.assertTrue(all(path.exists() for path in files))
        self.patch(sweeper, "SHARE", 0.0)
        self.sweep()
        self.assertEqual([path.exists() for path in files], [True, False, False])


NAMES = (
    "../x",
    "models/../x",
    "models/../../x",
    "/etc/x",
    "models//etc/x",
    "models/a/../../x",
    "%2e%2e/x",
    "models/%2e%2e/%2e%2e/x",
    "models/%2e%2e%2fx",
    "..\\x",
    "models/..\\x",
    "models/a\0b",
    "models/" + "n" * 300,
    "models/../models2/x",
    "models/sibling/x",
    "models/leaf",
    "models/parent/x",
    "models/parent/new/x",
)
"""Names that lead outside or can't be, as a client may send them: raw, and with every character quoted."""


class OutsideTests(ServerCase):
    """A worker's folders, and what lies beside them."""

    def setUp(self) -> None:
        super().setUp()
        models, self.outside = self.folder / "models", self.folder / "outside"
        for folder in (models, self.outside, self.folder / "models2"):
            folder.mkdir()
        (self.outside / "secret").write_bytes(b"secret")
        (models / "sibling").symlink_to(self.folder / "models2")
        (models / "leaf").symlink_to(self.outside / "secret")
        (models / "parent").symlink_to(self.outside)

    async def test_every_name_that_leads_outside_is_refused(self) -> None:
        """
        Climbing, absolute, encoded, backslash, NUL, too long, a sibling's prefix, a link as leaf or as parent: refused
        for sending, fetching and asking, and nothing outside is read or written (BR-100).
        """
        before = self.tree()
        for name in NAMES:
            for sent in {quote(name, safe="/%\\"), quote(name, safe="")}:
                if "%25" in sent:
                    continue  # quoted twice: a plain name with a percent sign in it
                for method, body in (("PUT", b"evil"), ("GET", None), ("HEAD", None)):
                    status, _headers, answer = await self.ask(method, f"/v1/files/{sent}", body)
                    self.assertEqual((status // 100, b"secret" in answer), (4, False), (method, sent, status))
        self.assertEqual(self.tree(), before)

    async def test_an_aliased_folder_is_fine(self) -> None:
        """The same worker with its folder reached through a link, as with a linked TMPDIR, takes a file (BR-100)."""
        alias = self.folder.with_name(self.folder.name + "-alias")
        alias.symlink_to(self.folder)
        self.addCleanup(alias.unlink)
        (self.folder / "models" / "inner").symlink_to(alias / "models" / "real")
        self.assertEqual((await self.ask("PUT", "/v1/files/models/inner/new/x", b"fine"))[0], 200)
        self.assertEqual((self.folder / "models" / "real" / "new" / "x").read_bytes(), b"fine")

    def tree(self) -> list[tuple[str, int, bytes]]:
        """Every file beside the models folder and in it, with its bytes."""
        found = []
        for parent, _folders, names in os.walk(self.folder):
            for path in (Path(parent, name) for name in names):
                found.append((str(path), path.stat().st_mtime_ns, path.read_bytes()))
        return sorted(found)
