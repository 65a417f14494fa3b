"""
Fixtures of the process tests: a running cluster, and what its children said when a test fails.

No ``__init__.py`` here, on purpose: trial passes over this folder and pytest alone runs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from localai_dist.testing.cluster import Cluster
from tests.process.kit import CLUSTERS, open_folder, quick_plan, running


def pytest_configure(config: pytest.Config) -> None:
    """Name the one marker."""
    config.addinivalue_line("markers", "slow: runs at the default knobs, in `make test-slow` only")


@pytest.fixture
def state() -> Iterator[Path]:
    """A state folder for one test."""
    with open_folder("state") as folder:
        yield folder / "state"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two frontends and two workers with quick knobs, shared by the tests of one file."""
    with open_folder("cluster") as folder, running(quick_plan(folder / "state")) as started:
        yield started


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Add the last lines of every child's log to a failure's report."""
    report = yield
    if report.failed:
        for started in CLUSTERS:
            for child in started.children:
                report.sections.append((f"log of {child.name}", "\n".join(child.tail(40))))
    return report
