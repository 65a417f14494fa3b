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
)
