"""Budgets, status, causes and options: pure."""

from dataclasses import fields
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.loads.budget import base_hold, load_budget, retry_after
from localai_dist.loads.cause import decode_cause, encode_cause, encode_waits
from localai_dist.loads.errors import LoadFailed, StillLoading
from localai_dist.loads.options import model_options
from localai_dist.loads.status import LoadStatus
from localai_dist.reach import Answer, Outcome, Reconnecting, Unreached
from localai_dist.scheduler.placement import NoPlace
from localai_dist.units import HOUR, MINUTE, GiB
from tests.loads.doubles import make_model


class BudgetTests(SynchronousTestCase):
    def test_load_budget(self) -> None:
        """
        LoadModel gets 5 min and 20 s per GiB, at most 6 h; the operator's value wins both ways (LOAD-1).
        """
        self.assertEqual(load_budget(0), 5 * MINUTE)
        self.assertEqual(load_budget(10 * GiB + GiB // 2), 5 * MINUTE + 210)
        self.assertEqual(load_budget(10_000 * GiB), 6 * HOUR)
        self.assertEqual(load_budget(10 * GiB, 60.0), 60.0)
        self.assertEqual(load_budget(0, 12 * HOUR), 12 * HOUR)

    def test_base_hold(self) -> None:
        """
        A load has its parts' budgets and 5 min, at least 25 min, before its first byte (LOAD-1).
        """
        self.assertEqual(base_hold(15 * MINUTE, 5 * MINUTE), 25 * MINUTE)
        self.assertEqual(base_hold(15 * MINUTE, 60 * MINUTE), 80 * MINUTE)
        self.assertEqual(base_hold(1.0, 1.0), 25 * MINUTE)

    def test_retry_after(self) -> None:
        """
        Retry-After is the estimate within 5 to 60 s, because clients ignore more (LOAD-7).
        """
        self.assertEqual([retry_after(eta) for eta in (None, 0.2, 17.4, 600.0)], [60, 5, 17, 60])


class StatusTests(SynchronousTestCase):
    def test_the_loading_object(self) -> None:
        """
        The object of the answer has exactly the documented fields; the estimate only when there is one (LOAD-7).
        """
        status = LoadStatus("tiny", "staging", "worker-1", 41, 100, 1, 2)
        self.assertEqual(
            status.as_json(),
            {
                "model": "tiny",
                "state": "staging",
                "node": "worker-1",
                "progress": 41.0,
                "bytes_sent": 41,
                "total_bytes": 100,
                "file_index": 1,
                "total_files": 2,
            },
        )
        timed = LoadStatus("tiny", "staging", eta_seconds=11.04)
        self.assertEqual(timed.as_json()["eta_seconds"], 11.0)
        self.assertEqual(str(StillLoading(status)), "model tiny is staging on node worker-1 (41%)")
        self.assertEqual(LoadStatus("tiny", "pending").sentence(), "model tiny is pending")

    def test_the_range_of_the_rest(self) -> None:
        """
        Once there is a history the object carries its range, in seconds (LOAD-7).
        """
        self.assertEqual(LoadStatus("tiny", "loading", eta_range=(1.04, 20.0)).as_json()["eta_range"], [1.0, 20.0])

    def test_a_cancelled_load_says_so(self) -> None:
        """
        While a cancelled load is being cleared away it does not read as if it went on (LOAD-17).
        """
        text = LoadStatus("tiny", "staging", "box", cancelled=True).sentence()
        self.assertEqual(text, "the load of model tiny on node box is being cancelled")


class CauseTests(SynchronousTestCase):
    def test_every_outcome_survives(self) -> None:
        """
        Whatever condition ended a load, every frontend reads that very condition.
        """
        for kind in get_args(Outcome):
            values: dict[str, Any] = {}
            for field in fields(kind):
                values[field.name] = {"departed": True, "rejected": True, "seconds_left": 1.5}.get(field.name, "x")
            if "answer" in values:
                values["answer"] = Answer.PROCESS_ABSENT
            outcome = kind(**values)
            read = decode_cause(encode_cause(Unreached(outcome)))
            assert isinstance(read, Unreached)
            self.assertEqual(read.outcome, outcome)

    def test_other_causes(self) -> None:
        """
        A failed load keeps its text, a missing place its reason and its condition.
        """
        failed = decode_cause(encode_cause(LoadFailed("bad magic")))
        self.assertIsInstance(failed, LoadFailed)
        self.assertEqual(str(failed), "bad magic")
        place = decode_cause(encode_cause(NoPlace("no room", Reconnecting("w"))))
        assert isinstance(place, NoPlace)
        self.assertEqual((place.reason, place.outcome), ("no room", Reconnecting("w")))
        withheld = decode_cause(encode_cause(LoadFailed("x is not in /srv/models", "x is not in its models folder")))
        self.assertEqual((str(withheld), withheld.told), ("x is not in /srv/models", "x is not in its models folder"))
        waits = decode_cause(encode_waits("b at 10.0.0.2:80 is away", "b is away"))
        self.assertEqual((str(waits), waits.told), ("b at 10.0.0.2:80 is away", "b is away"))

    @given(st.text())
    def test_any_text_is_a_cause(self, text: str) -> None:
        """
        A row written by somebody else is read as a plain failure, never as an error of ours.
        """
        self.assertIsInstance(str(decode_cause(text)), str)

    def test_junk(self) -> None:
        """
        JSON of another shape is a plain failure too.
        """
        for text in (
            '{"kind":"unreached","outcome":{"is":"Nope"}}',
            "[1]",
            '{"kind":"unreached","outcome":{"is":"Answered","answer":"?"}}',
            '{"kind":"unreached","outcome":{"is":"NoRoute"}}',
        ):
            self.assertIsInstance(decode_cause(text), LoadFailed)


class OptionsTests(SynchronousTestCase):
    def test_paths_are_the_workers(self) -> None:
        """
        Every file of the model is named by its absolute path on the worker; missing companions are left out.
        """
        model = make_model(
            mmproj="mm/proj.gguf",
            draft_model="gone.gguf",
            lora_adapters=("a.gguf", "gone2.gguf", "b.gguf"),
            lora_scales=(0.5, 0.6),
            context_size=256,
            threads=1,
            gpu_layers=7,
            embeddings=True,
            options=("k:v",),
        )
        options = model_options(model, "/w/tiny", {"tiny.gguf", "mm/proj.gguf", "a.gguf", "b.gguf"})
        self.assertEqual(options.ModelFile, "/w/tiny/tiny.gguf")
        self.assertEqual((options.Model, options.ModelPath), ("tiny.gguf", "/w/tiny"))
        self.assertEqual((options.MMProj, options.DraftModel), ("/w/tiny/mm/proj.gguf", ""))
        self.assertEqual(list(options.LoraAdapters), ["/w/tiny/a.gguf", "/w/tiny/b.gguf"])
        self.assertEqual(list(options.LoraScales), [0.5, 1.0])
        self.assertEqual((options.ContextSize, options.Threads, options.NGPULayers), (256, 1, 7))
        self.assertTrue(options.Embeddings)
        self.assertEqual(list(options.Options), ["k:v"])

    def test_a_model_that_is_a_folder(self) -> None:
        """
        A model that is a folder is named by the folder on the worker.
        """
        options = model_options(make_model(mmproj="repo"), "/w/tiny", {"tiny.gguf", "repo/x.bin"})
        self.assertEqual(options.MMProj, "/w/tiny/repo")
