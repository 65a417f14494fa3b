"""Attacks on what somebody meets who installs it, starts it and asks the first question."""

from tests.attacks.attack import Attack

ATTACKS: tuple[Attack, ...] = (
    Attack(
        name="send-on-to-a-client-that-reads-nothing",
        file="localai_dist/httpapi/sse.py",
        old="        if self._paused:\n            self._resumed = Deferred()",
        new="        if self._paused and self._finished:\n            self._resumed = Deferred()",
        reddens=("tests/process/test_inference.py::test_no_request_fails_beside_a_stalled_client",),
        leaves_green=("tests/process/test_inference.py::test_chunks_are_openais",),
    ),
    Attack(
        name="open-the-stream-before-the-backend-answers",
        file="localai_dist/httpapi/openai/streaming.py",
        old="    generation = await call.api.inference.generate",
        new="    await events.send(shape.first() or {})\n    generation = await call.api.inference.generate",
        reddens=(
            "tests/process/test_inference.py::test_a_backend_that_rejects_before_its_first_token[streamed-plain]",
        ),
        leaves_green=(
            "tests/process/test_inference.py::test_a_backend_that_rejects_before_its_first_token[whole-plain]",
        ),
    ),
    Attack(
        name="prefer-the-wheels-postgresql",
        file="localai_dist/testing/postgres_binaries.py",
        old='    if choice in ("auto", "system"):\n        yield from _system()\n'
        '    if choice in ("auto", "embedded"):\n        yield from _embedded()\n',
        new='    if choice in ("auto", "embedded"):\n        yield from _embedded()\n'
        '    if choice in ("auto", "system"):\n        yield from _system()\n',
        reddens=("tests.db.test_private_server.ServerTests.test_a_system_postgresql_is_preferred",),
        leaves_green=("tests.db.test_private_server.ServerTests.test_choices",),
    ),
    Attack(
        name="start-postgresql-beside-what-a-crash-left",
        file="localai_dist/testing/postgres_processes.py",
        old="(pid == lock or _works_in(pid) == folder) and _lives(pid)",
        new="pid == lock and _lives(pid)",
        reddens=("tests.db.test_private_server.ServerTests.test_a_crash_leaves_no_process",),
        leaves_green=("tests.db.test_private_server.ServerTests.test_it_ends_with_who_started_it",),
    ),
    Attack(
        name="a-wheel-with-a-part-of-its-sql",
        file="setup.cfg",
        old="    store/sql/*.sql\n",
        new="    store/sql/bus.sql\n",
        reddens=("tests/process/test_daemons.py::test_the_wheel_serves[foreground]",),
        leaves_green=(
            "tests.test_packaging.WheelTests.test_daemons_list_their_options",
            "tests/process/test_daemons.py::test_daemonised_frontend_serves",
        ),
    ),
    Attack(
        name="look-at-the-models-folder-twice-a-minute",
        file="localai_dist/serving/watch.py",
        old="INTERVAL = 0.5\n",
        new="INTERVAL = 30.0\n",
        reddens=("tests/process/test_demo.py::test_a_model_dropped_in_is_served",),
        leaves_green=("tests/process/test_demo.py::test_restart_by_hand",),
    ),
    Attack(
        name="a-wrong-setting-leaves-postgresql-behind",
        file="localai_dist/testing/cluster.py",
        old="        except BaseException:\n            self.stop()\n            raise\n",
        new="        except BaseException:\n            raise\n",
        also=(("localai_dist/cli/operator/demo.py", "            cluster.stop()\n", "            pass\n"),),
        reddens=("tests/process/test_demo.py::test_mistakes_are_one_line",),
        leaves_green=("tests/process/test_demo.py::test_no_secret_on_a_command_line",),
    ),
    Attack(
        name="who-ended-at-once-is-waited-for",
        file="localai_dist/testing/cluster.py",
        old="if child.is_alive()] if needed is None else needed\n",
        new="if child.is_alive()]\n",
        reddens=("tests/process/test_children.py::test_a_child_that_is_needed_and_gone_ends_the_waiting",),
        leaves_green=("tests/process/test_children.py::test_a_zombie_counts_as_dead",),
    ),
    Attack(
        name="a-quote-missing-in-the-printed-curl",
        file="localai_dist/cli/operator/demo.py",
        old="-d {shlex.quote(body)}",
        new="-d {body}",
        reddens=("tests/process/test_make_demo.py::test_make_demo_without_postgresql_or_compiler",),
        leaves_green=("tests/process/test_make_demo.py::test_demo_as_an_ordinary_user",),
    ),
    Attack(
        name="take-the-first-of-two-credentials",
        file="localai_dist/net/head.py",
        old='b", ".join(lines).decode("utf-8", "surrogateescape")',
        new='lines[0].decode("utf-8", "surrogateescape")',
        reddens=(
            "tests.httpapi.test_nodes.RegisterTests.test_two_credentials",
            "tests.relay.test_acceptor.PeerResourceTests.test_refusals",
            "tests.tunnel.test_acceptor.ConnectResourceTests.test_a_header_that_is_there_twice",
            "tests.worker.test_server.ProbeTests.test_two_tokens",
        ),
        leaves_green=(
            "tests.httpapi.test_nodes.RegisterTests.test_token",
            "tests.worker.test_server.ProbeTests.test_token",
        ),
    ),
    Attack(
        name="the-database-is-told-to-clients",
        file="localai_dist/store/errors.py",
        old='        return "the registry database can\'t be reached, or does not answer in time"\n',
        new="        return str(self)\n",
        reddens=(
            "tests.httpapi.test_told.ToldTests.test_a_client_is_told_the_cause_and_no_coordinates",
            "tests.httpapi.test_told.ToldTests.test_what_goes_on_is_logged_once_a_while",
            "tests.httpapi.test_told.ToldTests.test_readiness",
        ),
        leaves_green=("tests.httpapi.test_told.ToldTests.test_own_words_are_passed_on",),
    ),
    Attack(
        name="a-client-is-told-what-an-operator-is",
        file="localai_dist/httpapi/errors.py",
        old="    return ApiError(status, code, error.told, detail=str(error), **more)\n",
        new="    return ApiError(status, code, str(error), detail=str(error), **more)\n",
        reddens=(
            "tests.httpapi.test_told.ToldTests.test_a_client_is_told_the_cause_and_no_coordinates",
            "tests.httpapi.test_told.ToldTests.test_by_route",
        ),
        leaves_green=("tests.httpapi.test_told.ToldTests.test_readiness",),
    ),
    Attack(
        name="readiness-tells-everybody-where-the-database-is",
        file="localai_dist/httpapi/readiness.py",
        old="check.reason if operator else check.told",
        new="check.reason",
        reddens=("tests.httpapi.test_told.ToldTests.test_readiness",),
        leaves_green=("tests.httpapi.test_told.ToldTests.test_by_route",),
    ),
    Attack(
        name="a-load-that-waits-keeps-why-to-itself",
        file="localai_dist/loads/job.py",
        old="        self.progress.interrupted(error)\n",
        new="",
        reddens=(
            "tests.loads.test_service.BrokenWayTests.test_what_it_waits_for_is_told_everywhere",
            "tests.loads.test_service.BrokenWayTests.test_what_it_waited_for_is_told_at_the_end",
        ),
        leaves_green=("tests.loads.test_service.BrokenWayTests.test_a_node_that_is_waited_for_before_a_load_begins",),
    ),
    Attack(
        name="a-name-is-handed-over-in-silence",
        file="localai_dist/registry/nodes.py",
        old='        return Approval(node, before if row["replaced"] else None)\n',
        new='        return Approval(node, None if row["replaced"] else None)\n',
        reddens=("tests.db.test_nodes.IdentityTests.test_where_both_came_from_is_known",),
        leaves_green=("tests.db.test_nodes.IdentityTests.test_who_came_first_is_approved_first",),
    ),
)
