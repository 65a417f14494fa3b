"""The models folder as it changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from unittest.mock import patch

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.serving import watch
from localai_dist.serving.watch import CatalogWatch, Look, look


def text(name: str) -> str:
    return f"{{name: {name}, backend: b, parameters: {{model: {name}.gguf}}}}"


class LookTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp())
        self.folder.mkdir()

    def test_what_counts(self) -> None:
        """
        YAML files that are not hidden count; weights without a YAML are not served (WALK-2).
        """
        (self.folder / "a.yaml").write_text(text("alpha"))
        (self.folder / "b.yml").write_text(text("beta"))
        (self.folder / ".hidden.yaml").write_text(text("hidden"))
        (self.folder / "lonely.gguf").write_bytes(b"GGUF")
        (self.folder / "folder.yaml").mkdir()
        seen = look(self.folder, Look())
        self.assertEqual(list(seen.snapshot.models), ["alpha", "beta"])
        self.assertEqual(seen.snapshot.problems, {})
        self.assertIs(look(self.folder, seen), seen)

    def test_what_can_not_be_read(self) -> None:
        """
        A file that is no text, or far too long to be a model file, is a problem of its own.
        """
        (self.folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
        (self.folder / "long.yaml").write_bytes(b"#" * (watch.FILE_LIMIT + 1))
        (self.folder / "good.yaml").write_text(text("good"))
        seen = look(self.folder, Look())
        self.assertEqual(
            (list(seen.snapshot.models), sorted(seen.snapshot.problems)), (["good"], ["binary.yaml", "long.yaml"])
        )

    def test_dangling_link(self) -> None:
        """
        A link to nowhere is not there.
        """
        os.symlink("nowhere", self.folder / "a.yaml")
        self.assertEqual(look(self.folder, Look()), Look())

    def test_link_to_itself(self) -> None:
        """
        A link that leads to itself is one problem; it hides none of the other models.
        """
        os.symlink("loop.yaml", self.folder / "loop.yaml")
        (self.folder / "good.yaml").write_text(text("good"))
        seen = look(self.folder, Look())
        self.assertEqual((list(seen.snapshot.models), list(seen.snapshot.problems)), (["good"], ["loop.yaml"]))
        self.assertIn("can't be read", seen.snapshot.problems["loop.yaml"])
        self.assertIs(look(self.folder, seen), seen)

    def test_file_name_that_is_no_text(self) -> None:
        """
        A file whose name is no UTF-8 is served, or told as a problem, under a name that can be shown.
        """
        (self.folder / os.fsdecode(b"\xff.yaml")).write_text(text("good"))
        (self.folder / os.fsdecode(b"\xfe.yaml")).write_bytes(b"\xff")
        seen = look(self.folder, Look())
        self.assertEqual([one.source for one in seen.snapshot.models.values()], ["\\xff.yaml"])
        self.assertEqual(dict(seen.snapshot.broken), {"\\xfe.yaml": "\\xfe"})

    def test_missing_folder(self) -> None:
        """
        A folder that can't be read is an error, not an empty catalog.
        """
        with self.assertRaises(OSError):
            look(self.folder / "missing", Look())


class CatalogWatchTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.folder = Path(self.mktemp())

    def started(self) -> CatalogWatch:
        watching = CatalogWatch(self.folder, clock=self.clock, in_thread=lambda work: maybeDeferred(work))
        watching.startService()
        self.addCleanup(watching.stopService)
        return watching

    def test_dropped_file_is_served(self) -> None:
        """
        A YAML dropped into the folder is served within five seconds, without a restart (WALK-2).
        """
        self.folder.mkdir()
        watching = self.started()
        self.assertIsNone(watching.get("tiny"))
        (self.folder / "tiny.yaml").write_text(text("tiny"))
        self.clock.advance(2.0)
        model = watching.get("tiny")
        assert model is not None
        self.assertEqual((model.name, [one.name for one in watching.all()]), ("tiny", ["tiny"]))
        (self.folder / "tiny.yaml").unlink()
        self.clock.advance(2.0)
        self.assertIsNone(watching.get("tiny"))

    def test_first_look_is_at_once(self) -> None:
        """
        A frontend that starts knows its models before the first request.
        """
        self.folder.mkdir()
        (self.folder / "tiny.yaml").write_text(text("tiny"))
        (self.folder / "bad.yaml").write_text("{")
        watching = self.started()
        self.assertIsNotNone(watching.get("tiny"))
        self.assertEqual([(one.file, one.model) for one in watching.problems], [("bad.yaml", "bad")])

    def test_folder_that_comes_and_goes(self) -> None:
        """
        A folder that can't be read for a while costs nothing that was known; it is read again when it is back.
        """
        watching = self.started()
        self.assertEqual(watching.all(), [])
        self.folder.mkdir()
        (self.folder / "tiny.yaml").write_text(text("tiny"))
        self.clock.advance(2.0)
        self.assertIsNotNone(watching.get("tiny"))
        self.folder.rename(self.folder.with_name("moved"))
        self.clock.advance(2.0)
        self.assertIsNotNone(watching.get("tiny"))

    def test_file_the_yaml_library_stumbles_over(self) -> None:
        """
        A value that is none of its kind costs its own file: the frontend starts, and later changes are seen.
        """
        self.folder.mkdir()
        (self.folder / "bad.yaml").write_text(text("bad")[:-1] + ", mmap: !!bool maybe}")
        watching = self.started()
        self.assertEqual([one.file for one in watching.problems], ["bad.yaml"])
        (self.folder / "worse.yaml").write_text("threads: !!int ''")
        (self.folder / "tiny.yaml").write_text(text("tiny"))
        self.clock.advance(2.0)
        self.assertEqual([one.file for one in watching.problems], ["bad.yaml", "worse.yaml"])
        self.assertIsNotNone(watching.get("tiny"))
        self.assertEqual(watching.failures, 0)

    def test_looks_that_fail_unforeseen(self) -> None:
        """
        Whatever a look stumbles over, at the start too, is logged once and counted, and the next look comes.
        """
        self.folder.mkdir()
        (self.folder / "tiny.yaml").write_text(text("tiny"))
        with patch.object(watch, "look", side_effect=ZeroDivisionError("unforeseen")):
            watching = self.started()
            self.clock.pump([watch.INTERVAL] * 2)
        self.assertEqual((watching.failures, watching.all()), (3, []))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.clock.advance(1.0)
        self.assertIsNotNone(watching.get("tiny"))

    def test_listener_and_thread_that_fail(self) -> None:
        """
        A listener that fails, or a thread that can't be had, ends the watching no more than a look does.
        """
        self.folder.mkdir()
        works: list[bool] = []

        def in_thread(work: Callable[[], Look]) -> Deferred[Look]:
            if not works:
                raise RuntimeError("no thread")
            return maybeDeferred(work)

        def fail(gone: Collection[str]) -> None:
            raise ZeroDivisionError

        watching = CatalogWatch(self.folder, clock=self.clock, in_thread=in_thread)
        watching.on_change = fail
        watching.startService()
        self.addCleanup(watching.stopService)
        self.clock.advance(1.0)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        works.append(True)
        (self.folder / "tiny.yaml").write_text(text("tiny"))
        self.clock.advance(1.0)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        (self.folder / "more.yaml").write_text(text("more"))
        watching.on_change = lambda gone: None
        self.clock.advance(1.0)
        self.assertEqual([one.name for one in watching.all()], ["more", "tiny"])
        self.assertEqual(watching.failures, 2)

    def test_who_is_gone_is_told(self) -> None:
        """
        Whoever listens is told the names of the models that are gone, also of those that could not be served; one whose
        file is only broken now is not gone (LOAD-16).
        """
        self.folder.mkdir()
        for name in ("one", "two", "odd"):
            (self.folder / f"{name}.yaml").write_text(text(name))
        (self.folder / "odd.yaml").write_text("name: odd\n")
        gone: list[set[str]] = []
        watching = CatalogWatch(self.folder, clock=self.clock, in_thread=maybeDeferred)
        watching.on_change = lambda names: gone.append(set(names))
        watching.startService()
        self.addCleanup(watching.stopService)
        (self.folder / "one.yaml").write_text("name: one\n")
        (self.folder / "two.yaml").unlink()
        self.clock.pump([0.5] * 3)
        (self.folder / "odd.yaml").unlink()
        self.clock.pump([0.5] * 3)
        self.assertEqual(gone, [set(), set(), {"two"}, set(), {"odd"}])

    def test_a_file_with_a_mistake_keeps_its_model(self) -> None:
        """
        Whatever a file that served a model under another name turns into, the model is broken until the file goes.
        """
        self.folder.mkdir()
        path = self.folder / "foo.yaml"
        for number, breaks in enumerate(
            (
                lambda: path.write_bytes(b""),
                lambda: path.write_text("# later\n"),
                lambda: path.write_bytes(text("bar").encode() + b" # \xfc"),
                lambda: path.write_bytes(b"#" * (watch.FILE_LIMIT + 1)),
                lambda: (path.unlink(), path.symlink_to(path.name)),
                lambda: (path.unlink(), path.symlink_to("nowhere")),
                lambda: (path.unlink(), path.mkdir()),
                lambda: path.write_text("name: baz\n"),
            )
        ):
            path.write_text(text("bar"))
            watching = self.started()
            gone: list[str] = []
            watching.on_change = gone.extend
            breaks()
            self.clock.pump([0.5] * 6)
            self.assertEqual((watching.is_gone("bar"), gone), (False, []), number)
            self.assertIsNone(watching.get("bar"), number)
            self.assertEqual([one.model for one in watching.problems], ["baz" if number == 7 else "bar"], number)
            (path.rmdir if path.is_dir() else path.unlink)()
            self.clock.pump([0.5] * 4)
            self.assertEqual((watching.is_gone("bar"), set(gone) - {"baz"}), (True, {"bar"}), number)

    def test_one_of_two_files_of_a_model(self) -> None:
        """
        The file that serves a model goes, and the other one that names it is broken by then: the model is not gone.
        """
        self.folder.mkdir()
        for name in ("a", "b"):
            (self.folder / f"{name}.yaml").write_text(text("bar"))
        watching = self.started()
        (self.folder / "b.yaml").write_bytes(b"")
        (self.folder / "a.yaml").unlink()
        self.clock.pump([0.5] * 6)
        self.assertFalse(watching.is_gone("bar"))

    def test_a_file_that_is_saved_may_be_away_for_a_moment(self) -> None:
        """
        An editor takes a file away before it writes it: a model is gone after a second, within two (LOAD-17).
        """
        self.folder.mkdir()
        path = self.folder / "tiny.yaml"
        path.write_text(text("tiny"))
        watching = self.started()
        gone: list[str] = []
        watching.on_change = gone.extend
        for _ in range(2):
            path.unlink()
            self.clock.pump([0.5, 0.45])
            self.assertEqual((watching.get("tiny"), watching.is_gone("tiny")), (None, False))
            path.write_text(text("tiny"))
            self.clock.pump([0.5] * 3)
            self.assertIsNotNone(watching.get("tiny"))
        self.assertEqual(gone, [])
        path.unlink()
        self.clock.pump([0.5] * 3)
        self.assertEqual((watching.is_gone("tiny"), gone), (True, ["tiny"]))

    def test_time_in_which_nothing_could_be_read(self) -> None:
        """
        A folder that is away in between does not count as time without the model.
        """
        self.folder.mkdir()
        path = self.folder / "tiny.yaml"
        path.write_text(text("tiny"))
        watching = self.started()
        path.unlink()
        self.clock.advance(0.5)
        self.folder.rename(self.folder.with_name("moved"))
        self.clock.pump([0.5] * 4)
        self.folder.with_name("moved").rename(self.folder)
        self.clock.advance(0.5)
        self.assertFalse(watching.is_gone("tiny"))
        self.clock.pump([0.5] * 2)
        self.assertTrue(watching.is_gone("tiny"))

    def test_one_look_at_a_time(self) -> None:
        """
        A folder that is slow to read is not read twice at once.
        """
        self.folder.mkdir()
        looks: list[Deferred[Look]] = []

        def slowly(_work: object) -> Deferred[Look]:
            looks.append(Deferred())
            return looks[-1]

        watching = CatalogWatch(self.folder, clock=self.clock, in_thread=slowly)
        watching.startService()
        self.addCleanup(watching.stopService)
        self.clock.pump([2.0] * 5)
        self.assertEqual(len(looks), 1)
        looks[0].callback(Look())
        self.clock.advance(2.0)
        self.assertEqual(len(looks), 2)
