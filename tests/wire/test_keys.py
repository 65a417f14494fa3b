"""Staging keys: what names a file on a worker, and what is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import MAX_FILE_NAME_BYTES, MAX_PART_BYTES, MAX_PATH_BYTES, MAX_PATH_PARTS
from localai_dist.wire.keys import (
    Area,
    InvalidKey,
    StagingKey,
    ephemeral_folder,
    ephemeral_key,
    is_sidecar,
    model_folder,
    parse_key,
    parse_prefix,
    staging_key,
)

REFUSED = [
    "",
    "/",
    "/etc/passwd",
    "models",
    "models/",
    "models//x",
    "models/../x",
    "models/a/../../b",
    "models/./x",
    "..",
    "a/..",
    "models/a\\b",
    "models/a\nb",
    "models/a\x00b",
    "models/a\x7fb",
    "data",
    "models/\udcff",
]


class KeyTests(SynchronousTestCase):
    def test_areas(self) -> None:
        """The first part of a key chooses the folder it lives in."""
        self.assertEqual(parse_key("models/m/a/b.gguf"), StagingKey(Area.MODELS, ("m", "a", "b.gguf")))
        self.assertEqual(parse_key("data/x"), StagingKey(Area.DATA, ("x",)))
        self.assertEqual(parse_key("ephemeral/1/in.png"), StagingKey(Area.STAGING, ("ephemeral", "1", "in.png")))

    def test_refused(self) -> None:
        """A key that is absolute, empty, climbs, or has control characters is refused."""
        for text in REFUSED:
            with self.assertRaises(InvalidKey, msg=repr(text)):
                parse_key(text)

    def test_too_long(self) -> None:
        """A key, or a part of one, longer or deeper than can be stored is refused; a folder's name may be longer."""
        parse_key("models/" + "d" * MAX_PART_BYTES + "/" + "a" * MAX_FILE_NAME_BYTES)
        model_folder("a" * MAX_PART_BYTES)
        parse_prefix("models/" + "a" * MAX_PART_BYTES)
        ephemeral_folder("a" * MAX_PART_BYTES)
        parse_key("models/" + "d/" * (MAX_PATH_PARTS - 2) + "f")
        for bad in (
            "models/" + "d" * (MAX_PART_BYTES + 1) + "/f",
            "models/" + "a" * (MAX_FILE_NAME_BYTES + 1),
            "models/" + "a/" * (MAX_PATH_BYTES // 2) + "b",
            "models/" + "d/" * (MAX_PATH_PARTS - 1) + "f",
        ):
            with self.assertRaises(InvalidKey):
                parse_key(bad)
        with self.assertRaises(InvalidKey):
            model_folder("a" * (MAX_PART_BYTES + 1))

    def test_staging_key(self) -> None:
        """A model's file is named models/<model>/<path>; neither part may climb out."""
        self.assertEqual(staging_key("tiny", "shards/1.gguf"), "models/tiny/shards/1.gguf")
        for model, relative in [("", "x"), ("m", ""), ("..", "x"), ("m", "../x"), ("m", "/x")]:
            with self.assertRaises(InvalidKey):
                staging_key(model, relative)

    def test_no_models_folder_is_inside_anothers(self) -> None:
        """
        A name with a / in it is one folder, so what goes with one model is never another's, whatever their names.
        """
        self.assertEqual(staging_key("org/tiny", "1.gguf"), "models/org%2Ftiny/1.gguf")
        self.assertEqual(model_folder("org/tiny"), StagingKey(Area.MODELS, ("org%2Ftiny",)))
        self.assertNotEqual(model_folder("org/tiny"), model_folder("org%2Ftiny"))
        self.assertNotEqual(staging_key("org", "tiny/1.gguf"), staging_key("org/tiny", "1.gguf"))
        for bad in ("org/../tiny", "org//tiny", "/" * 90, "a/" * 80 + "b"):
            with self.assertRaises(InvalidKey):
                staging_key(bad, "1.gguf")

    def test_prefix(self) -> None:
        """A listing may name a whole area, a file's key may not."""
        self.assertEqual(parse_prefix("models/"), StagingKey(Area.MODELS, ()))
        self.assertEqual(parse_prefix("models/m"), StagingKey(Area.MODELS, ("m",)))
        with self.assertRaises(InvalidKey):
            parse_prefix("..")

    def test_model_folder(self) -> None:
        """A model's folder is never the models folder itself."""
        self.assertEqual(model_folder("m").relative, "m")
        for name in ("", ".", "..", "a/../.."):
            with self.assertRaises(InvalidKey):
                model_folder(name)

    def test_files_of_requests(self) -> None:
        """
        A request's files have a folder of their own; an id or name that is no single path part is refused (LOAD-23).
        """
        self.assertEqual(ephemeral_key("r-1", "ü 1.png"), "ephemeral/r-1/inputs/ü 1.png")
        self.assertEqual(parse_key("ephemeral/r-1/inputs/a").area, Area.STAGING)
        for bad in ("", ".", "..", "a/b", "/a", "a\0"):
            with self.assertRaises(InvalidKey, msg=repr(bad)):
                ephemeral_folder(bad)
            with self.assertRaises(InvalidKey, msg=repr(bad)):
                ephemeral_key("r", bad)

    def test_sidecars(self) -> None:
        """The hash files beside staged files are recognised by their names."""
        self.assertEqual([is_sidecar(name) for name in ("a.sha256", "a.sha256.target", "a.gguf")], [True, True, False])

    @given(st.text(max_size=40))
    def test_parse_never_climbs(self, text: str) -> None:
        """Whatever the text, a parsed key stays below its folder and prints back to what was parsed."""
        try:
            key = parse_key(text)
        except InvalidKey:
            return
        self.assertNotIn("..", key.parts)
        self.assertEqual(str(key), text)
        self.assertEqual(parse_key(str(key)), key)
