"""A cold model asked for by the official OpenAI client for Node, with ``stream: true``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localai_dist.testing.cluster import Cluster
from tests.process.kit import open_folder, quick_plan, rows, running
from tests.process.node_openai import client_missing, streaming
from tests.process.scripted import add_model, galleries, gate_of, reported


@pytest.fixture(scope="module")
def fleet() -> Iterator[Cluster]:
    """Two frontends and a worker; skipped in words where the client can't be had."""
    missing = client_missing()
    if missing:
        pytest.skip(missing)
    with open_folder("node-client") as folder:
        plan = quick_plan(folder / "state", frontend_env=galleries(folder), models=("tiny-facts",), workers=1)
        with running(plan) as cluster:
            yield cluster


def test_a_stream_begins_while_the_model_loads(fleet: Cluster) -> None:
    """The client has its stream, and comments it does not show, before the model is loaded; then tokens (LOAD-8)."""
    gate = gate_of(fleet, "late")
    events = add_model(fleet, "late", f"test:load_gate={gate}", "test:answer=better late than never")
    with streaming(fleet, fleet.frontends[0], "late") as seen:
        early = [next(seen), next(seen)]
        assert {one["event"] for one in early} == {"open", "comment"}
        assert not loaded(fleet, "late")
        gate.touch()
        rest = list(seen)
    assert loaded(fleet, "late")
    tokens = [one["text"] for one in rest if one["event"] == "token"]
    assert "".join(tokens) == "better late than never" and len(tokens) > 1
    assert rest[-1] == {"event": "done"}
    assert {one["text"] for one in [*early, *rest] if one["event"] == "comment"} == {": waiting"}
    assert len(reported(events, "load")) == 1


def test_a_stream_whose_load_fails(fleet: Cluster) -> None:
    """A load that fails after the stream began is an error to the client, with the backend's words (LOAD-8, BR-018)."""
    gate = gate_of(fleet, "never")
    add_model(fleet, "never", f"test:load_gate={gate}", "test:load=fail")
    with streaming(fleet, fleet.frontends[1], "never") as seen:
        told = [next(seen)]
        gate.touch()
        told += seen
    assert [one["event"] for one in told if one["event"] != "comment"] == ["open", "error"]
    assert told[-1]["official"] and "the script says: no load" in told[-1]["message"], told
    assert told[-1]["code"] == "model_load_failed"


def loaded(cluster: Cluster, model: str) -> bool:
    """Whether a replica of a model is loaded."""
    query = "select 1 from node_models where model_name = %s and state = 'loaded'"
    return bool(rows(cluster.database.url, query, model))
