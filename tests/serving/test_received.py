"""Files that came with requests, on this frontend's disk."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.serving import received
from localai_dist.serving.errors import DiskFull
from localai_dist.serving.received import ReceivedFile, ReceivedFiles


class Threads:
    """Runs calls when told to, as a pool that is busy does."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Deferred[Any], Any, tuple[Any, ...]]] = []

    def __call__(self, call: Any, *arguments: Any) -> Deferred[Any]:
        done: Deferred[Any] = Deferred()
        self.waiting.append((done, call, arguments))
        return done

    def run(self) -> None:
        """All that waits, in order."""
        waiting, self.waiting = self.waiting, []
        for done, call, arguments in waiting:
            maybeDeferred(call, *arguments).chainDeferred(done)


class ReceivedTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute() / "received"
        self.files = ReceivedFiles(self.folder, in_thread=maybeDeferred)
        self.addCleanup(self.files.close)

    def left(self) -> list[str]:
        return [str(path) for path in self.folder.rglob("*")]

    def done(self, work: Any) -> None:
        self.successResultOf(Deferred.fromCoroutine(work))

    def test_a_files_life(self) -> None:
        """
        What a client sends is on the disk whole, for this user's eyes alone, and gone with its request (LOAD-23).
        """
        file = self.files.new(".wav")
        for piece in (b"one", b"two" * received.AT_ONCE, b"three"):
            self.done(file.write(piece))
        self.done(file.close())
        whole = b"one" + b"two" * received.AT_ONCE + b"three"
        self.assertEqual((file.path.read_bytes(), file.size, file.path.suffix), (whole, len(whole), ".wav"))
        self.assertEqual(stat.S_IMODE(file.path.stat().st_mode), 0o600)
        self.assertEqual({stat.S_IMODE(path.stat().st_mode) for path in (self.folder, file.path.parent)}, {0o700})
        file.path.with_name(file.path.name + ".sha256").write_text("what staging leaves beside it")
        self.successResultOf(file.remove())
        self.assertEqual(self.left(), [])

    def test_memory_is_bounded(self) -> None:
        """
        No more than a MiB waits in memory: the writer waits for the disk beyond that (LOAD-23).
        """
        threads = Threads()
        file = ReceivedFiles(self.folder, in_thread=threads).new("")
        self.done(file.write(b"x" * (received.AT_ONCE - 1)))
        writing = Deferred.fromCoroutine(file.write(b"x"))
        self.assertNoResult(writing)
        threads.run()
        self.successResultOf(writing)
        file.remove()
        threads.run()
        self.assertEqual(self.left(), [])

    def test_removed_in_the_middle(self) -> None:
        """
        A client that leaves while its bytes are on the way to the disk leaves nothing there (LOAD-23).
        """
        threads = Threads()
        file = ReceivedFiles(self.folder, in_thread=threads).new("")
        writing = Deferred.fromCoroutine(file.write(b"x" * received.AT_ONCE))
        writing.addErrback(lambda _: None)
        writing.cancel()
        removing = file.remove()
        threads.waiting.reverse()  # the removal overtakes the write
        threads.run()
        self.successResultOf(removing)
        self.assertEqual(self.left(), [])

    def test_a_full_disk(self) -> None:
        """
        A disk without room is said in words, any other trouble is not taken for that, and nothing stays (LOAD-23).
        """
        for number, kind in ((errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, OSError)):
            file = self.files.new("")
            with mock.patch.object(ReceivedFile, "_append", side_effect=OSError(number, os.strerror(number))):
                self.failureResultOf(Deferred.fromCoroutine(file.close()), kind)
            self.successResultOf(file.remove())
        self.assertEqual(self.left(), [])

    def test_a_disk_without_room_for_another_name(self) -> None:
        """
        No folder, or no file in it, can be made: said in the same words, and the folder does not stay (LOAD-23).
        """
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for call in ("tempfile.mkdtemp", "os.open"):
            with mock.patch(f"localai_dist.serving.received.{call}", side_effect=full):
                self.assertRaises(DiskFull, self.files.new, "")
        self.assertEqual(self.left(), [])
        with mock.patch("localai_dist.serving.received.os.open", side_effect=OSError(errno.EIO, "broken")):
            self.assertRaises(OSError, self.files.new, "")
        self.assertEqual(self.left(), [])

    def test_leftovers_go_at_the_start(self) -> None:
        """
        What a killed frontend left is gone at its next start; a link costs nothing that it leads to (LOAD-23).
        """
        self.assertEqual(self.files.sweep(), 0)
        outside = self.folder.parent / "outside"
        (outside / "deep").mkdir(parents=True)
        (outside / "deep" / "precious").write_text("kept")
        left = [self.files.new(".wav"), self.files.new(".mp3")]
        for file in left:
            self.done(file.close())
        (left[0].path.parent / "link").symlink_to(outside)
        (self.folder / "link").symlink_to(outside)
        (self.folder / "file").write_text("")
        self.assertEqual(self.files.sweep(), 4)
        self.assertEqual(self.left(), [])
        self.assertTrue((outside / "deep" / "precious").exists())
        self.folder.rmdir()
        self.folder.symlink_to(outside)
        self.assertEqual(self.files.sweep(), 0)
        self.assertTrue((outside / "deep" / "precious").exists())

    def test_another_frontends_files_are_left_alone(self) -> None:
        """
        Of two frontends that were given one folder by mistake neither sweeps the other's files; one that is gone has
        none (LOAD-23).
        """
        self.files.sweep()
        file = self.files.new(".wav")
        self.done(file.close())
        other = ReceivedFiles(self.folder, in_thread=maybeDeferred)
        self.addCleanup(other.close)
        self.assertEqual(other.sweep(), 0)
        self.assertTrue(file.path.exists())
        self.files.close()  # as the kernel does it for a killed one
        self.assertEqual(other.sweep(), 1)
        self.assertEqual(self.left(), [])
