"""Frontends with model folders of their own: the load runs where the files are."""

from typing import Any

from twisted.internet.defer import Deferred

from localai_dist.loads.errors import LoadFailed
from localai_dist.loads.service import Loads
from localai_dist.loads.status import JobState
from localai_dist.staging.errors import SourceMissing
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
        self.clock.advance(1.0)
        self.assertEqual(self.lists, ["/one/models"])
        self.start(self.two)
        self.clock.advance(1.0)
        self.assertEqual(len(self.database.replicas), 1)
        self.assertEqual(self.workers.steps.count("load"), 1)

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
        self.stage = workers.stage

    async def sources(self, model: str, relatives: Any, hints: Any = ()) -> Any:
        self._lists.append(self._folder)
        if not self.has_files:
            raise SourceMissing(f"{relatives[0]} is not in {self._folder}")
        return await self._workers.sources(model, relatives, hints)
