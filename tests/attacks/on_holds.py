"""Attacks on the use that a running load makes of its hold, and on what counts as progress."""

from tests.attacks.attack import Attack

_IN_USE = "tests.loads.test_hold_in_use.HoldInUseTests"

ATTACKS: tuple[Attack, ...] = (
    Attack(
        name="staging-without-the-loads-hold",
        file="localai_dist/loads/steps.py",
        old="stage(place.node, self.sources.files, self.progress, self.hold)",
        new="stage(place.node, self.sources.files, self.progress, None)",
        reddens=(f"{_IN_USE}.test_bytes_that_move_outlive_the_base_and_silence_ends_it",),
        leaves_green=("tests.loads.test_service.ColdLoadTests.test_a_cold_load",),
    ),
    Attack(
        name="the-error-of-a-hold-without-its-facts",
        file="localai_dist/loads/job.py",
        old='f"{text}{self.progress.summary(lasted)})"',
        new='f"{text})"',
        reddens=(f"{_IN_USE}.test_bytes_that_move_outlive_the_base_and_silence_ends_it",),
        leaves_green=(f"{_IN_USE}.test_the_backend_has_its_whole_budget",),
    ),
    Attack(
        name="load-model-within-the-stall-window",
        file="localai_dist/loads/steps.py",
        old="        self.hold.extend(budget + _SLACK)\n",
        new="",
        reddens=(f"{_IN_USE}.test_the_backend_has_its_whole_budget",),
        leaves_green=(f"{_IN_USE}.test_bytes_that_move_outlive_the_base_and_silence_ends_it",),
    ),
    Attack(
        name="a-confirmed-skip-is-no-progress",
        file="localai_dist/staging/upload.py",
        old="        if isinstance(found, There):\n            self._hold.observe()\n",
        new="",
        reddens=("tests.staging.test_upload.UploadTests.test_a_second_run_moves_no_byte",),
        leaves_green=("tests.staging.test_upload.UploadTests.test_the_workers_hashing_is_waited_for",),
    ),
    Attack(
        name="a-source-hashed-in-one-go",
        file="localai_dist/staging/digests.py",
        old="SLICE: int = 1 * MiB\n",
        new="SLICE: int = 1 << 50\n",
        reddens=("tests.staging.test_source.DigestTests.test_each_slice_is_progress",),
        leaves_green=("tests.staging.test_source.DigestTests.test_hashed_once",),
    ),
    Attack(
        name="a-conflict-restarts-twice",
        file="localai_dist/staging/upload.py",
        old="_RESTARTS = 1\n",
        new="_RESTARTS = 2\n",
        reddens=("tests.staging.test_upload.UploadTests.test_a_second_conflict_ends_it",),
        leaves_green=("tests.staging.test_upload.UploadTests.test_a_conflict_restarts_once",),
    ),
)
