"""Attacks on the hold, the job and staging."""

from tests.attacks.attack import Attack

ATTACKS: tuple[Attack, ...] = (
    Attack(
        name="stage-without-hashing",
        file="localai_dist/worker/uploads.py",
        old="        if found != target.sha256:\n            await self._wipe(entry)\n            return Unusable",
        new="        if not found:\n            await self._wipe(entry)\n            return Unusable",
        reddens=(
            "tests.worker.test_lies.LiesTests.test_every_lie",
            "tests.worker.test_uploads.PieceTests.test_wrong_content",
            "tests/process/test_staging_depth.py::test_a_bit_turned_on_the_way_is_sent_again",
        ),
        leaves_green=(
            "tests.worker.test_uploads.PieceTests.test_in_pieces",
            "tests.staging.test_against_worker.AgainstWorkerTests.test_files_of_every_kind_arrive",
        ),
    ),
    Attack(
        name="trust-the-clients-offset",
        file="localai_dist/wire/files.py",
        old="    if range_.start != stored.size:\n        return WrongOffset(stored.size)\n",
        new="",
        reddens=(
            "tests.wire.test_files",
            "tests.worker.test_lies.LiesTests.test_every_lie",
        ),
        leaves_green=(
            "tests.worker.test_uploads.PieceTests.test_in_pieces",
            "tests.staging.test_against_worker.AgainstWorkerTests.test_files_of_every_kind_arrive",
        ),
    ),
    Attack(
        name="no-relay-for-staging",
        file="localai_dist/relay/serve.py",
        old="        session = self._held.get(request.node)\n",
        new='        session = None if request.traffic == "b" else self._held.get(request.node)\n',
        reddens=("tests/process/test_staging_depth.py::test_a_sharded_model_answers_and_one_without_a_shard_does_not",),
        leaves_green=(
            "tests.relay.test_peers",
            "tests/process/test_staging_depth.py::test_a_bit_turned_on_the_way_is_sent_again",
        ),
    ),
    Attack(
        name="count-progress-per-file",
        file="localai_dist/staging/upload.py",
        old="        self._progress.sent(count)\n        self._hold.observe()\n",
        new="        self._progress.sent(count)\n",
        reddens=("tests.staging.test_upload.UploadTests.test_one_file_may_take_longer_than_the_base",),
        leaves_green=(
            "tests.staging.test_upload.UploadTests.test_a_new_file_arrives_whole_in_pieces",
            "tests.staging.test_upload.UploadTests.test_the_workers_hashing_is_waited_for",
        ),
    ),
    Attack(
        name="hashing-beside-is-progress",
        file="localai_dist/staging/identity.py",
        old="        if self._awaited:\n            self._hashed()\n",
        new="        self._hashed()\n",
        reddens=("tests.staging.test_upload.UnhashedTests.test_hashing_beside_is_no_progress",),
        leaves_green=("tests.staging.test_upload.UnhashedTests.test_pieces_go_while_it_is_hashed",),
    ),
    Attack(
        name="a-found-hash-is-not-recorded",
        file="localai_dist/worker/uploads.py",
        old="        elif piece.renamed:\n",
        new="        elif not piece:\n",
        reddens=("tests.worker.test_uploads.PieceTests.test_begun_under_a_fingerprint",),
        leaves_green=("tests.worker.test_uploads.PieceTests.test_in_pieces",),
    ),
    Attack(
        name="a-fingerprint-is-its-frontends-own",
        file="localai_dist/staging/answers.py",
        old="in {sha256, fingerprint or sha256}\n",
        new="== sha256\n",
        reddens=("tests.staging.test_upload.UnhashedTests.test_another_frontend_goes_on",),
        leaves_green=("tests.staging.test_upload.UnhashedTests.test_what_is_there_is_not_sent",),
    ),
    Attack(
        name="believe-an-objects-name",
        file="localai_dist/worker/object_cache.py",
        old="    if sums.look(source).sha256 != sha256:\n",
        new="    if not source.exists():\n",
        reddens=("tests.staging.test_by_store.CacheTests.test_a_cached_file_that_was_changed_is_not_used",),
        leaves_green=("tests.staging.test_by_store.ByStoreTests.test_a_second_run_moves_nothing",),
    ),
    Attack(
        name="request-files-without-tombstones",
        file="localai_dist/worker/quota.py",
        old="        if self.is_over(request, now):\n",
        new="        if self.is_over(request, now + 2 * TOMBSTONE):\n",
        reddens=(
            "tests.worker.test_quota.QuotaTests.test_a_released_request_is_over_for_an_hour",
            "tests.staging.test_request_files.RequestFilesTests.test_a_requests_life",
        ),
        leaves_green=("tests.worker.test_quota.QuotaTests.test_the_limit_is_on_all_requests_together",),
    ),
    Attack(
        name="observe-does-nothing",
        file="localai_dist/staging/hold.py",
        old="        return replace(self, expiry=min(now + self.stall, self.cap_at), observed_at=now)\n",
        new="        return self\n",
        reddens=(
            "tests.staging.test_budgets.ScaledTests.test_steady_bytes",
            "tests.staging.test_hold.HoldTests.test_a_transfer_that_moves_bytes_outlives_the_base",
        ),
        leaves_green=("tests.staging.test_budgets.ScaledTests.test_nothing_at_all",),
    ),
    Attack(
        name="the-hold-never-fires",
        file="localai_dist/staging/hold_timer.py",
        old="        elif self._work is not None:\n            self._work.cancel()\n",
        new="        elif self._work is None:\n            pass\n",
        reddens=(
            "tests.staging.test_budgets.ScaledTests.test_bytes_that_stop",
            "tests.staging.test_hold_timer.HoldTimerTests.test_silence_reads_deadline_exceeded",
        ),
        leaves_green=("tests.staging.test_budgets.ScaledTests.test_steady_bytes",),
    ),
    Attack(
        name="progress-moves-the-cap",
        file="localai_dist/staging/hold.py",
        old="        return replace(self, expiry=min(now + self.stall, self.cap_at), observed_at=now)\n",
        new="        later = now + 2 * self.stall\n"
        "        return replace(self, expiry=now + self.stall, cap_at=max(self.cap_at, later), observed_at=now)\n",
        reddens=("tests.staging.test_budgets.ScaledTests.test_a_trickle",),
        leaves_green=("tests.staging.test_budgets.ScaledTests.test_bytes_that_stop",),
    ),
    Attack(
        name="stall-window-longer-than-the-base",
        file="localai_dist/staging/hold.py",
        old="    stall = min(stall, base)\n",
        new="",
        reddens=(
            "tests.staging.test_budgets.ScaledTests.test_a_base_below_the_stall_window",
            "tests.staging.test_hold.HoldTests.test_the_stall_window_is_never_longer_than_the_base",
        ),
        leaves_green=("tests.staging.test_budgets.ScaledTests.test_bytes_that_stop",),
    ),
    Attack(
        name="children-get-the-rolling-expiry",
        file="localai_dist/staging/hold.py",
        old="        return self.cap_at\n",
        new="        return self.wake_at\n",
        reddens=(
            "tests.staging.test_budgets.ScaledTests.test_children_get_the_cap",
            "tests.staging.test_budgets.BudgetTests.test_requests_get_the_cap_as_their_deadline",
        ),
        leaves_green=("tests.staging.test_budgets.ScaledTests.test_a_trickle",),
    ),
    Attack(
        name="a-lock-held-through-the-load",
        file="localai_dist/loads/table.py",
        old='        row = await self._pool.fetch_one(_SQL["claim"], {**values, **self._times})\n',
        new='        await self._pool.fetch_one("select pg_advisory_lock(hashtext(%(key)s))", values)\n'
        '        row = await self._pool.fetch_one(_SQL["claim"], {**values, **self._times})\n',
        reddens=("tests.db.test_loads.LoadsTests.test_no_lock_is_held_while_a_model_loads",),
        leaves_green=("tests.db.test_loads.LoadsTests.test_an_old_configuration_is_stopped_durably",),
    ),
    Attack(
        name="a-load-without-its-fence",
        file="localai_dist/store/sql/load_jobs.sql",
        old="replica_index = %(replica_index)s,\n    updated_at = now(), last_progress = now()\n"
        "where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s and",
        new="replica_index = %(replica_index)s,\n    updated_at = now(), last_progress = now()\n"
        "where tracking_key = %(key)s and owner_replica = %(owner)s and",
        reddens=("tests.db.test_load_jobs.FenceTests.test_the_same_frontend_is_fenced_by_the_attempt",),
        leaves_green=("tests.db.test_load_jobs.ClaimTests",),
    ),
    Attack(
        name="a-tick-takes-the-cancel-back",
        file="localai_dist/store/sql/load_jobs.sql",
        old="    last_progress = now(), started_at = coalesce(",
        new="    cancelled_at = null, last_progress = now(), started_at = coalesce(",
        reddens=("tests.db.test_load_jobs.CancelTests.test_a_tick_never_clears_it",),
        leaves_green=("tests.db.test_load_jobs.CancelTests.test_nothing_to_cancel",),
    ),
    Attack(
        name="a-cancelled-load-reads-as-ended-well",
        file="localai_dist/loads/watch.py",
        old="            if attempt is not None and (reason",
        new="            if False and (reason",
        reddens=("tests.loads.test_cancel.CancelTests.test_a_waiter_elsewhere_that_only_finds_the_row_gone",),
        leaves_green=("tests.loads.test_cancel.CancelTests.test_on_the_frontend_that_loads",),
    ),
    Attack(
        name="a-job-nobody-can-run-is-never-refused",
        file="localai_dist/loads/lack.py",
        old="        return Resort.REFUSE\n",
        new="        return Resort.WAIT\n",
        reddens=("tests.loads.test_offers.OfferTests.test_nobody_has_them",),
        leaves_green=("tests.loads.test_offers.OfferTests.test_the_load_runs_where_the_files_are",),
    ),
    Attack(
        name="only-the-first-file-is-looked-for-elsewhere",
        file="localai_dist/loads/job.py",
        old="            if not sources.missing or self._claim.lacking:\n",
        new="            if True:\n",
        reddens=(
            "tests.loads.test_offers.OfferTests.test_any_missing_file_is_looked_for_elsewhere",
            "tests/process/test_folders.py::test_any_file_is_looked_for_elsewhere",
        ),
        leaves_green=(
            "tests.loads.test_offers.OfferTests.test_the_load_runs_where_the_files_are",
            "tests.loads.test_service",
        ),
    ),
    Attack(
        name="an-install-outlives-its-callers",
        file="localai_dist/worker/sharing.py",
        old="        if not self._waiters:\n            self.unwanted = True\n",
        new="",
        reddens=(
            "tests.worker.test_supervisor.LeaveTests.test_an_install_that_nobody_wants_stops",
            "tests/process/test_cancel_install.py::test_a_cancel_stops_the_install",
        ),
        leaves_green=("tests.worker.test_supervisor.LeaveTests.test_a_shared_install_goes_on",),
    ),
    Attack(
        name="one-caller-leaves-for-all",
        file="localai_dist/worker/sharing.py",
        old="        if not self._waiters:\n            self.unwanted = True\n",
        new="        self.unwanted = True\n",
        reddens=("tests.worker.test_supervisor.LeaveTests.test_a_shared_install_goes_on",),
        leaves_green=("tests.worker.test_supervisor.LeaveTests.test_an_install_that_nobody_wants_stops",),
    ),
    Attack(
        name="a-fetch-outlives-the-deletion",
        file="localai_dist/worker/object_files.py",
        old="                fetch.stop()\n                await fetch.over()\n",
        new="",
        reddens=("tests.staging.test_by_store.ByStoreTests.test_a_deleted_model_ends_its_fetch",),
        leaves_green=("tests.staging.test_by_store.ByStoreTests.test_a_fetch_resumes",),
    ),
    Attack(
        name="stop-a-model-that-another-frontend-serves",
        file="localai_dist/store/sql/retirement.sql",
        old="< extract(epoch from now()) - %(fresh)s);",
        new="< 0);",
        reddens=(
            "tests.db.test_matrix.PlaceTests.test_retirement_mark_unserved",
            "tests/process/test_folders.py::test_a_deleted_model_is_stopped",
        ),
        leaves_green=("tests.db.test_matrix.PlaceTests.test_retirement_mark",),
    ),
    Attack(
        name="what-filled-the-disk-stays-there",
        file="localai_dist/loads/job.py",
        old="        if place is not None and cramped:\n",
        new="        if place is None and cramped:\n",
        reddens=(
            "tests.loads.test_service.ColdLoadTests.test_a_full_disk_is_one_clear_failure",
            "tests/process/test_full_disk.py::test_a_disk_that_fills_up_fails_one_load_once",
        ),
        leaves_green=("tests.loads.test_service.ColdLoadTests.test_a_full_disk_harms_no_other_model",),
    ),
)
