"""Installed backends as directories."""

from __future__ import annotations

import json
import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.units import MiB
from localai_dist.worker.errors import InstallFailed, NotWanted
from localai_dist.worker.gallery import Gallery
from localai_dist.worker.install import BOXED_INDEX, Installer, Wanted


class InstallTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.source = self.folder / "source"
        self.write("plain", "1")
        (self.source / "empty").mkdir()
        entries = [
            {"name": "plain", "uri": "plain", "alias": "p", "version": "7"},
            {"name": "gone", "uri": "gone"},
            {"name": "empty", "uri": "empty"},
            {"name": "meta", "capabilities": {"default": "plain"}},
            {"name": "../evil", "uri": "plain"},
            {"name": "oci", "uri": "oci://registry/x"},
        ]
        (self.source / "index.yaml").write_text(json.dumps(entries))
        self.installer = Installer(
            self.folder / "backends", galleries=[Gallery(f"file://{self.source}/index.yaml", "g")], now=lambda: "now"
        )

    def write(self, name: str, text: str) -> None:
        (self.source / name).mkdir(parents=True, exist_ok=True)
        (self.source / name / "run.sh").write_text(f"#!/bin/sh\n# {text}\n")

    def test_install(self) -> None:
        """A backend of the gallery is a directory with a run.sh that can be run and a metadata.json (WALK-11)."""
        installed = self.installer.install(Wanted("plain"))
        self.assertEqual(installed.folder, self.folder / "backends" / "plain")
        self.assertTrue(os.access(installed.folder / "run.sh", os.X_OK))
        metadata = json.loads((installed.folder / "metadata.json").read_text())
        self.assertEqual(
            {name: metadata[name] for name in ("name", "alias", "version", "installed_at")},
            {"name": "plain", "alias": "p", "version": "7", "installed_at": "now"},
        )
        self.assertEqual(sorted(path.name for path in (self.folder / "backends").iterdir()), ["plain"])
        self.assertEqual([entry.name for entry in self.installer.entries()], ["plain"])

    def test_found_by_every_name(self) -> None:
        """An installed backend is found by its name, its alias, and the meta entry it was chosen for."""
        self.installer.install(Wanted("meta"))
        for name in ("plain", "p", "meta"):
            found = self.installer.find(name)
            self.assertEqual(found and found.name, "plain", name)
        for name in ("", "other", "../source/plain", "plain.install-tmp"):
            self.assertIsNone(self.installer.find(name), name)

    def test_reinstall_is_noticed(self) -> None:
        """A reinstall brings the new files under a new identity."""
        first = self.installer.install(Wanted("plain"))
        self.write("plain", "2")
        second = self.installer.install(Wanted("plain"))
        self.assertNotEqual(first.folder_id, second.folder_id)
        self.assertIn("# 2", (second.folder / "run.sh").read_text())

    def test_failed_install_leaves_the_old_one(self) -> None:
        """Whatever goes wrong, the backend that was installed before is still there, and nothing else."""
        self.installer.install(Wanted("plain"))
        (self.source / "plain" / "run.sh").unlink()
        with self.assertRaises(InstallFailed) as caught:
            self.installer.install(Wanted("plain"))
        self.assertIn("run.sh", str(caught.exception))
        self.assertIsNotNone(self.installer.find("plain"))
        self.assertEqual(sorted(path.name for path in (self.folder / "backends").iterdir()), ["plain"])

    def test_a_stopped_install_leaves_nothing(self) -> None:
        """Stopped between any two steps, an install leaves the old one, whole, and nothing of itself (LOAD-17)."""
        self.write("plain", "2")
        (self.source / "plain" / "big").write_bytes(bytes(3 * MiB))
        steps: list[int] = []
        self.installer.install(Wanted("plain"), lambda: steps.append(0))
        self.assertGreaterEqual(len(steps), 7)  # before each of two files, after each MiB or rest, before the swap
        after = self.text()
        self.write("plain", "3")
        for wanted in range(len(steps)):
            left = [wanted]

            def check(left: list[int] = left) -> None:
                if not left[0]:
                    raise NotWanted("gone")
                left[0] -= 1

            self.assertRaises(NotWanted, self.installer.install, Wanted("plain"), check)
            self.assertEqual(sorted(path.name for path in (self.folder / "backends").iterdir()), ["plain"])
            self.assertEqual(self.text(), after)

    def text(self) -> str:
        """The program that is installed."""
        return (self.folder / "backends" / "plain" / "run.sh").read_text()

    def test_a_backend_with_odd_files(self) -> None:
        """Links are kept as links, times as times; a pipe is no part of a backend, and is not waited for."""
        plain = self.source / "plain"
        (plain / "link").symlink_to("run.sh")
        os.utime(plain / "run.sh", (1, 1))
        folder = self.installer.install(Wanted("plain")).folder
        self.assertEqual((os.readlink(folder / "link"), (folder / "run.sh").stat().st_mtime), ("run.sh", 1))
        os.mkfifo(plain / "pipe")
        self.assertIn("pipe", str(self.assertRaises(InstallFailed, self.installer.install, Wanted("plain"))))

    def test_what_can_not_be_installed(self) -> None:
        """A backend that is in no gallery, has no directory, no run.sh, or no good name is refused with the reason."""
        for name, text in (
            ("nothing", "galleries searched: g; there is: "),
            ("nothing", "plain"),
            ("gone", "not a directory"),
            ("empty", "run.sh"),
            ("../evil", "name"),
            ("oci", "directories"),
        ):
            with self.assertRaises(InstallFailed) as caught:
                self.installer.install(Wanted(name))
            self.assertIn(text, str(caught.exception))
        self.assertEqual(self.installer.all(), [])

    def test_from_a_uri(self) -> None:
        """A backend can be installed from a directory, under its own or another name."""
        self.assertEqual(self.installer.install(Wanted("", str(self.source / "plain"))).name, "plain")
        other = self.installer.install(Wanted("other", f"file://{self.source}/plain", alias="o"))
        self.assertEqual([other.name, other.metadata.alias], ["other", "o"])

    def test_remove(self) -> None:
        """Removing takes the directory away; removing what is not there is fine."""
        self.installer.install(Wanted("plain"))
        self.assertTrue(self.installer.remove("p"))
        self.assertFalse(self.installer.remove("plain"))
        self.assertEqual(list((self.folder / "backends").iterdir()), [])

    def test_the_box(self) -> None:
        """The gallery that ships with the package has the llama-cpp backend in it."""
        boxed = Installer(self.folder / "boxed", now=lambda: "now")
        self.assertTrue(BOXED_INDEX.is_file())
        self.assertEqual(boxed.install(Wanted("llama-cpp")).name, "llama-cpp")
