"""Broadcast between frontends when PostgreSQL is restarted under them, and when one of them stands still."""

from __future__ import annotations

import itertools
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from localai_dist.testing.child import Child
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.database import Launched
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from tests.process.fleet import ROUTE, asking
from tests.process.kit import open_folder, quick_plan, rows, running
from tests.process.outside import upgraded
from tests.process.scripted import admin

BACK_WITHIN = 10.0
HEARD_WITHIN = 2.0
KEEPALIVE = 5.0
"""Longer than ``HEARD_WITHIN``, so that no tunnel here ends of silence."""
MESSAGES = 20_000

_LISTENING = "application_name like 'localai_pgbus_%%'"
_serial = itertools.count()


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """Two frontends, no worker."""
    env = {"LOCALAI_TUNNEL_KEEPALIVE": f"{KEEPALIVE}s"}
    with (
        open_folder("bus") as folder,
        running(quick_plan(folder / "state", workers=0, models=[], frontend_env=env)) as cluster,
    ):
        yield cluster


def crosses(cluster: Cluster, told: int, heard: int, within: float = HEARD_WITHIN) -> None:
    """A node is removed at one frontend: the other one, which holds its tunnel, hears of it and ends it."""
    token = cluster.secrets.registration_token
    node = {"name": f"node-{next(_serial)}", "node_type": "backend", "boot_id": str(uuid.uuid4()), "token": token}
    registered = ask(cluster.frontends[told].url + "/api/node/register", key=token, method="POST", body=node).json()
    credential = registered.get("tunnel_token") or registered.get("node_token")
    door = f"{ROUTE}?id={registered['id']}"
    with upgraded(cluster.frontends[heard].url, door, [("Authorization", f"Bearer {credential}")]) as (answer, tunnel):
        assert answer.status == 101
        held = "select 1 from node_connections where node_id = %s and owner_instance_id = %s"
        instance = cluster.frontends[heard].instance_id
        until("its tunnel", lambda: rows(cluster.database.url, held, registered["id"], instance), 5)
        admin(cluster, f"/api/nodes/{registered['id']}", "DELETE", frontend=told)
        began = time.monotonic()
        tunnel.settimeout(within)
        received = b""
        while not closing(received):
            more = tunnel.recv(65536)
            assert more and time.monotonic() - began <= within, received[-100:]
            received += more


def closing(received: bytes) -> bool:
    """Whether a server's WebSocket frames end with a close frame (RFC 6455, 5.2)."""
    while len(received) >= 2:
        if received[0] & 0x0F == 8:
            return True
        size, head = received[1] & 0x7F, 2
        if size >= 126:
            wide = 2 if size == 126 else 8
            size, head = int.from_bytes(received[2 : 2 + wide], "big"), 2 + wide
        received = received[head + size :]
    return False


def both_ways(cluster: Cluster) -> None:
    """From each to the other."""
    crosses(cluster, 0, 1)
    crosses(cluster, 1, 0)


def listening(cluster: Cluster) -> list[tuple[str, bool]]:
    """State of every LISTEN connection, and whether it is in a transaction."""
    return [  # type: ignore[return-value]
        tuple(row)
        for row in rows(
            cluster.database.url,
            f"select state, xact_start is not null from pg_stat_activity where {_LISTENING} and %s",
            True,
        )
    ]


def descriptors(child: Child) -> int:
    """How many a daemon has open."""
    return len(os.listdir(Path(f"/proc/{child.pid}/fd")))


def test_broadcast_after_every_restart_of_the_database(pair: Cluster) -> None:
    """
    Five restarts: each time, within 10 s, what one frontend says is heard by the other, in both directions; one LISTEN
    connection each, no descriptor more (BR-006).
    """
    assert isinstance(pair.database, Launched)
    both_ways(pair)
    before = [descriptors(frontend) for frontend in pair.frontends]
    for round_ in range(5):
        if round_ % 2:
            pair.database.server.kill()
        else:
            pair.database.server.stop()
        for frontend in pair.frontends:  # or they would be ready below because they had not looked yet
            until(f"{frontend.name} not ready", lambda it=frontend: not it.is_ready(), 10)
        pair.database.server.start()
        began = time.monotonic()
        until("two LISTEN connections", lambda: len(listening(pair)) == 2, BACK_WITHIN)
        for frontend in pair.frontends:
            until(f"{frontend.name} ready", frontend.is_ready, BACK_WITHIN)
        both_ways(pair)
        assert time.monotonic() - began <= BACK_WITHIN
        until("nothing under way", lambda: listening(pair) == [("idle", False), ("idle", False)], 10)
    for frontend, count in zip(pair.frontends, before, strict=True):
        until("no descriptor more", lambda it=frontend, most=count: descriptors(it) <= most, BACK_WITHIN)


def test_a_frontend_that_stands_still(pair: Cluster) -> None:
    """
    20,000 messages while one frontend takes none: no publisher fails, the queue stays empty, no LISTEN connection is in
    a transaction of ours; once it goes on, it hears the others again (CLUS-16, BR-059).
    """
    both_ways(pair)
    pair.frontends[1].freeze()
    try:
        with asking(pair.database.url) as database:
            for first in range(0, MESSAGES, 200):
                sent = "select count(pg_notify('localai_nodes', repeat('x', 500) || n)) from generate_series(%s, %s) n"
                assert database(sent, first + 1, first + 200) == [(200,)]
                if first % 2000 == 0:
                    [(usage,)] = database("select pg_notification_queue_usage()")
                    assert usage < 0.01
                    # While PostgreSQL hands messages over it is in a transaction of its own; a frontend's question
                    # whether its connection is alive is one statement.
                    states = [state for state, _ in listening(pair)]
                    assert len(states) == 2 and set(states) <= {"idle", "active"}, states
        admin(pair, "/api/nodes")
    finally:
        pair.frontends[1].thaw()
    until("the frontend ready", pair.frontends[1].is_ready, 20)
    until("both live", lambda: rows(pair.database.url, "select count(*) from instances") == [(2,)], 20)
    crosses(pair, 0, 1, BACK_WITHIN)  # what waited for it comes first
    both_ways(pair)
    until("nothing under way", lambda: listening(pair) == [("idle", False), ("idle", False)], 10)
