"""Answers from a cluster of two frontends and two workers, each tunnel on another frontend."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import xllamacpp

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Frontend
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from tests.process.fleet import Watch
from tests.process.kit import open_chat, open_folder, quick_plan, rows, running
from tests.process.outside import memory_of
from tests.process.scripted import add_model, admin, chat, client, galleries, owners, pin, reported

ANSWERS = {
    "tiny-facts": ("What is the capital of Kenya?", "The capital of Kenya is Nairobi."),
    "tiny-words": ("What is cat in French?", "The French word for cat is chat."),
}
FLOOD = 50_000_000
"""More than every buffer on the way holds (bytes)."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Cluster]:
    """Two frontends, two workers, the box's backend and the scriptable one."""
    with open_folder("inference") as folder:
        plan = quick_plan(folder / "state", frontend_env=galleries(folder))
        with running(plan) as cluster:
            yield cluster


def holder_of(cluster: Cluster, worker: int) -> Frontend:
    """The frontend that holds a worker's tunnel."""
    name = owners(cluster)[cluster.workers[worker].name]
    return next(frontend for frontend in cluster.frontends if frontend.name == name)


def other_than(cluster: Cluster, frontend: Frontend) -> Frontend:
    """The other frontend."""
    return next(it for it in cluster.frontends if it is not frontend)


def test_the_first_request_crosses_the_relay(fleet: Cluster) -> None:
    """
    Install, staging, load and predict of a cold model are all done by the asked frontend, over the relay, to the pinned
    worker alone (WALK-5).
    """
    before = owners(fleet)
    assert set(before.values()) == {"frontend-0", "frontend-1"}
    pin(fleet, "tiny-facts", 1)
    owner = holder_of(fleet, 1)
    asked = other_than(fleet, owner)
    question, answer = ANSWERS["tiny-facts"]
    assert rows(fleet.database.url, "select 1 from node_models where model_name = 'tiny-facts'") == []
    reply = chat(fleet, asked, "tiny-facts", question)
    assert reply.status == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == answer
    assert owners(fleet) == before
    on = rows(fleet.database.url, "select node_id, state from node_models where model_name = 'tiny-facts'")
    assert on == [(fleet.workers[1].node_id, "loaded")]
    load = "loading tiny-facts on node worker-1"
    assert load in asked.log.read_text() and load not in owner.log.read_text()


@pytest.mark.parametrize("model", ANSWERS)
@pytest.mark.parametrize("index", [0, 1])
def test_the_official_client_is_answered(fleet: Cluster, index: int, model: str) -> None:
    """The official client gets both models' answers from each frontend, streamed or not (WALK-4)."""
    question, answer = ANSWERS[model]
    api = client(fleet, fleet.frontends[index])
    asked = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 32}
    raw = api.chat.completions.with_raw_response.create(**asked)
    assert raw.headers["x-request-id"]
    whole = raw.parse()
    assert whole.choices[0].message.content == answer
    assert (whole.model, whole.choices[0].finish_reason) == (model, "stop")
    chunks = list(api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
    assert chunks[-1].usage == whole.usage
    assert sorted(entry.id for entry in api.models.list()) == sorted(
        entry.id for entry in client(fleet, fleet.frontends[1 - index]).models.list()
    )
    assert set(ANSWERS) <= {entry.id for entry in api.models.list()}


@pytest.mark.parametrize("model", ANSWERS)
def test_usage_is_the_engines_own(fleet: Cluster, model: str) -> None:
    """A completion's and a chat answer's tokens are what the engine's tokenizer counts for their text (WALK-4)."""
    api, text = client(fleet, fleet.frontends[0]), "Once upon a time"
    question, answer = ANSWERS[model]
    done = api.completions.create(model=model, prompt=text, temperature=0, max_tokens=8).usage
    messages: list[Any] = [{"role": "user", "content": question}]
    chatted = api.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=32).usage
    assert done is not None and chatted is not None
    begun, said = _engine_counts(fleet, model, [(text, True), (answer, False)])
    assert (done.prompt_tokens, done.completion_tokens, done.total_tokens) == (begun, 8, begun + 8)
    assert chatted.completion_tokens == said + 1  # the end token, which ends the answer and is no text
    assert chatted.total_tokens == chatted.prompt_tokens + chatted.completion_tokens


def _engine_counts(cluster: Cluster, model: str, texts: list[tuple[str, bool]]) -> list[int]:
    """How many tokens the engine itself makes of each text; with True, begin-of-text included."""
    key = "only-for-this-test"
    params = xllamacpp.CommonParams()
    params.model.path = str(next(cluster.state.models.glob(f"{model}*.gguf")))
    params.n_ctx, params.cpuparams.n_threads = 256, 1
    params.api_keys = [key]
    server = xllamacpp.Server(params)
    asked = [{"content": text, "add_special": special} for text, special in texts]
    answers = [ask(server.listening_address + "/tokenize", key=key, method="POST", body=body) for body in asked]
    return [len(answer.json()["tokens"]) for answer in answers]


@pytest.mark.parametrize("model", ANSWERS)
def test_embeddings(fleet: Cluster, model: str) -> None:
    """``/v1/embeddings`` works on both models and both frontends, one vector an input, in order (WALK-4)."""
    found = [
        client(fleet, frontend).embeddings.create(model=model, input=["the sky is blue", "a cat", "the sky is blue"])
        for frontend in fleet.frontends
    ]
    vectors = [[entry.embedding for entry in answer.data] for answer in found]
    assert vectors[0] == vectors[1]
    assert len(vectors[0]) == 3 and len(vectors[0][0]) > 8
    assert vectors[0][0] == vectors[0][2] != vectors[0][1]


def test_no_request_fails_beside_a_stalled_client(fleet: Cluster) -> None:
    """
    200 requests over both frontends and models succeed while on each frontend a client reads nothing of 50 MB; it isn't
    cut off, the backend waits for it, no frontend keeps it in memory, and when it reads again it gets all of it
    (WALK-6, BR-009).
    """
    events = add_model(fleet, "flood", f"test:reply_bytes={FLOOD}", "test:piece_bytes=65536")
    for model, (question, _) in ANSWERS.items():
        assert chat(fleet, fleet.frontends[0], model, question).status == 200
    before = [memory_of(frontend) for frontend in fleet.frontends]
    most = [0, 0]

    def grown() -> None:
        for number, frontend in enumerate(fleet.frontends):
            most[number] = max(most[number], memory_of(frontend) - before[number])

    one, other = fleet.frontends  # over its own tunnel, and by relay
    with Watch(grown), stalled(fleet, one, "flood") as first, stalled(fleet, other, "flood") as second:
        until("both streams at the backend", lambda: len(reported(events, "start")) == 2, 60)
        with ThreadPoolExecutor(8) as pool:
            failures = [trouble for trouble in pool.map(lambda n: _one_of_200(fleet, n), range(200)) if trouble]
        assert failures == []
        assert not reported(events, "done") and not reported(events, "cancelled")
        for connection in (first, second):
            assert said_on(connection) == FLOOD
    until("the backend's end", lambda: len(reported(events, "done")) == 2, 60)
    assert max(most) < FLOOD // 2, f"grew by {most} bytes"


def said_on(connection: socket.socket) -> int:
    """How many characters a streamed chat says, read to its own end."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    events = [line[len(b"data: ") :].strip() for line in answer if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    return sum(len(json.loads(event)["choices"][0]["delta"].get("content") or "") for event in events[:-1])


def _one_of_200(cluster: Cluster, number: int) -> str:
    """What went wrong with one request, or an empty text; every third is streamed."""
    model = list(ANSWERS)[number // 2 % 2]
    question, answer = ANSWERS[model]
    api = client(cluster, cluster.frontends[number % 2])
    asked = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 32}
    try:
        if number % 3 == 0:
            chunks = api.chat.completions.create(**asked, stream=True)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            said = api.chat.completions.create(**asked).choices[0].message.content or ""
    except openai.OpenAIError as error:
        return f"{number}: {error}"
    return "" if said == answer else f"{number}: {said!r}"


@contextmanager
def stalled(cluster: Cluster, frontend: Frontend, model: str) -> Iterator[socket.socket]:
    """A client that asked for a long stream, saw it begin, and took nothing of it yet."""
    with open_chat(cluster, frontend, model) as connection:
        assert connection.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL) == b"HTTP/1.1 200"
        yield connection


def test_chunks_are_openais(fleet: Cluster) -> None:
    """A role chunk, content chunks without a finish reason, one final chunk, ``[DONE]`` (WALK-7)."""
    reply = chat(fleet, fleet.frontends[0], "tiny-facts", ANSWERS["tiny-facts"][0], stream=True)
    events = [line[len("data: ") :] for line in reply.text.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"]["role"] == "assistant" and first["finish_reason"] is None
    assert middle and all(it["finish_reason"] is None and it["delta"]["content"] for it in middle)
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert all("usage" not in chunk or chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("index", [0, 1])
def test_chunks_arrive_while_the_backend_still_speaks(fleet: Cluster, index: int) -> None:
    """The first chunk is here while the backend still holds back 49 of its 50 tokens (WALK-7)."""
    name, gate = f"slow-{index}", fleet.state.root / f"slow-{index}.gate"
    events = add_model(fleet, name, "test:tokens=50", f"test:gate={gate}")
    stream = client(fleet, fleet.frontends[index]).chat.completions.create(
        model=name, messages=[{"role": "user", "content": "go"}], stream=True
    )
    chunks = iter(stream)
    while not (next(chunks).choices[0].delta.content or ""):
        pass
    assert reported(events, "start") and not reported(events, "done")
    gate.touch()
    assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) == 49
    until("the backend's last token", lambda: reported(events, "done"), 30)


@pytest.mark.parametrize("index", [0, 1])
def test_a_client_that_leaves_frees_the_slot(fleet: Cluster, index: int) -> None:
    """Closed after 3 tokens: the backend sees the cancellation within 2 s, and nothing is in flight (WALK-7)."""
    name = f"endless-{index}"
    events = add_model(fleet, name, "test:delay=0.1", "test:tokens=1000")
    api = client(fleet, fleet.frontends[index])
    stream = api.chat.completions.create(model=name, messages=[{"role": "user", "content": "go"}], stream=True)
    seen = 0
    for chunk in stream:
        seen += bool(chunk.choices[0].delta.content)
        if seen == 3:
            break
    left = time.time()
    stream.close()
    [cancelled] = until("the backend's cancellation", lambda: reported(events, "cancelled"), 30)
    assert cancelled["at"] - left <= 2
    assert not reported(events, "done")
    in_flight = "select in_flight from node_models where model_name = %s"
    until("nothing in flight", lambda: rows(fleet.database.url, in_flight, name) == [(0,)], 30)


def test_an_unmodified_backend_answers_through_both_frontends(fleet: Cluster) -> None:
    """A program written against fresh stubs of the contract serves chat, completion, stream, embedding (WALK-12)."""
    events = add_model(fleet, "foreign", "test:answer=it works here", "test:dim=5")
    for frontend in fleet.frontends:
        api = client(fleet, frontend)
        asked = {"model": "foreign", "messages": [{"role": "user", "content": "go"}]}
        assert (api.chat.completions.create(**asked).choices[0].message.content or "").split() == [
            "it",
            "works",
            "here",
        ]
        chunks = [it.choices[0].delta.content for it in api.chat.completions.create(**asked, stream=True)]
        assert "".join(filter(None, chunks)).split() == ["it", "works", "here"]
        assert len(api.embeddings.create(model="foreign", input="a b").data[0].embedding) == 5
    (load,) = reported(events, "load")
    worker = next(it for it in fleet.workers if Path(load["file"]).is_relative_to(it.models_dir))
    assert Path(load["file"]).read_bytes() == (fleet.state.models / "foreign.bin").read_bytes()
    assert admin(fleet, f"/api/nodes/{worker.node_id}/models")


@pytest.mark.parametrize("tools", [False, True], ids=["plain", "with tools"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_backend_that_rejects_before_its_first_token(fleet: Cluster, stream: bool, tools: bool) -> None:
    """It is a real status with the backend's words, never a 200 without an answer, on both frontends (BR-018)."""
    name = f"rejecting-{stream}-{tools}".lower()
    events = add_model(fleet, name, "test:error_at=1", "test:error=not this prompt")
    offered = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    more = {"tools": [offered]} if tools else {}
    for frontend in fleet.frontends:
        reply = chat(fleet, frontend, name, stream=stream, **more)
        assert reply.status == 500, reply.text
        assert "not this prompt" in reply.json()["error"]["message"]
    assert len(reported(events, "start")) == 2
