"""A machine whose every core is taken: who is alive is still known to be alive."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from localai_dist.settings.worker import WorkerSettings
from localai_dist.testing.waiting import until
from tests.process.fleet import Fleet, Watch, asking, fleet_of
from tests.process.load import ANSWER

BURNT = 60.0
"""For how long (s): four times the silence that ends a tunnel."""
BURNERS = 2 * (os.cpu_count() or 1)
HOLDS_THE_LOCK = (
    "import re, time\nend = time.monotonic() + {0}\nwhile time.monotonic() < end: re.match('(a*)*b', 'a' * 26)"
)
"""Python that gives its interpreter lock to nobody for seconds at a time, as a loader in C does."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Two frontends and two workers at the default knobs."""
    with fleet_of("starved", {"on-0": (0,), "on-1": (1,)}, quick=False) as started:
        for worker in (0, 1):
            assert started.asked(0, f"on-{worker}") == (200, ANSWER)
        yield started


@contextmanager
def burning() -> Iterator[None]:
    """Two processes a core that do nothing but compute."""
    burners = [
        subprocess.Popen([sys.executable, "-c", HOLDS_THE_LOCK.format(BURNT + 60)], stdin=subprocess.DEVNULL)
        for _ in range(BURNERS)
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@pytest.mark.slow
def test_every_core_is_burnt(fleet: Fleet) -> None:
    """For a minute: no tunnel is lost, no node is anything but healthy, heartbeats come, requests succeed (BR-123)."""
    tunnels = "select node_id, owner_instance_id, epoch, disconnected_at from node_connections order by 1"
    silent = "select max(extract(epoch from now() - last_heartbeat))::float from backend_nodes"
    longest = 0.0
    with (
        asking(fleet.cluster.database.url) as database,
        burning(),
        Watch(lambda: fleet.rows(tunnels), 0.2) as held,
        Watch(lambda: [fleet.statuses(frontend) for frontend in fleet.cluster.frontends], 0.5) as statuses,
    ):
        began = time.monotonic()

        def over() -> bool:
            nonlocal longest
            longest = max(longest, database(silent)[0][0])
            return time.monotonic() - began > BURNT

        until("the end of the minute", over, BURNT + 30, every=0.2)
        for frontend in (0, 1):
            for worker in (0, 1):
                assert fleet.asked(frontend, f"on-{worker}") == (200, ANSWER)
    assert len(held.seen) == 1, held.seen
    assert statuses.seen == [[["healthy", "healthy"], ["healthy", "healthy"]]]
    assert longest < 2 * WorkerSettings().heartbeat_interval
