"""The attacks, one value each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """
    One way to break the code.

    Attributes:
        name: what is broken, in words with dashes.
        file: path from the root of the checkout.
        old: the text that is replaced; it stands in the file exactly once.
        new: what stands there instead.
        reddens: test ids of which each must fail.
        leaves_green: test ids of which each must still pass, so that the edit did not simply break everything.
    """

    name: str
    file: str
    old: str
    new: str
    reddens: tuple[str, ...]
    leaves_green: tuple[str, ...]


ATTACKS: tuple[Attack, ...] = (
    Attack(
        name="delete-the-relay",
        file="localai_dist/relay/forward.py",
        old="            case ViaPeer() as route:\n",
        new="            case ViaPeer():\n"
        "                raise Unreached(reach.NoRoute(node, departed=False))\n"
        "            case route if False:\n",
        reddens=(
            "tests.relay.test_forward.RelayedTests.test_bytes_cross_the_relay_both_ways",
            "tests.db.test_doors.RelayTests.test_sixteen_at_once_are_one_dial",
        ),
        leaves_green=(
            "tests.relay.test_forward.OwnTunnelTests",
            "tests.db.test_doors.TunnelDoorTests",
        ),
    ),
    Attack(
        name="skip-the-epoch-check-in-release",
        file="localai_dist/store/sql/ownership.sql",
        old="where node_id = %(node)s and owner_instance_id = %(instance)s and epoch = %(epoch)s;",
        new="where node_id = %(node)s and owner_instance_id = %(instance)s;",
        reddens=(
            "tests.db.test_ownership.ClaimTests.test_the_last_claim_wins",
            "tests.db.test_matrix.PlaceTests.test_ownership_release",
        ),
        leaves_green=(
            "tests.db.test_ownership.ClaimTests.test_eight_claims_at_once",
            "tests.db.test_ownership.PresenceTests",
        ),
    ),
    Attack(
        name="owner-query-without-the-live-join",
        file="localai_dist/store/sql/ownership.sql",
        old="left join instances i on i.id = c.owner_instance_id and c.owner_instance_id <> ''\n"
        "    and i.last_seen > now() - make_interval(secs => %(window)s);",
        new="left join instances i on i.id = c.owner_instance_id and c.owner_instance_id <> '';",
        reddens=(
            "tests.db.test_ownership.PresenceTests.test_a_dead_frontend_owns_nothing",
            "tests.db.test_membership.OneStatementTests.test_the_owner_is_never_one_that_is_not_live",
        ),
        leaves_green=(
            "tests.db.test_ownership.PresenceTests.test_the_life_of_a_tunnel",
            "tests.db.test_ownership.ClaimTests",
        ),
    ),
    Attack(
        name="stamp-first-presence",
        file="localai_dist/store/sql/ownership.sql",
        old="            when i.id is not null then 'connected'\n"
        "            when c.owner_instance_id = '' and c.disconnected_at < now() - make_interval(secs => %(grace)s)\n"
        "                then 'departed'\n",
        new="            when c.disconnected_at < now() - make_interval(secs => %(grace)s) then 'departed'\n"
        "            when i.id is not null then 'connected'\n",
        reddens=(
            "tests.db.test_ownership.PresenceTests.test_a_held_row_with_an_old_stamp_is_not_departed",
            "tests.db.test_membership.OneStatementTests.test_the_owner_is_never_one_that_is_not_live",
        ),
        leaves_green=("tests.db.test_ownership.PresenceTests.test_the_life_of_a_tunnel",),
    ),
    Attack(
        name="peer-secret-not-checked",
        file="localai_dist/relay/acceptor.py",
        old="        return None if matches(token, published) else NOT_THAT_ONE\n",
        new="        return None if published is not None else NOT_THAT_ONE\n",
        reddens=(
            "tests.relay.test_acceptor.PeerResourceTests.test_refusals",
            "tests.db.test_doors.PeerDoorTests.test_a_refused_dial_displaces_nobody",
        ),
        leaves_green=(
            "tests.relay.test_acceptor.PeerResourceTests.test_an_empty_configured_token_admits_nobody",
            "tests.db.test_doors.RelayTests.test_sixteen_at_once_are_one_dial",
        ),
    ),
    Attack(
        name="callers-deadline-blamed-on-the-peer",
        file="localai_dist/relay/deadline.py",
        old="            raise Unreached(DeadlineExceeded(text)) from error\n",
        new="            from localai_dist.reach import PeerUnreachable\n\n"
        '            raise Unreached(PeerUnreachable("the peer", text)) from error\n',
        reddens=(
            "tests.relay.test_outcomes.DeadlineTests.test_whoever_hangs",
            "tests.relay.test_outcomes.DeadlineTests.test_whatever_fails_when_the_time_is_up",
        ),
        leaves_green=(
            "tests.relay.test_outcomes.DeadlineTests.test_in_time_the_real_reason_is_told",
            "tests.relay.test_outcomes.WorkerReplyTests",
        ),
    ),
    Attack(
        name="refusal-read-as-no-route",
        file="localai_dist/wire/preamble.py",
        old="            return Refused(code, text)\n",
        new="            from localai_dist.reach import NoRoute\n\n            return NoRoute(code, departed=True)\n",
        reddens=(
            "tests.relay.test_outcomes.WorkerReplyTests.test_each_reply_is_exactly_one_outcome",
            "tests.relay.test_forward.OwnTunnelTests.test_each_reply_of_the_worker",
        ),
        leaves_green=(
            "tests.relay.test_outcomes.WorkerReplyTests.test_nothing",
            "tests.relay.test_forward.OutcomeTests",
        ),
    ),
    Attack(
        name="reconnecting-read-as-departed",
        file="localai_dist/registry/presence.py",
        old="            return Reconnecting(node, presence.grace_left)\n",
        new="            return NoRoute(node, departed=True)\n",
        reddens=(
            "tests.relay.test_forward.OutcomeTests.test_routing_facts",
            "tests.db.test_doors.RelayTests.test_every_condition_by_name",
            "tests.db.test_matrix.OutcomeTests.test_the_health_monitor",
        ),
        leaves_green=(
            "tests.db.test_ownership.PresenceTests",
            "tests.relay.test_outcomes.WorkerReplyTests",
        ),
    ),
    Attack(
        name="peer-unreachable-may-reap",
        file="localai_dist/reach.py",
        old='    """Whether the row of the replica that was asked may be deleted (and only that row)."""\n',
        new='    """Whether the row of the replica that was asked may be deleted (and only that row)."""\n'
        "    if isinstance(outcome, PeerUnreachable):\n"
        "        return True\n",
        reddens=(
            "tests.db.test_matrix.OutcomeTests.test_reaping",
            "tests.db.test_matrix.OutcomeTests.test_a_request",
        ),
        leaves_green=("tests.db.test_matrix.OutcomeTests.test_demoting",),
    ),
    Attack(
        name="a-delete-nobody-registered",
        file="localai_dist/store/sql/load_jobs.sql",
        old="-- name: drop\n",
        new="-- name: tidy\n-- Whatever is old.\n"
        "delete from node_models where last_used < now() - interval '1 day';\n\n-- name: drop\n",
        reddens=("tests.registry.test_acting.ActingTests.test_every_change_says_what_it_is",),
        leaves_green=("tests.registry.test_acting.ActingTests.test_only_the_registered_function_runs_its_statement",),
    ),
    Attack(
        name="database-failure-reads-as-401",
        file="localai_dist/tunnel/acceptor.py",
        old="            return LOOKUP_FAILED\n",
        new="            return WRONG_TOKEN\n",
        reddens=(
            "tests.db.test_doors.TunnelDoorTests.test_a_database_failure_is_never_401",
            "tests.tunnel.test_acceptor.ConnectResourceTests.test_refusals_in_order",
        ),
        leaves_green=("tests.db.test_doors.TunnelDoorTests.test_every_row_of_the_table_in_order",),
    ),
    Attack(
        name="a-newcomer-is-believed",
        file="localai_dist/registry/identity.py",
        old="    return Claim.NEWCOMER\n",
        new="    return Claim.ROTATED\n",
        reddens=(
            "tests.db.test_doors.NodeIdentityTests.test_a_newcomer_under_a_known_name_touches_nothing",
            "tests.db.test_nodes.IdentityTests.test_a_newcomer_changes_nothing",
        ),
        leaves_green=("tests.db.test_doors.NodeIdentityTests.test_pending_ends_by_approval_alone",),
    ),
    Attack(
        name="loopback-is-advertised",
        file="localai_dist/roles/advertise.py",
        old="    if number.is_loopback:\n",
        new="    if False:\n",
        reddens=("tests.roles.test_advertise.FoundTests.test_a_real_connect_toward_this_machine",),
        leaves_green=("tests.roles.test_advertise.FoundTests.test_the_address_toward_the_database",),
    ),
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
            "tests.staging.test_upload.UploadTests.test_silence_ends_it",
        ),
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
        name="notify-dropped",
        file="localai_dist/store/sql/bus.sql",
        old="select pg_notify(%(channel)s, %(message)s);",
        new="select 1;",
        reddens=("tests.db.test_bus.CarryTests.test_each_hears_its_subjects",),
        leaves_green=("tests.bus.test_envelope",),
    ),
    Attack(
        name="spill-limit-moved-up",
        file="localai_dist/bus/envelope.py",
        old="INLINE_LIMIT: Final = 8000",
        new="INLINE_LIMIT: Final = 8001",
        reddens=(
            "tests.db.test_bus.CarryTests.test_every_size_arrives_byte_for_byte",
            "tests.bus.test_envelope.EnvelopeTests.test_the_limit_is_of_encoded_bytes",
        ),
        leaves_green=("tests.bus.test_subscriber",),
    ),
    Attack(
        name="spill-limit-moved-down",
        file="localai_dist/bus/envelope.py",
        old="INLINE_LIMIT: Final = 8000",
        new="INLINE_LIMIT: Final = 7999",
        reddens=(
            "tests.db.test_bus.CarryTests.test_every_size_arrives_byte_for_byte",
            "tests.bus.test_envelope.EnvelopeTests.test_the_limit_is_of_encoded_bytes",
        ),
        leaves_green=("tests.bus.test_subscriber",),
    ),
    Attack(
        name="re-listen-skipped",
        file="localai_dist/store/listener.py",
        old="        for channel in list(self._channels):\n            await self._run",
        new="        for channel in ():\n            await self._run",
        reddens=("tests.db.test_bus.LossTests.test_a_killed_connection",),
        leaves_green=("tests.db.test_bus.CarryTests.test_each_hears_its_subjects",),
    ),
    Attack(
        name="missed-messages-not-told",
        file="localai_dist/bus/subscriber.py",
        old="        self._listener.on_reconnect(self.missed)",
        new="        pass",
        reddens=("tests.db.test_bus.LossTests.test_a_killed_connection",),
        leaves_green=("tests.db.test_bus.CarryTests.test_each_hears_its_subjects",),
    ),
    Attack(
        name="two-listen-connections",
        file="localai_dist/bus/service.py",
        old="        self._listener.on_reconnect(self._end_ghosts)",
        new="        pass",
        reddens=("tests.db.test_bus.LossTests.test_a_silent_cut_is_noticed_within_ten_seconds",),
        leaves_green=("tests.db.test_bus.LossTests.test_a_killed_connection",),
    ),
    Attack(
        name="unbounded-subscriber-queue",
        file="localai_dist/bus/subscription.py",
        old="return messages >= QUEUE or",
        new="return False and messages >= QUEUE or",
        reddens=("tests.bus.test_subscriber.IsolationTests.test_one_that_never_ends",),
        leaves_green=("tests.bus.test_subscriber.SubscribeTests",),
    ),
    Attack(
        name="departure-inside-the-grace",
        file="localai_dist/health/departure.py",
        old="presence.state is PresenceState.DEPARTED",
        new="presence.state in (PresenceState.DEPARTED, PresenceState.RECONNECTING)",
        reddens=("tests.health.test_departure.DeparturesTests.test_nothing_else_is_a_departure",),
        leaves_green=("tests.health.test_verdict",),
    ),
    Attack(
        name="a-swapped-identity-keeps-its-tunnel",
        file="localai_dist/store/sql/nodes.sql",
        old="(%(loose)s or n.node_token_hash = held.digest)",
        new="true",
        reddens=("tests.db.test_notices.NoticesTests.test_a_swapped_identity_loses_its_tunnel_wherever_it_is_held",),
        leaves_green=("tests.db.test_notices.NoticesTests.test_a_removed_node_loses_its_tunnel",),
    ),
    Attack(
        name="health-hides-warm-replicas",
        file="localai_dist/store/sql/replicas.sql",
        old="n.status <> 'draining'",
        new="n.status = 'healthy'",
        reddens=(
            "tests.db.test_replicas.ReplicaTests.test_health_does_not_hide_a_warm_replica",
            "tests.db.test_loads.LoadsTests.test_no_second_copy_inside_the_grace",
        ),
        leaves_green=("tests.db.test_replicas.ReplicaTests.test_only_loaded_replicas_are_offered",),
    ),
    Attack(
        name="any-release-is-admitted",
        file="localai_dist/wire/releases.py",
        old="return _line(ours) == _line(theirs) is not None",
        new="return True",
        reddens=(
            "tests.tunnel.test_acceptor.ConnectResourceTests.test_refusals_in_order",
            "tests.relay.test_acceptor.PeerResourceTests.test_refusals",
        ),
        leaves_green=("tests.tunnel.test_acceptor.TogetherTests",),
    ),
    Attack(
        name="a-grace-of-a-millisecond",
        file="localai_dist/settings/frontend.py",
        old='DURATION, 90 * SECOND, "How long a lost tunnel counts as reconnecting',
        new='DURATION, 0.005 * SECOND, "How long a lost tunnel counts as reconnecting',
        reddens=("tests/process/test_cluster_routes.py::test_the_owner_is_killed",),
        leaves_green=(
            "tests/process/test_cluster_routes.py::test_every_worker_is_served_from_every_frontend",
            "tests/process/test_cluster_routes.py::test_both_tunnels_blocked_while_heartbeats_pass",
        ),
    ),
    Attack(
        name="a-thawed-frontend-takes-back-what-moved",
        file="localai_dist/store/sql/ownership.sql",
        old="where node_connections.epoch = %(epoch)s\n",
        new="where node_connections.epoch = %(epoch)s or true\n",
        reddens=("tests.db.test_ownership.PresenceTests.test_only_a_tunnel_that_nobody_took_is_reclaimed",),
        leaves_green=("tests.db.test_ownership.ClaimTests.test_the_last_claim_wins",),
    ),
    Attack(
        name="a-former-process-keeps-its-tunnels",
        file="localai_dist/store/sql/instances.sql",
        old="    where owner_instance_id = %(id)s returning node_id\n",
        new="    where owner_instance_id = %(id)s and false returning node_id\n",
        reddens=(
            "tests.db.test_ownership.InstanceTests.test_a_new_process_holds_nothing_of_its_former_one",
            "tests/process/test_cluster_restart.py::test_owner_and_worker_die_in_the_same_interval",
        ),
        leaves_green=("tests.db.test_ownership.InstanceTests.test_one_beat_does_it_all",),
    ),
    Attack(
        name="a-retiring-tunnels-end-taken-for-the-new-ones",
        file="localai_dist/tunnel/link.py",
        old="        previous, self.current = self.current, session\n",
        new="        previous = self.current\n        if previous is not None:\n            self._retire(previous)\n"
        "        self.current, previous = session, None\n",
        reddens=("tests.tunnel.test_dialer.TunnelClientTests.test_a_retiring_tunnel_without_streams_is_closed",),
        leaves_green=("tests.tunnel.test_dialer.TunnelClientTests.test_make_before_break",),
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
        file="localai_dist/loads/service.py",
        old="            replica = await self._drive(flight)\n",
        new="            from twisted.internet.defer import DeferredLock\n"
        "\n"
        '            lock = vars(type(self)).get("_lock") or DeferredLock()\n'
        "            type(self)._lock = lock\n"
        "            replica = await lock.run(lambda: Deferred.fromCoroutine(self._drive(flight)))\n",
        reddens=("tests.loads.test_service.ColdLoadTests.test_a_slow_load_delays_no_other_model",),
        leaves_green=("tests.loads.test_service.ColdLoadTests.test_a_cold_load",),
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
        file="localai_dist/loads/rows.py",
        old="        return not self.owner and bool(self.lacking) and self.state is JobState.PENDING\n",
        new="        return False\n",
        reddens=("tests.loads.test_offers.OfferTests.test_nobody_has_them",),
        leaves_green=("tests.loads.test_offers.OfferTests.test_the_load_runs_where_the_files_are",),
    ),
    # MUX: streams over one connection
    Attack(
        name="mux-unbounded-send-queue",
        file="localai_dist/net/feed.py",
        old="        if queued > HIGH_WATER and self.producer",
        new="        if False and self.producer",
        reddens=(
            "tests.net.test_stalls.StalledReaderTests.test_both_directions",
            "tests.net.test_stalls.StalledReaderTests.test_across_a_relay",
            "tests.net.test_stream.MuxStreamSuite.test_stopped_reader_stops_writer",
        ),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_order",),
    ),
    Attack(
        name="mux-transport-filled-without-limit",
        file="localai_dist/mux/sender.py",
        old="        room = self.limit.limit - held\n",
        new="        room = 1 << 40\n",
        reddens=("tests.net.test_session.TransferTests.test_transport_is_never_overfilled",),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_order",),
    ),
    Attack(
        name="mux-window-update-never-sent",
        file="localai_dist/mux/session.py",
        old="        while self._owed:\n",
        new="        while False:\n",
        reddens=(
            "tests.mux.test_windows.MixedWindowsTests.test_every_pairing",
            "tests.net.test_stream.MuxStreamSuite.test_clean_close_flushes",
        ),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_order",),
    ),
    Attack(
        name="mux-credit-used-before-announced",
        file="localai_dist/mux/window.py",
        old="            self.owed += grown\n",
        new="            self.allowed += grown\n",
        reddens=(
            "tests.mux.test_windows.WindowTests.test_using_growth_before_it_was_told",
            "tests.mux.test_window.ReceiveWindowTests.test_growth_is_told_first",
        ),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_order",),
    ),
    Attack(
        name="mux-ping-never-times-out",
        file="localai_dist/net/session.py",
        old="        if silent >= self.config.keepalive_timeout:\n",
        new="        if False:\n",
        reddens=(
            "tests.net.test_endings.EveryEndingTests.test_keepalive",
            "tests.net.test_links.KeepaliveTests.test_a_way_that_swallows_everything",
            "tests.net.test_links.KeepaliveTests.test_one_way_only",
        ),
        leaves_green=("tests.net.test_endings.EveryEndingTests.test_connection",),
    ),
    Attack(
        name="mux-classes-ignored",
        file="localai_dist/mux/sender.py",
        old="            stream.ready_in = stream.traffic\n",
        new="            stream.ready_in = TrafficClass.INFERENCE\n",
        reddens=(
            "tests.net.test_links.SlowLinkTests.test_requests_beside_a_transfer",
            "tests.mux.test_session.ClassOrderTests.test_urgent_goes_first",
        ),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_order",),
    ),
    Attack(
        name="mux-delay-cap-off",
        file="localai_dist/mux/pacing.py",
        old="        return self.under_way < self.cap\n",
        new="        return True\n",
        reddens=(
            "tests.net.test_links.SlowLinkTests.test_requests_beside_a_transfer",
            "tests.mux.test_session.ClassOrderTests.test_delay_cap",
        ),
        leaves_green=("tests.mux.test_session.ClassOrderTests.test_urgent_goes_first",),
    ),
    Attack(
        name="mux-wrapped-reset-taken-as-clean",
        file="localai_dist/net/splice.py",
        old="        return not error.remote\n",
        new="        return True\n",
        reddens=(
            "tests.net.test_splice.EveryEndingTests.test_failures",
            "tests.net.test_splice.EndingsTests.test_session_death_is_judged_first",
        ),
        leaves_green=("tests.net.test_splice.EveryEndingTests.test_clean_endings",),
    ),
    Attack(
        name="mux-generic-endings-checked-first",
        file="localai_dist/net/splice.py",
        old="    if isinstance(error, SessionDead):\n",
        new="    if isinstance(error, ConnectionDone | ConnectionAborted):\n        return True\n"
        "    if isinstance(error, SessionDead):\n",
        reddens=("tests.net.test_splice.EndingsTests.test_session_death_is_judged_first",),
        leaves_green=("tests.net.test_splice.EndingsTests.test_which_endings_are_clean",),
    ),
    Attack(
        name="mux-splice-returns-after-the-first-direction",
        file="localai_dist/net/splice.py",
        old="        if left.lost and right.lost and not done.called:\n",
        new="        if not done.called:\n",
        reddens=(
            "tests.net.test_splice.EveryEndingTests.test_clean_endings",
            "tests.net.test_splice.SpliceTests.test_over_only_after_the_second_end",
        ),
        leaves_green=("tests.net.test_splice.SpliceTests.test_far_side_speaks_first",),
    ),
    Attack(
        name="mux-session-bound-removed",
        file="localai_dist/mux/window.py",
        old="        taken = min(wanted, self.free)\n",
        new="        taken = wanted\n",
        reddens=(
            "tests.mux.test_windows.WindowTests.test_a_thousand_unread_streams",
            "tests.net.test_session.ManyUnreadTests.test_unread_bound",
        ),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_order",),
    ),
    Attack(
        name="mux-stream-bound-removed",
        file="localai_dist/mux/receiver.py",
        old=" or self.opened_there >= self.limits.max_streams",
        new="",
        reddens=("tests.mux.test_rules.AcceptTests.test_the_1001st_does_no_harm",),
        leaves_green=("tests.mux.test_rules.AcceptTests.test_ack_on_accept",),
    ),
    Attack(
        name="mux-death-taken-as-a-clean-end",
        file="localai_dist/net/session.py",
        old="            stream.session_ended(reason)\n",
        new="            stream._end_cleanly()\n",
        reddens=(
            "tests.net.test_endings.EveryEndingTests.test_connection",
            "tests.net.test_stream.MuxStreamTests.test_session_death_is_no_clean_end",
        ),
        leaves_green=("tests.net.test_stream.MuxStreamSuite.test_clean_close_flushes",),
    ),
    Attack(
        name="mux-an-answered-ping-settles-nothing",
        file="localai_dist/mux/pacing.py",
        old="        self.under_way = self._total - total\n",
        new="",
        reddens=("tests.mux.test_pacing.DelayCapTests.test_a_larger_window_is_not_taken_for_arrival",),
        leaves_green=("tests.mux.test_pacing.DelayCapTests.test_unknown_pong_is_ignored",),
    ),
)
