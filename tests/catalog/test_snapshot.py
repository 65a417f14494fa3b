"""A folder of model files: the good ones serve, the bad ones are reported."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.catalog.snapshot import Snapshot, read_snapshot


def text(name: str) -> str:
    return f"{{name: {name}, backend: b, parameters: {{model: {name}.gguf}}}}"


class SnapshotTests(SynchronousTestCase):
    def test_a_bad_file_costs_only_itself(self) -> None:
        """
        One broken model file is reported by name, the others are served.
        """
        seen = read_snapshot({"z.yaml": text("alpha"), "broken.yaml": "{", "a.yaml": text("beta")})
        self.assertEqual(list(seen.models), ["alpha", "beta"])
        self.assertEqual(list(seen.problems), ["broken.yaml"])

    def test_a_name_taken_twice(self) -> None:
        """
        Two files with one name: the first by file name serves, the other is reported.
        """
        seen = read_snapshot({"b.yaml": text("same"), "a.yaml": text("same")})
        self.assertEqual(seen.models["same"].source, "a.yaml")  # type: ignore[index]
        self.assertIn("taken by a.yaml", seen.problems["b.yaml"])

    def test_which_model_a_broken_file_was_for(self) -> None:
        """
        A broken file is known by the name it would serve, or by its own where that can't be told; odd ones are told.
        """
        odd = "name: odd\nbackend: b\nparameters: {model: c}\nthread: 1\n"
        texts = {"a.yaml": "name: 'mine' # yes\ncontext_size: x\n", "b.yml": "{", "c.yaml": odd, "d.yaml": text("fine")}
        seen = [(one.file, one.model, one.served) for one in read_snapshot(texts).all_problems()]
        self.assertEqual(seen, [("a.yaml", "mine", False), ("b.yml", "b", False), ("c.yaml", "odd", True)])

    def test_nothing(self) -> None:
        """
        An empty folder serves nothing and reports nothing.
        """
        self.assertEqual(read_snapshot({}), Snapshot())
