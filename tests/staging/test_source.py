"""The files of a model on the frontend's disk."""

import hashlib
import os
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.staging.digests import Digests
from localai_dist.staging.errors import SourceMissing
from localai_dist.staging.source import list_sources


def at_once(call: Any, *arguments: Any) -> Deferred[Any]:
    """``InThread`` without a thread."""
    return maybeDeferred(call, *arguments)


class ModelsCase(SynchronousTestCase):
    """A models folder."""

    def setUp(self) -> None:
        self.models = Path(self.mktemp())
        self.models.mkdir()

    def put(self, relative: str, content: bytes = b"x") -> Path:
        path = self.models / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path


class SourceTests(ModelsCase):
    def test_files_and_keys(self) -> None:
        """
        The weights and what belongs to them, each with its size and its name on the worker (LOAD-13).
        """
        self.put("m.gguf", b"12345")
        self.put("sub/mm proj.gguf", b"")
        found = list_sources(self.models, "tiny", ["m.gguf", "sub/mm proj.gguf"])
        self.assertEqual(
            [(file.relative, file.size, file.key) for file in found.files],
            [("m.gguf", 5, "models/tiny/m.gguf"), ("sub/mm proj.gguf", 0, "models/tiny/sub/mm proj.gguf")],
        )

    def test_a_missing_companion_is_named_and_left_out(self) -> None:
        """
        An optional file that is not there does not keep the model from loading (LOAD-13).
        """
        self.put("m.gguf")
        self.assertEqual(list_sources(self.models, "tiny", ["m.gguf", "proj.gguf"]).missing, ("proj.gguf",))

    def test_missing_weights_are_an_error_that_says_where(self) -> None:
        """
        Without the weights the error names the file and this frontend's folder.
        """
        error = self.assertRaises(SourceMissing, list_sources, self.models, "tiny", ["m.gguf"])
        self.assertIn("m.gguf", str(error))
        self.assertIn(str(self.models), str(error))

    def test_a_directory_is_walked(self) -> None:
        """
        A model that is a folder is staged with everything in it but hash files (LOAD-13).
        """
        for name in ("repo/b.bin", "repo/a/ü.bin", "repo/b.bin.sha256"):
            self.put(name)
        found = list_sources(self.models, "tiny", ["repo"])
        self.assertEqual([file.relative for file in found.files], ["repo/b.bin", "repo/a/ü.bin"])

    def test_a_link_out_of_the_folder_is_refused(self) -> None:
        """
        No file outside the models folder is ever sent, whatever links lie in it (LOAD-14).
        """
        outside = Path(self.mktemp())
        outside.write_bytes(b"secret")
        (self.models / "m.gguf").symlink_to(outside.resolve())
        self.assertRaises(SourceMissing, list_sources, self.models, "tiny", ["m.gguf"])

    def test_a_models_folder_reached_through_a_link_is_fine(self) -> None:
        """
        A models folder that is itself a link serves its files (LOAD-14).
        """
        self.put("m.gguf")
        link = Path(self.mktemp())
        link.symlink_to(self.models.resolve())
        self.assertEqual(len(list_sources(link, "tiny", ["m.gguf"]).files), 1)


class DigestTests(ModelsCase):
    def digest(self, digests: Digests, path: Path) -> tuple[str, list[int]]:
        slices: list[int] = []
        found: str = self.successResultOf(Deferred.fromCoroutine(digests.of(path, slices.append)))
        return found, slices

    def test_hashed_once(self) -> None:
        """
        A file is hashed once, and again only after it changed.
        """
        path = self.put("m.gguf", b"abc")
        digests = Digests(at_once)
        expected = hashlib.sha256(b"abc").hexdigest()
        self.assertEqual(self.digest(digests, path), (expected, [3]))
        self.assertEqual(self.digest(digests, path), (expected, []))
        path.write_bytes(b"abcd")
        self.assertEqual(self.digest(digests, path), (hashlib.sha256(b"abcd").hexdigest(), [4]))

    def test_remembered_over_a_restart(self) -> None:
        """
        A restarted frontend does not read 600 GB again.
        """
        path = self.put("m.gguf", b"abc")
        expected, _ = self.digest(Digests(at_once), path)
        self.assertEqual(self.digest(Digests(at_once), path), (expected, []))

    def test_a_foreign_hash_file_is_neither_trusted_nor_replaced(self) -> None:
        """
        A hash file that somebody else wrote may be about another file.
        """
        path = self.put("m.gguf", b"abc")
        foreign = self.put("m.gguf.sha256", b"0" * 64 + b"  m.gguf\n")
        found, slices = self.digest(Digests(at_once), path)
        self.assertEqual((found, slices), (hashlib.sha256(b"abc").hexdigest(), [3]))
        self.assertTrue(foreign.read_bytes().startswith(b"0000"))

    def test_a_record_about_other_content_is_not_trusted(self) -> None:
        """
        A file that was exchanged for another of the same size is hashed again.
        """
        path = self.put("m.gguf", b"abc")
        self.digest(Digests(at_once), path)
        path.write_bytes(b"xyz")
        os.utime(path, ns=(1, 1))
        self.assertEqual(self.digest(Digests(at_once), path)[0], hashlib.sha256(b"xyz").hexdigest())

    def test_an_unreadable_file_is_named(self) -> None:
        """
        A file that vanished is an error that names it.
        """
        done = Deferred.fromCoroutine(Digests(at_once).of(self.models / "gone.gguf", lambda _: None))
        self.assertIn("gone.gguf", str(self.failureResultOf(done, SourceMissing).value))
