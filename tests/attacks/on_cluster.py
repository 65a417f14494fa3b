"""Attacks on ownership, routes, doors, the bus and departures."""

from tests.attacks.attack import Attack

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
        old="            return Reconnecting(node, presence.grace_left, presence.name)\n",
        new="            return NoRoute(node, departed=True, name=presence.name)\n",
        reddens=(
            "tests.relay.test_forward.OutcomeTests.test_routing_facts",
            "tests.db.test_doors.RelayTests.test_every_condition_by_name",
            "tests.db.test_matrix.OutcomeTests.test_the_health_monitor",
            "tests/process/test_cluster_routes.py::test_a_tunnel_that_is_cut_again_and_again",
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
        name="an-unowned-tunnel-is-kept",
        file="localai_dist/tunnel/dialer.py",
        old="        if self._doubted is not None and self._doubted is doubted:\n",
        new="        if self._doubted is not None and False:\n",
        reddens=(
            "tests.tunnel.test_dialer.TunnelClientTests.test_a_tunnel_that_nobody_owns_is_replaced",
            "tests/process/test_cut_off.py::test_its_workers_move_and_nothing_is_cut",
        ),
        leaves_green=("tests.tunnel.test_dialer.TunnelClientTests.test_make_before_break",),
    ),
    Attack(
        name="one-beat-is-enough-to-leave",
        file="localai_dist/tunnel/dialer.py",
        old="        if self._doubted is not None and self._doubted is doubted:\n",
        new="        doubted = self._doubted\n        if doubted is not None:\n",
        reddens=("tests.tunnel.test_dialer.TunnelClientTests.test_a_tunnel_that_nobody_owns_is_replaced",),
        leaves_green=("tests.tunnel.test_dialer.TunnelClientTests.test_make_before_break",),
    ),
    Attack(
        name="the-proxy-is-passed-by",
        file="localai_dist/net/proxy.py",
        old="    if proxy is None:\n        return HostnameEndpoint(reactor, host, port",
        new="    if proxy is not None:\n        return HostnameEndpoint(reactor, host, port",
        reddens=(
            "tests.net.test_proxy.SocketTests.test_a_session",
            "tests.worker.test_way.WayTests.test_a_call",
            "tests/process/test_proxy.py::test_a_worker_reaches_its_frontend_by_the_proxy_alone",
        ),
        leaves_green=("tests.net.test_proxy.AskingTests.test_bytes_after_the_head",),
    ),
    Attack(
        name="bytes-behind-the-proxys-answer-are-lost",
        file="localai_dist/net/proxy.py",
        old="        if rest:\n            inner.dataReceived(rest)\n",
        new="",
        reddens=("tests.net.test_proxy.AskingTests.test_bytes_after_the_head",),
        leaves_green=("tests.net.test_proxy.SocketTests.test_a_session",),
    ),
    Attack(
        name="a-silent-proxy-is-waited-for",
        file="localai_dist/net/proxy.py",
        old="        self._late = self._clock.callLater(ANSWER_WITHIN, ",
        new="        self._late = self._clock.callLater(9 * ANSWER_WITHIN, ",
        reddens=("tests.net.test_proxy.AskingTests.test_silence",),
        leaves_green=("tests.net.test_proxy.AskingTests.test_early_close",),
    ),
    Attack(
        name="frozen-listener-not-ended",
        file="localai_dist/bus/service.py",
        old="            await self._end_frozen()\n",
        new="",
        reddens=("tests.db.test_bus.LossTests.test_a_frozen_frontend_blocks_nobody",),
        leaves_green=("tests.db.test_bus.CarryTests.test_rows_go_after_their_time",),
    ),
    Attack(
        name="nobody-sweeps-the-bus",
        file="localai_dist/bus/service.py",
        old="        done = self._sweeping.start(self._every, now=False)\n",
        new="        done = Deferred[LoopingCall]()\n",
        reddens=("tests.db.test_bus.CarryTests.test_every_frontend_sweeps_by_itself",),
        leaves_green=("tests.db.test_bus.CarryTests.test_rows_go_after_their_time",),
    ),
    Attack(
        name="a-second-listen-connection-stays-a-while",
        file="localai_dist/bus/service.py",
        old="        self._listener.on_reconnect(self._end_ghosts)\n",
        new="        from twisted.internet import reactor\n\n"
        "        self._listener.on_reconnect(lambda: reactor.callLater(5, self._end_ghosts))\n",
        reddens=("tests.db.test_bus.LossTests.test_a_silent_cut_is_noticed_within_ten_seconds",),
        leaves_green=("tests.db.test_bus.CarryTests.test_each_hears_its_subjects",),
    ),
    Attack(
        name="departures-are-told-to-nobody",
        file="localai_dist/roles/frontend.py",
        old="    return Departures({ROUTES: lambda departure: forwarder.forget(departure.id)})\n",
        new="    return Departures({ROUTES: lambda departure: None})\n",
        reddens=("tests.db.test_departure.DepartureTests.test_a_departed_node_is_forgotten",),
        leaves_green=("tests.health.test_departure",),
    ),
    Attack(
        name="waiters-not-told-that-an-end-may-have-been-missed",
        file="localai_dist/roles/notices.py",
        old="(LOAD_ENDED, self._heard_load_ended, self._look_at_loads)",
        new="(LOAD_ENDED, self._heard_load_ended)",
        reddens=("tests.db.test_notices.NoticesTests.test_waiters_look_again_when_they_may_have_missed_the_end",),
        leaves_green=("tests.db.test_notices.NoticesTests.test_waiters_elsewhere_wake_when_a_load_ends",),
    ),
    Attack(
        name="health-checking-stops-at-an-offline-node",
        file="localai_dist/health/monitor.py",
        old="            nodes = await self._nodes.all()\n",
        new="            nodes = await self._nodes.all()\n"
        '            if any(node.status == "offline" for node in nodes):\n                self._tick.stop()\n',
        reddens=("tests/process/test_cluster_lost.py::test_a_killed_worker_is_offline_and_nothing_else",),
        leaves_green=("tests/process/test_cluster_lost.py::test_a_frozen_worker",),
    ),
    Attack(
        name="a-node-whose-tunnel-is-back-is-demoted",
        file="localai_dist/store/sql/nodes.sql",
        old="where c.node_id = backend_nodes.id and c.owner_instance_id <> '')\nreturning id;\n",
        new="where c.node_id = backend_nodes.id and c.owner_instance_id <> '' and false)\nreturning id;\n",
        reddens=(
            "tests.db.test_nodes.StatusTests.test_a_route_that_is_back_demotes_nobody",
            "tests.db.test_matrix.PlaceTests.test_nodes_mark_unhealthy",
        ),
        leaves_green=("tests.db.test_nodes.StatusTests.test_only_a_departed_route_demotes",),
    ),
    Attack(
        name="a-node-that-never-dialled-is-reaped",
        file="localai_dist/reach.py",
        old='    """Whether the row of the replica that was asked may be deleted (and only that row)."""\n',
        new='    """Whether the row of the replica that was asked may be deleted (and only that row)."""\n'
        "    if isinstance(outcome, NoRoute):\n        return True\n",
        reddens=(
            "tests/process/test_cluster_routes.py::test_both_tunnels_blocked_while_heartbeats_pass",
            "tests.db.test_matrix.OutcomeTests.test_reaping",
        ),
        leaves_green=("tests/process/test_cluster_routes.py::test_every_worker_is_served_from_every_frontend",),
    ),
    Attack(
        name="readiness-overlooks-a-silent-database",
        file="localai_dist/roles/frontend_service.py",
        old='"database", pool.healthy, pool.problem or ""',
        new='"database", True, ""',
        reddens=("tests/process/test_silent_database.py::test_one_frontends_way_falls_silent",),
        leaves_green=("tests.db.test_partition.SilentDatabaseTests.test_nothing_is_decided_meanwhile",),
    ),
    Attack(
        name="liveness-waits-for-the-database",
        file="localai_dist/httpapi/probes.py",
        old='    return Json({"status": "ok"})\n',
        new='    await call.api.nodes.all()\n    return Json({"status": "ok"})\n',
        reddens=("tests/process/test_silent_database.py::test_everything_hangs_at_once",),
        leaves_green=("tests.db.test_partition.SilentDatabaseTests.test_nothing_is_decided_meanwhile",),
    ),
    Attack(
        name="a-connection-more-than-documented",
        file="localai_dist/roles/frontend.py",
        old='application_name="localai-frontend")',
        new='application_name="localai-frontend", size=5)',
        reddens=("tests/process/test_connections.py::test_no_more_connections_than_documented",),
        leaves_green=("tests/process/test_connections.py::test_an_idle_cluster_asks_little",),
    ),
)
