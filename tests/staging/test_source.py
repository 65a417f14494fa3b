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
from localai_dist.units import MiB


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
        self.assertEqual([file.relative for file in found.files], ["repo/a/ü.bin", "repo/b.bin"])

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


class WhatIsStagedTests(ModelsCase):
    """LOAD-13 and LOAD-14 on the frontend's disk."""

    def listed(self, *relatives: str, hints: tuple[str, ...] = ()) -> list[str]:
        return [file.relative for file in list_sources(self.models, "tiny", relatives, hints).files]

    def test_a_nested_folder_with_empty_files(self) -> None:
        """
        A model that is a folder brings every file at every depth: empty ones, odd names, but no hash file (LOAD-13).
        """
        names = ["repo/a b/ü ß.bin", "repo/empty", "repo/x/y/z/deep.json", "repo/x/lone.sha256"]
        for name in names:
            self.put(name, b"" if name.endswith("empty") else b"x")
        for sidecar in ("repo/empty.sha256", "repo/x/y/z/deep.json.sha256.target"):
            self.put(sidecar)
        found = list_sources(self.models, "tiny", ["repo"])
        self.assertEqual([file.relative for file in found.files], sorted(names))
        self.assertEqual([file.size for file in found.files], [1, 0, 1, 1])
        self.assertEqual([file.key for file in found.files], [f"models/tiny/{name}" for name in sorted(names)])

    def test_an_empty_folder_is_no_model(self) -> None:
        """
        A model folder without a file in it is an error that says so (LOAD-13).
        """
        (self.models / "repo" / "sub").mkdir(parents=True)
        error = self.assertRaises(SourceMissing, list_sources, self.models, "tiny", ["repo"])
        self.assertIn("repo has no file in it", str(error))

    def test_a_voice_brings_its_description(self) -> None:
        """
        ``x.onnx.json`` goes with ``x.onnx`` when it is there, and is not missed when it is not (LOAD-13).
        """
        for name in ("voice.onnx", "voice.onnx.json", "other.onnx"):
            self.put(name)
        self.assertEqual(self.listed("voice.onnx"), ["voice.onnx", "voice.onnx.json"])
        self.assertEqual(list_sources(self.models, "tiny", ["other.onnx"]).missing, ())

    def test_each_file_once(self) -> None:
        """
        A file that is named twice is sent and counted once (LOAD-13).
        """
        for name in ("repo/a", "repo/b"):
            self.put(name)
        self.assertEqual(self.listed("repo", "repo/b", "repo/b"), ["repo/a", "repo/b"])
        self.assertEqual(list_sources(self.models, "tiny", ["repo", "repo/b"]).missing, ())

    def test_option_paths(self) -> None:
        """
        An option's value that is a path in the models folder is staged: as it is, beside the model, absolute, a whole
        folder; any other value is left alone (LOAD-13).
        """
        for name in ("sub/m.gguf", "vae.safetensors", "sub/clip.gguf", "voices/a", "voices/b"):
            self.put(name)
        hints = ("vae.safetensors", "clip.gguf", str(self.models.resolve() / "voices"), "4", "true", "none.bin", "a\0b")
        self.assertEqual(
            self.listed("sub/m.gguf", hints=hints),
            ["sub/m.gguf", "vae.safetensors", "sub/clip.gguf", "voices/a", "voices/b"],
        )

    def test_an_option_never_stages_too_much(self) -> None:
        """
        A value that names the models folder itself, something above it or outside it is no model file (LOAD-14).
        """
        self.put("m.gguf")
        self.put("other.gguf")
        outside = Path(self.mktemp()).resolve()
        outside.write_bytes(b"secret")
        (self.models / "link").symlink_to(outside)
        hints = (
            ".",
            "./",
            "",
            "..",
            "sub/..",
            str(outside),
            "/",
            "/etc/passwd",
            f"../{outside.name}",
            "link",
            "x" * 5000,
        )
        self.assertEqual(self.listed("m.gguf", hints=hints), ["m.gguf"])

    def test_an_option_folder_that_leads_out_is_named(self) -> None:
        """
        A folder named by an option that holds a link out of the models folder costs a warning, not the load (LOAD-14).
        """
        self.put("m.gguf")
        outside = Path(self.mktemp()).resolve()
        outside.write_bytes(b"secret")
        self.put("voices/a")
        (self.models / "voices" / "evil").symlink_to(outside)
        found = list_sources(self.models, "tiny", ["m.gguf"], ["voices"])
        self.assertEqual([file.relative for file in found.files], ["m.gguf", "voices/a"])
        self.assertEqual(found.missing, ("voices",))

    def test_links_inside_are_followed(self) -> None:
        """
        Links between files and folders of the models folder are content; a circle ends; one to nothing is named
        (LOAD-13, LOAD-14).
        """
        self.put("blobs/1", b"12345")
        self.put("shared/s")
        (self.models / "repo").mkdir()
        (self.models / "repo" / "m.bin").symlink_to("../blobs/1")
        (self.models / "repo" / "sub").symlink_to("../shared")
        (self.models / "repo" / "circle").symlink_to(".")
        (self.models / "repo" / "dead").symlink_to("nowhere")
        found = list_sources(self.models, "tiny", ["repo"])
        self.assertEqual([(file.relative, file.size) for file in found.files], [("repo/m.bin", 5), ("repo/sub/s", 1)])
        self.assertEqual(found.missing, ("repo/dead",))

    def test_escapes_are_refused(self) -> None:
        """
        A sibling folder whose name begins like ours, a folder link out, and a file that is none are refused (LOAD-14).
        """
        evil = self.models.with_name(self.models.name + "-evil").resolve()
        evil.mkdir()
        (evil / "x").write_bytes(b"secret")
        (self.models / "sibling").symlink_to(evil)
        (self.models / "file").symlink_to(evil / "x")
        os.mkfifo(self.models / "pipe")
        for name in ("sibling", "file", "pipe", f"../{evil.name}/x"):
            self.assertRaises(SourceMissing, list_sources, self.models, "tiny", [name])

    def test_what_the_disk_refuses_is_named(self) -> None:
        """
        A name no file system takes is an error that names it.
        """
        self.assertIn("too long", str(self.assertRaises(SourceMissing, self.listed, "x" * 300)))


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

    def test_each_slice_is_progress(self) -> None:
        """
        Each MiB that is hashed is a sign of life of its load, not the file at its end (LOAD-3).
        """
        path = self.put("m.gguf", b"")
        os.truncate(path, 20 * MiB + 5)
        self.assertEqual(self.digest(Digests(at_once), path)[1], [MiB] * 20 + [5])

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
