"""Names of things, and their parsers."""

from __future__ import annotations

import shlex

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist import ids
from localai_dist.errors import InvalidName
from localai_dist.ids import (
    MAX_FILE_NAME_BYTES,
    MAX_PART_BYTES,
    MAX_PATH_BYTES,
    MAX_PATH_PARTS,
    NodeNames,
    ProcessKey,
    approval_of,
    file_parts,
    parse_instance_id,
    parse_node_id,
    parse_process_key,
    path_parts,
)


class IdentifierTests(SynchronousTestCase):
    """Node and instance ids."""

    def test_uuids_and_plain_words_pass(self) -> None:
        """A uuid, a short name, and 36 characters are ids."""
        for text in ("5b1f2a0e-9c40-4b6e-8f0e-0a3c6f7a9d11", "n1", "a" * 36, "A.b_c:d-e"):
            self.assertEqual(parse_node_id(text), text)
            self.assertEqual(parse_instance_id(text), text)

    def test_anything_else_is_refused_and_named(self) -> None:
        """Empty, long, spaced, multi-line or odd texts are refused with the kind of name that was wanted."""
        for text in ("", " ", "a b", "a" * 37, "a\n", "-a", "é", "a/b"):
            with self.assertRaisesRegex(InvalidName, "node id"):
                parse_node_id(text)
            with self.assertRaisesRegex(InvalidName, "instance id"):
                parse_instance_id(text)

    @given(st.text())
    def test_an_id_never_has_a_space_or_a_line_break(self, text: str) -> None:
        """What passes can be put into a relay frame as it is."""
        try:
            node = parse_node_id(text)
        except InvalidName:
            return
        self.assertNotRegex(node, r"\s")


class NodeNameTests(SynchronousTestCase):
    """What nodes are called."""

    def test_names_are_learnt_from_whoever_reads_rows(self) -> None:
        """A node that was heard of is called by its name, any other by its id; the name stays."""
        names = NodeNames()
        names.learn("id-1", "worker-1")
        names.learn("id-2", "")
        names.learn("id-1", "another")
        self.assertEqual([names("id-1"), names("id-2")], ["worker-1", "id-2"])
        self.assertEqual([names.with_id("id-1"), names.with_id("id-2")], ["worker-1 (id-1)", "id-2"])

    def test_the_command_that_admits_a_node(self) -> None:
        """The command we tell an operator to run is one command, whatever a node called itself."""
        for name in ("worker-1", "beta/1", "x y", "a; rm -rf ~", "it's", "$(id)", "-h", "--help"):
            words = shlex.split(approval_of(name))
            self.assertEqual((words[:3], words[-1]), (["localai-dist", "nodes", "approve"], name))
            self.assertEqual(words[3:-1], ["--"] if name.startswith("-") else [])
        self.assertEqual(approval_of("beta/1"), "localai-dist nodes approve beta/1")

    def test_names_are_bounded(self) -> None:
        """However many nodes come and go, a bounded number of names is kept, the newest."""
        self.patch(ids, "NAMES_KEPT", 3)
        names = NodeNames()
        for number in range(5):
            names.learn(f"id-{number}", f"worker-{number}")
        self.assertEqual([names(f"id-{number}") for number in range(5)], ["id-0", "id-1", *names_of(2, 3, 4)])


def names_of(*numbers: int) -> list[str]:
    """Names of workers."""
    return [f"worker-{number}" for number in numbers]


class ProcessKeyTests(SynchronousTestCase):
    """``model#replica``."""

    @given(st.text(min_size=1), st.integers(0, 10**6))
    def test_round_trip(self, model: str, replica: int) -> None:
        """A key is read as it was printed, whatever the model's name."""
        key = ProcessKey(model, replica)
        self.assertEqual(parse_process_key(str(key)), key)

    def test_without_index_is_replica_0(self) -> None:
        """A bare model name is its replica 0."""
        self.assertEqual(parse_process_key("tiny-facts"), ProcessKey("tiny-facts", 0))

    def test_malformed(self) -> None:
        """No model, or an index that is no plain number, is refused."""
        for text in ("", "#0", "m#", "m#x", "m#-1", "m#1.5", "m#٣"):
            with self.assertRaises(InvalidName):
                parse_process_key(text)


class PathTests(SynchronousTestCase):
    """Relative paths."""

    def test_parts(self) -> None:
        """A relative path falls into its parts, up to the longest a file system takes."""
        self.assertEqual(path_parts("a/b c/ü.gguf"), ("a", "b c", "ü.gguf"))
        self.assertEqual(path_parts("a" * MAX_PART_BYTES), ("a" * MAX_PART_BYTES,))

    def test_refused(self) -> None:
        """What is absolute, climbs, is too long or can't be a file's name is refused."""
        long = ("a" * (MAX_PART_BYTES + 1), "é" * 128, "a/" * (MAX_PATH_BYTES // 2) + "b")
        for text in ("", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a\\b", "a\nb", "a\x7f", "\udcff", *long):
            with self.assertRaises(InvalidName, msg=repr(text)):
                path_parts(text)

    def test_deepest(self) -> None:
        """A path has so many parts and no more."""
        self.assertEqual(len(path_parts("/".join("d" * MAX_PATH_PARTS))), MAX_PATH_PARTS)
        error = self.assertRaises(InvalidName, path_parts, "/".join("d" * (MAX_PATH_PARTS + 1)))
        self.assertIn("65 parts", str(error))

    def test_files(self) -> None:
        """A file's name leaves room for what is kept beside it; the folders above it need not."""
        longest = "f" * MAX_FILE_NAME_BYTES
        self.assertEqual(file_parts("d" * MAX_PART_BYTES + "/" + longest)[1], longest)
        for text in (longest + "x", "d/" + "é" * (MAX_FILE_NAME_BYTES // 2 + 1)):
            self.assertIn("237 bytes", str(self.assertRaises(InvalidName, file_parts, text)))
        self.assertRaises(InvalidName, file_parts, "../f")
