"""Frontends with model folders of their own: the load runs where the files are."""

from dataclasses import replace
from typing import Any

from twisted.internet.defer import Deferred

from localai_dist.loads.errors import LoadFailed
from localai_dist.loads.lack import Lack
from localai_dist.loads.service import Loads
from localai_dist.loads.status import JobState
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.staging.errors import SourceMissing
from localai_dist.wire.verbs import InstallReply
from tests.loads.case import LoadsCase
from tests.loads.doubles import Row, Workers, frontend


class OfferTests(LoadsCase):
    """Frontend one has no files; two may have them. Each has a stager of its own, the rest of the cluster is one."""

    def setUp(self) -> None:
        super().setUp()
        self.lack("one")

    def lack(self, *names: str) -> None:
        """Make frontends whose models folders lack the file; the others have it."""
        self.database.instances.clear()
        self.lists: list[str] = []
        self.one, self.two = (self.with_folder(name, name not in names) for name in ("one", "two"))
        self.one.on_ended, self.two.on_ended = self.two.look_now, self.one.look_now  # the bus

    def miss(self, one: tuple[str, ...] = (), two: tuple[str, ...] = ()) -> None:
        """Make frontends have the first file, and lack those."""
        self.lack()
        for loads, missing in ((self.one, one), (self.two, two)):
            loads._tools.stager.missing = missing  # type: ignore[attr-defined]

    def with_folder(self, name: str, has_files: bool, **settings: Any) -> Loads:
        loads = self.frontend(name, **settings)
        stager = _Folder(self.workers, f"/{name}/models", has_files, self.lists)
        object.__setattr__(loads._tools, "stager", stager)
        return loads

    def start(self, *frontends: Loads) -> None:
        for loads in frontends:
            loads.start()
            self.addCleanup(lambda it=loads: self.successResultOf(Deferred.fromCoroutine(it.stop())))

    def test_the_load_runs_where_the_files_are(self) -> None:
        """
        A request at the frontend without the files is served by a load at the one that has them (LOAD-22).
        """
        self.start(self.one, self.two)
        request = self.ensure(self.one)
        self.clock.pump([0.5] * 4)
        self.assertEqual(self.successResultOf(request).address, "127.0.0.1:20000")
        self.assertEqual(self.lists, ["/one/models", "/two/models"])
        self.assertEqual(self.workers.steps.count("load"), 1)
        self.assertEqual(self.database.jobs, {})

    def test_the_model_file_travels_with_the_job(self) -> None:
        """
        The other frontend needs the files only: a model whose YAML it does not have is loaded there too (LOAD-22).
        """
        self.two = frontend(self.database, self.workers, self.clock, "two")
        self.one.on_ended = self.two.look_now
        self.start(self.one, self.two)
        request = self.ensure(self.one)
        self.clock.pump([0.5] * 4)
        self.assertEqual(self.successResultOf(request).config_revision, self.model.revision)

    def test_nobody_has_them(self) -> None:
        """
        No frontend has the files: the error says which are missing where, and soon (LOAD-22).
        """
        self.lack("one", "two")
        self.start(self.one, self.two)
        requests = [self.ensure(self.one), self.ensure(self.two)]
        self.clock.pump([0.5] * 6)
        texts = {str(self.failureResultOf(request, LoadFailed).value) for request in requests}
        self.assertEqual(
            texts,
            {
                "no frontend has the files of tiny: frontend one: tiny.gguf is not in /one/models; "
                "frontend two: tiny.gguf is not in /two/models"
            },
        )
        self.assertEqual(self.workers.steps, [])

    def test_a_single_frontend_says_so_at_once(self) -> None:
        """
        Without other frontends there is nothing to wait for.
        """
        self.database.instances = {"one"}
        text = str(self.failureResultOf(self.ensure(self.one), LoadFailed).value)
        self.assertEqual(text, "no frontend has the files of tiny: frontend one: tiny.gguf is not in /one/models")

    def test_a_frontend_that_does_not_answer(self) -> None:
        """
        A frontend that is live and silent is named, after a bounded wait (LOAD-22).
        """
        self.start(self.one)
        request = self.ensure(self.one)
        self.clock.pump([0.5] * 4)
        self.assertNoResult(request)
        self.database.jobs["tiny"].offered_for = 15.0
        self.clock.pump([0.5] * 4)
        text = str(self.failureResultOf(request, LoadFailed).value)
        self.assertIn("frontend one: tiny.gguf is not in /one/models; frontend two did not answer", text)

    def test_a_take_over_by_one_without_files_goes_on(self) -> None:
        """
        An orphan that the wrong frontend takes over first is loaded by the right one (LOAD-6, LOAD-22).
        """
        self.database.jobs["tiny"] = Row(0, "dead", JobState.STAGING, orphaned=True, model=self.model)
        self.start(self.one)
        self.clock.pump([1.0] * 5)
        self.assertEqual(self.lists, ["/one/models"])
        self.start(self.two)
        self.clock.pump([1.0] * 5)
        self.assertEqual(len(self.database.replicas), 1)
        self.assertEqual(self.workers.steps.count("load"), 1)

    def test_any_missing_file_is_looked_for_elsewhere(self) -> None:
        """
        A frontend that lacks a later shard or a companion leaves the load to one that has every file (LOAD-22).
        """
        self.miss(one=("tiny-2.gguf",))
        self.start(self.one, self.two)
        self.successResultOf(self.ensure(self.one))
        self.assertEqual(self.lists, ["/one/models", "/two/models"])
        self.assertEqual(self.workers.steps.count("load"), 1)

    def test_nobody_has_them_all(self) -> None:
        """
        Every frontend lacks some file: the one that lacks the least loads what it has, once (LOAD-13, LOAD-22).
        """
        self.miss(one=("a", "b"), two=("c",))
        self.start(self.one, self.two)
        self.successResultOf(self.ensure(self.one))
        self.assertEqual(self.lists, ["/one/models", "/two/models", "/two/models"])
        self.assertEqual(self.workers.steps.count("load"), 1)

    def test_what_is_missing_is_told_when_the_backend_wants_it(self) -> None:
        """
        If that fails the error has the backend's own words and names what is missing where (LOAD-19, LOAD-22).
        """
        self.miss(one=("tiny-2.gguf",), two=("tiny-2.gguf", "tiny-3.gguf"))
        self.workers.result = pb.Result(success=False, message="no second piece")
        self.start(self.one, self.two)
        gate = self.hold_at("load")
        requests = [self.ensure(self.one), self.ensure(self.two)]
        gate.callback(None)
        self.clock.pump([0.5] * 4)
        texts = {str(self.failureResultOf(request, LoadFailed).value) for request in requests}
        self.assertEqual(
            texts,
            {
                "tiny on node worker-1: no second piece (no frontend has every file of it: frontend one: tiny-2.gguf "
                "not in /one/models; frontend two: tiny-2.gguf, tiny-3.gguf not in /two/models)"
            },
        )
        self.assertEqual(self.workers.steps.count("load"), 1)

    def test_another_failure_does_not_blame_the_files(self) -> None:
        """
        What fails before the backend reads the files has its own cause.
        """
        self.miss(one=("mmproj.gguf",), two=("mmproj.gguf",))
        self.workers.install = InstallReply(False, error="no such backend")
        self.start(self.one, self.two)
        text = str(self.failureResultOf(self.ensure(self.one), LoadFailed).value)
        self.assertEqual(text, "backend llama-cpp on node worker-1: no such backend")

    def test_the_first_file_decides(self) -> None:
        """
        A frontend without the weights can load nothing, however little else it lacks (LOAD-22).
        """
        self.lack("one")
        self.two._tools.stager.missing = ("a", "b", "c")  # type: ignore[attr-defined]
        self.start(self.one, self.two)
        self.successResultOf(self.ensure(self.one))
        self.assertEqual(self.lists[-1], "/two/models")

    def test_the_one_whose_turn_it_is_may_die(self) -> None:
        """
        The frontend that lacks the least dies before or while it loads: another one does it (LOAD-6, LOAD-22).
        """
        self.miss(one=("a", "b"), two=("c",))
        lacking = {"one": Lack("a, b", 2), "two": Lack("c", 1)}
        self.database.jobs["tiny"] = Row(1, "two", JobState.STAGING, model=self.model, lacking=lacking)
        self.start(self.one)
        request = self.ensure(self.one)
        self.clock.pump([0.5] * 4)
        self.assertNoResult(request)
        self.database.jobs["tiny"].orphaned = True
        self.clock.pump([0.5] * 4)
        self.assertNoResult(request)  # it may only be slow
        self.database.jobs["tiny"].offered_for = 30.0
        self.clock.pump([0.5] * 4)
        self.successResultOf(request)

    def test_an_orphan_that_nobody_can_run(self) -> None:
        """
        The only frontend with the files died for good: the others say what they lack (LOAD-6, LOAD-22).
        """
        self.lack("one")
        self.database.jobs["tiny"] = Row(
            1, "two", JobState.STAGING, orphaned=True, model=self.model, lacking={"one": Lack("nothing here")}
        )
        self.database.instances.discard("two")
        self.start(self.one)
        request = self.ensure(self.one)
        self.clock.pump([1.0] * 6)
        text = str(self.failureResultOf(request, LoadFailed).value)
        self.assertEqual(text, "no frontend has the files of tiny: frontend one: nothing here")

    def test_the_next_request_asks_everybody_again(self) -> None:
        """
        Files that were copied meanwhile are found by the next request.
        """
        self.database.instances = {"one"}
        self.failureResultOf(self.ensure(self.one), LoadFailed)
        self.one._tools.stager.has_files = True  # type: ignore[attr-defined]
        self.successResultOf(self.ensure(self.one))


class _Folder:
    """The models folder of one frontend."""

    def __init__(self, workers: Workers, folder: str, has_files: bool, lists: list[str]) -> None:
        self._workers = workers
        self._folder = folder
        self._lists = lists
        self.has_files = has_files
        self.missing: tuple[str, ...] = ()
        self.stage = workers.stage

    async def sources(self, model: str, relatives: Any, hints: Any = ()) -> Any:
        self._lists.append(self._folder)
        if not self.has_files:
            raise SourceMissing(f"{relatives[0]} is not in {self._folder}")
        found = await self._workers.sources(model, relatives, hints)
        return replace(found, missing=self.missing, where=self._folder)
