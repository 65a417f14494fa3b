"""Attacks on what is told of a load, on what a lost or failed one leaves, and on a worker that starts anew."""

from tests.attacks.attack import Attack

_FILE = "tests/process/test_takeover.py::"

ATTACKS: tuple[Attack, ...] = (
    Attack(
        name="a-load-is-told-of-only-while-it-moves-bytes",
        file="localai_dist/httpapi/loads.py",
        old="for job in await call.api.loads.jobs()]",
        new='for job in await call.api.loads.jobs() if job.state != "installing"]',
        reddens=(f"{_FILE}test_a_load_is_told_alike_from_its_install_to_its_failure",),
        leaves_green=(f"{_FILE}test_a_load_stays_told_when_its_frontend_dies",),
    ),
    Attack(
        name="a-load-taken-over-is-told-from-nought",
        file="localai_dist/store/sql/load_jobs.sql",
        old="    bytes_sent = case when j.state = 'failed' then 0 else j.bytes_sent end,\n",
        new="    bytes_sent = 0,\n",
        reddens=(f"{_FILE}test_a_load_stays_told_when_its_frontend_dies",),
        leaves_green=("tests.db.test_load_jobs.CancelTests.test_nothing_to_cancel",),
    ),
    Attack(
        name="a-frontend-that-lost-its-load-goes-on",
        file="localai_dist/loads/job.py",
        old="                if not await write():\n",
        new="                if not await write() and not self.progress.moved:\n",
        also=(
            (
                "localai_dist/loads/job.py",
                "        if told is None and not self._ending and self._work is not None:\n",
                "        if False and self._work is not None:\n",
            ),
        ),
        reddens=(f"{_FILE}test_a_frozen_frontend_that_wakes_does_nothing",),
        leaves_green=(f"{_FILE}test_a_load_stays_told_when_its_frontend_dies",),
    ),
    Attack(
        name="a-failed-load-leaves-its-process",
        file="localai_dist/loads/job.py",
        old="        await self._stop_started()\n        try:\n",
        new="        try:\n",
        reddens=("tests/process/test_failed_loads.py::test_failed_loads_leave_nothing[1]",),
        leaves_green=("tests.loads.test_service.ColdLoadTests.test_a_cold_load",),
    ),
    Attack(
        name="a-backend-that-ended-with-its-worker-ends-the-load",
        file="localai_dist/loads/job.py",
        old="    return isinstance(outcome, Answered) and outcome.answer is Answer.BACKEND_UNAVAILABLE\n",
        new="    return False\n",
        reddens=("tests.loads.test_worker_restart.WorkerRestartTests.test_the_backend_is_started_again",),
        leaves_green=("tests.loads.test_service.BrokenWayTests",),
    ),
    Attack(
        name="what-loads-of-a-deleted-model-left-stays",
        file="localai_dist/loads/service.py",
        old="            self._leftovers.deleted(gone)\n",
        new="            pass\n",
        reddens=(
            "tests.loads.test_leftovers.LeftoverTests.test_a_partial_file_goes_with_its_model",
            f"{_FILE}test_what_a_failed_load_left_goes_with_its_model",
        ),
        leaves_green=("tests.loads.test_leftovers.LeftoverTests.test_a_frontend_that_stops",),
    ),
    Attack(
        name="a-deleted-model-takes-whole-files-along",
        file="localai_dist/loads/leftovers.py",
        old=", unfinished_only=True)",
        new=")",
        reddens=(
            "tests.loads.test_leftovers.LeftoverTests.test_a_partial_file_goes_with_its_model",
            f"{_FILE}test_what_a_failed_load_left_goes_with_its_model",
        ),
        leaves_green=("tests.loads.test_leftovers.LeftoverTests.test_a_frontend_that_stops",),
    ),
    Attack(
        name="a-file-that-can-not-be-read-is-a-deletion",
        file="localai_dist/serving/watch.py",
        old=", *self.served.values()}",
        new="}",
        reddens=("tests.serving.test_watch.CatalogWatchTests.test_a_file_with_a_mistake_keeps_its_model",),
        leaves_green=("tests.serving.test_watch.CatalogWatchTests.test_a_file_that_is_saved_may_be_away_for_a_moment",),
    ),
    Attack(
        name="a-file-that-is-being-saved-is-a-deletion",
        file="localai_dist/serving/watch.py",
        old="GONE_AFTER = 0.9\n",
        new="GONE_AFTER = 0.0\n",
        reddens=("tests.serving.test_watch.CatalogWatchTests.test_a_file_that_is_saved_may_be_away_for_a_moment",),
        leaves_green=("tests.serving.test_watch.CatalogWatchTests.test_a_file_with_a_mistake_keeps_its_model",),
    ),
    Attack(
        name="retire-what-others-serve-after-an-outage",
        file="localai_dist/loads/retire.py",
        old="            if self._knows_who_is_live() and await",
        new="            if await",
        also=(
            (
                "localai_dist/store/sql/retirement.sql",
                "where i.id = %(owner)s and i.last_seen > now()",
                "where i.id = %(owner)s or i.last_seen < now()",
            ),
        ),
        reddens=(
            "tests.loads.test_retire.RetirementTests.test_who_is_live_is_not_known_at_once",
            "tests.loads.test_retire.RetirementTests.test_a_frontend_that_has_just_started",
            "tests.db.test_matrix.OutcomeTests.test_retiring_after_an_outage",
        ),
        leaves_green=(
            "tests.loads.test_retire.RetirementTests.test_a_deleted_model_is_stopped",
            "tests.db.test_matrix.PlaceTests.test_retirement_mark_unserved",
        ),
    ),
)
