"""Paths that stay inside their folder, and the node's identity file."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.errors import InvalidName, UserMistake
from localai_dist.ids import NodeId
from localai_dist.wire.keys import parse_key
from localai_dist.worker.containment import Areas, folder_name, resolve_inside
from localai_dist.worker.errors import EscapesRoot
from localai_dist.worker.identity import Identity, IdentityFile


class ContainmentTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(os.path.realpath(self.mktemp()))
        self.root = self.folder / "models"
        (self.root / "m").mkdir(parents=True)
        (self.folder / "models-evil").mkdir()

    def test_inside(self) -> None:
        """A path below the folder is fine, there or not, also through a link to the folder itself (LOAD-14)."""
        self.assertEqual(resolve_inside(self.root, "m/new/file"), self.root / "m/new/file")
        alias = self.folder / "alias"
        alias.symlink_to(self.root)
        self.assertEqual(resolve_inside(alias, "m/missing"), self.root / "m/missing")
        (self.root / "inner").symlink_to(self.root / "m")
        self.assertEqual(resolve_inside(self.root, "inner/x"), self.root / "m/x")
        self.assertEqual(resolve_inside(self.folder / "not yet", "x"), self.folder / "not yet/x")

    def test_escaping(self) -> None:
        """A link out of the folder, to a sibling or anywhere, is refused, missing parts behind it or not (LOAD-14)."""
        (self.root / "out").symlink_to(self.folder / "models-evil")
        (self.root / "up").symlink_to("..")
        (self.root / "dangling").symlink_to("/nowhere/at/all")
        for relative in ("out", "out/x", "up/models-evil/x", "dangling", "dangling/x", "../models-evil", "/etc/passwd"):
            with self.assertRaises(EscapesRoot, msg=relative):
                resolve_inside(self.root, relative)

    def test_areas(self) -> None:
        """Each area has its own folder, and none reaches the node's identity (LOAD-14)."""
        areas = Areas(models=self.root, data=self.folder / "d" / "files", staging=self.folder / "s")
        self.assertEqual(areas.path(parse_key("models/m/x")), self.root / "m/x")
        self.assertEqual(areas.path(parse_key("data/node.json")), self.folder / "d/files/node.json")
        self.assertEqual(areas.path(parse_key("y")), self.folder / "s/y")

    def test_folder_names(self) -> None:
        """A backend's name is one plain folder name."""
        self.assertEqual(folder_name("llama-cpp.v1+x"), "llama-cpp.v1+x")
        for name in ("", ".", "..", ".hidden", "a/b", "a\0", "-x", "a" * 200):
            with self.assertRaises(InvalidName, msg=repr(name)):
                folder_name(name)


class IdentityTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()) / "data"
        self.file = IdentityFile(self.folder)

    def test_round_trip(self) -> None:
        """The identity survives a restart, in a file only its owner can read (WALK-23)."""
        self.assertIsNone(self.file.load())
        identity = Identity(NodeId("node-1"), "secret")
        for mask in (0o000, 0o077):
            previous = os.umask(mask)
            try:
                self.file.save(identity)
            finally:
                os.umask(previous)
            self.assertEqual(self.file.path.stat().st_mode & 0o777, 0o600)
        self.assertEqual(self.file.load(), identity)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["node.json"])

    def test_token_is_not_shown(self) -> None:
        """An identity that is logged does not show its token (WALK-23)."""
        self.assertNotIn("secret", repr(Identity(NodeId("n"), "secret")))

    def test_damaged(self) -> None:
        """A damaged file is an error that says what to do, and is left as it is."""
        self.folder.mkdir(parents=True)
        for content in (b"", b"{}", b'{"node_id":"a b","node_token":"t"}', b"\xff"):
            self.file.path.write_bytes(content)
            with self.assertRaises(UserMistake) as caught:
                self.file.load()
            self.assertIn("node.json", str(caught.exception))
            self.assertEqual(self.file.path.read_bytes(), content)

    def test_the_identity_belongs_to_a_name(self) -> None:
        """A node started under another name on the same data folder is refused, with both names and the remedies."""
        identity = Identity(NodeId("node-1"), "secret")
        IdentityFile(self.folder, "gpu-1").save(identity)
        self.assertEqual(IdentityFile(self.folder, "gpu-1").load(), identity)
        before = self.file.path.read_bytes()
        refused = str(self.assertRaises(UserMistake, IdentityFile(self.folder, "gpu-2").load))
        for word in ("'gpu-1'", "'gpu-2'", "LOCALAI_NODE_NAME=gpu-1", "LOCALAI_DATA_PATH", "remove the file"):
            self.assertIn(word, refused)
        self.assertNotIn("secret", refused)
        self.assertEqual(self.file.path.read_bytes(), before)

    def test_a_file_without_a_name_is_adopted(self) -> None:
        """An identity kept by an earlier version takes the name of the node that finds it."""
        self.folder.mkdir(parents=True)
        self.file.path.write_text('{"node_id":"node-1","node_token":"t"}')
        self.assertEqual(IdentityFile(self.folder, "gpu-1").load(), Identity(NodeId("node-1"), "t"))
        self.assertRaises(UserMistake, IdentityFile(self.folder, "gpu-2").load)

    def test_unwritable(self) -> None:
        """A folder that can't be written is named."""
        self.folder.parent.mkdir(parents=True)
        self.folder.write_text("not a folder")
        with self.assertRaises(UserMistake):
            self.file.save(Identity(NodeId("n"), "t"))
