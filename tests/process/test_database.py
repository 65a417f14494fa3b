"""PostgreSQL goes away and comes back under a running cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.database import Launched
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from tests.process.kit import open_folder, quick_plan, rows, running
from tests.process.outside import links_of
from tests.process.scripted import chat, owners

QUESTION = "What is the capital of Kenya?"
ANSWER = "The capital of Kenya is Nairobi."
BACK_WITHIN = 10.0
"""From the database's first answer to the last frontend's (s)."""
POOL = 4
"""Connections of a frontend for statements."""


@pytest.fixture(scope="module")
def served() -> Iterator[Cluster]:
    """Two frontends, two workers, a model that is loaded."""
    with (
        open_folder("database") as folder,
        running(quick_plan(folder / "state", models=["tiny-facts"])) as cluster,
    ):
        assert all(serves(cluster, index) for index in (0, 1))
        yield cluster


def serves(cluster: Cluster, frontend: int) -> bool:
    """Whether a frontend answers the question, now."""
    reply = chat(cluster, cluster.frontends[frontend], "tiny-facts", QUESTION)
    return reply.status == 200 and reply.json()["choices"][0]["message"]["content"] == ANSWER


def connections(cluster: Cluster) -> tuple[int, int]:
    """Connections of all frontends, as PostgreSQL sees them: for statements, and for LISTEN."""
    [found] = rows(
        cluster.database.url,
        "select count(*) filter (where application_name = 'localai-frontend'),"
        " count(*) filter (where application_name like 'localai%%listen' or application_name like 'localai_pgbus%%'"
        " or query ilike 'listen %%') from pg_stat_activity where backend_type = 'client backend' and %s",
        True,
    )
    return int(found[0]), int(found[1])


def whole(cluster: Cluster) -> bool:
    """Whether every frontend has all its connections again, and no more; one LISTEN connection each."""
    statements, listening = connections(cluster)
    return statements == POOL * len(cluster.frontends) and listening == len(cluster.frontends)


def descriptors(cluster: Cluster) -> list[int]:
    """How many each frontend has open."""
    return [len(links_of(frontend.pid)) for frontend in cluster.frontends]


def test_five_restarts_of_postgresql(served: Cluster) -> None:
    """Restarted five times: both frontends serve within 10 s, no restart of theirs, no descriptor more (WALK-15)."""
    assert isinstance(served.database, Launched)
    server = served.database.server
    until("every connection", lambda: whole(served), BACK_WITHIN)
    pids = [child.pid for child in served.children]
    nodes, held = {node["id"] for node in served.nodes().values()}, owners(served)
    before = descriptors(served)
    for round_ in range(5):
        if round_ % 2:
            server.kill()  # a crash: clients get no word
        else:
            server.stop()
        for frontend in served.frontends:
            until("readiness gone", lambda it=frontend: ask(it.url + "/readyz").status == 503, 10)
            assert ask(frontend.url + "/healthz").status == 200
        server.start()
        began = time.monotonic()
        for index in (0, 1):
            until(f"frontend-{index} serving", lambda it=index: serves(served, it), BACK_WITHIN)
            assert time.monotonic() - began <= BACK_WITHIN
        for frontend in served.frontends:
            until("readiness", frontend.is_ready, BACK_WITHIN)
    until("every connection and no more", lambda: whole(served), BACK_WITHIN)
    until("as many descriptors as before", lambda: _none_more(served, before), BACK_WITHIN)
    assert [child.pid for child in served.children if child.is_alive()] == pids
    assert {node["id"] for node in served.nodes().values()} == nodes
    # One that was away for longer than its live window was swept, and claims what it holds with its next beat.
    until("every tunnel where it was", lambda: owners(served) == held, BACK_WITHIN)


def _none_more(cluster: Cluster, before: list[int]) -> bool:
    """A keep-alive connection of a client may still be closing."""
    return all(now <= then for now, then in zip(descriptors(cluster), before, strict=True))


def test_requests_while_the_database_is_away(served: Cluster) -> None:
    """Without it a request is answered soon, 503 `registry_unavailable`, and nothing is reaped (WALK-15)."""
    assert isinstance(served.database, Launched)
    server = served.database.server
    loaded = rows(served.database.url, "select node_id, address from node_models")
    server.stop()
    for frontend in served.frontends:
        began = time.monotonic()
        reply = chat(served, frontend, "tiny-facts", QUESTION)
        assert time.monotonic() - began < 10
        assert (reply.status, reply.json()["error"]["code"]) == (503, "registry_unavailable")
    server.start()
    for index in (0, 1):
        until(f"frontend-{index} serving", lambda it=index: serves(served, it), BACK_WITHIN)
    assert rows(served.database.url, "select node_id, address from node_models") == loaded
    # Nobody could beat meanwhile: a node may count as silent until it does.
    until("every node healthy", lambda: {node["status"] for node in served.nodes().values()} == {"healthy"}, 20)
