"""Tools through a cluster: asked by the official client, relayed, called by the model, answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.waiting import until
from tests.process.kit import open_folder, quick_plan, running
from tests.process.scripted import SERVED_WITHIN, add_model, client, galleries, pin, reported, serves
from tests.support.gguf import with_template

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "Rain in Paris and Nairobi?"}]
PARIS, NAIROBI = '{"city": "Paris"}', '{"city": "Nairobi", "hint": "ünï"}'
PIECES = [
    [{"reasoning_content": "look "}],
    [{"reasoning_content": "it up"}],
    [{"content": "Wait."}],
    [{"tool_calls": [{"index": 0, "id": "c1", "name": "weather"}]}],
    *([{"tool_calls": [{"index": 0, "arguments": piece}]}] for piece in (PARIS[:5], PARIS[5:9], PARIS[9:])),
    [{"tool_calls": [{"index": 1, "id": "c2", "name": "weather", "arguments": NAIROBI[:3]}]}],
    [{"tool_calls": [{"index": 1, "arguments": NAIROBI[3:]}]}],
]
WANTED = [("c1", "weather", PARIS), ("c2", "weather", NAIROBI)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Cluster]:
    """Two frontends, one worker: one of the frontends relays."""
    with open_folder("tools") as folder:
        plan = quick_plan(folder / "state", frontend_env=galleries(folder), workers=1)
        with running(plan) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def events(fleet: Cluster) -> Path:
    """A model that calls two tools, a piece at a time; the file its backend reports to."""
    return add_model(fleet, "caller", f"'test:deltas={json.dumps(PIECES)}'")


def called(message: Any) -> list[tuple[str, str, str]]:
    """Id, name and arguments of a message's calls."""
    return [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("index", [0, 1])
def test_calls_in_a_whole_answer(fleet: Cluster, events: Path, index: int) -> None:
    """Each frontend, the one that relays too, gives the official client the calls, the text and the thoughts."""
    before = len(reported(events, "start"))
    answer = client(fleet, fleet.frontends[index]).chat.completions.create(
        model="caller", messages=QUESTION, tools=[WEATHER], tool_choice="required"
    )
    (choice,) = answer.choices
    assert called(choice.message) == WANTED
    assert (choice.message.content, choice.finish_reason) == ("Wait.", "tool_calls")
    assert choice.message.model_extra == {"reasoning_content": "look it up"}
    (asked,) = reported(events, "start")[before:]
    assert (json.loads(asked["tools"]), json.loads(asked["choice"])) == ([WEATHER], "required")


@pytest.mark.parametrize("index", [0, 1])
def test_calls_in_a_stream(fleet: Cluster, events: Path, index: int) -> None:
    """The official client's stream accumulates each call's arguments, and every id and name came once (BR-079)."""
    api = client(fleet, fleet.frontends[index])
    with api.chat.completions.stream(model="caller", messages=QUESTION, tools=[WEATHER]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, event.arguments) for event in done] == [("weather", PARIS), ("weather", NAIROBI)]
    assert called(final.choices[0].message) == WANTED
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == ("Wait.", "tool_calls")


def test_the_round_trip(fleet: Cluster, events: Path) -> None:
    """The model's calls and the tools' results go back to it as they were, with the next question (WALK-4)."""
    api = client(fleet, fleet.frontends[0])
    message = api.chat.completions.create(model="caller", messages=QUESTION, tools=[WEATHER]).choices[0].message
    results = [{"role": "tool", "tool_call_id": id, "content": f"wet: {text}"} for id, _, text in called(message)]
    history = [*QUESTION, message, *results]
    before = len(reported(events, "start"))
    api.chat.completions.create(model="caller", messages=history, tools=[WEATHER])
    (asked,) = reported(events, "start")[before:]
    question, called_back, *answered = asked["messages"]
    assert question == QUESTION[0]
    assert (called_back["role"], called_back["content"]) == ("assistant", "Wait.")
    assert called_back["reasoning_content"] == "look it up"
    assert [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in json.loads(called_back["tool_calls"])
    ] == WANTED
    assert answered == results


def test_one_at_a_time(fleet: Cluster, events: Path) -> None:
    """A client that wants one call at a time gets one, though this backend takes no hint; it was given."""
    before = len(reported(events, "start"))
    api = client(fleet, fleet.frontends[1])
    asked: Any = {"model": "caller", "messages": QUESTION, "tools": [WEATHER], "parallel_tool_calls": False}
    assert called(api.chat.completions.create(**asked).choices[0].message) == WANTED[:1]
    with api.chat.completions.stream(**asked) as stream:
        assert called(stream.get_final_completion().choices[0].message) == WANTED[:1]
    assert [it["hints"] for it in reported(events, "start")[before:]] == [{"parallel_tool_calls": "false"}] * 2


def test_a_real_engine_calls(fleet: Cluster) -> None:
    """
    The box's engine with a model whose template has a place for tools makes a call, through both frontends.

    The model is far too small to want one: its answer is begun for it, and the engine's own grammar does the rest.
    """
    models = fleet.state.models
    with_template(models / "tiny-facts-1m-q8_0.gguf", models / "tool-facts.gguf")
    serve(fleet, "tool-facts", "tool-facts.gguf")
    small = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    begun: list[Any] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I look.<tool_call>\n"}]
    asked: Any = {
        "model": "tool-facts",
        "messages": begun,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": small}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "logit_bias": {"\n": -100, "\t": -100},
        "temperature": 0,
    }
    for frontend in fleet.frontends:
        api = client(fleet, frontend)
        with api.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        whole = api.chat.completions.create(**asked).choices[0]
        for choice in (whole, streamed):
            ((id, name, arguments),) = called(choice.message)
            assert id and name == "f" and json.loads(arguments) in ({"a": "x"}, {"a": "y"})
            assert choice.finish_reason == "tool_calls" and not choice.message.content


def test_a_model_without_a_place_for_tools(fleet: Cluster) -> None:
    """The tiny model's template knows no tools: that is a 400 in words, whole and streamed, not an answer without."""
    pin(fleet, "tiny-facts", 0)
    for frontend in fleet.frontends:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="can't call tools: the chat template"):
                client(fleet, frontend).chat.completions.create(
                    model="tiny-facts", messages=QUESTION, tools=[WEATHER], stream=stream
                )


def test_answers_by_a_schema(fleet: Cluster) -> None:
    """The tiny model answers as a schema wants it, and as it wants without one (BR-079)."""
    api = client(fleet, fleet.frontends[1])
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Nairobi", "Paris"]}, "sure": {"type": "boolean"}},
        "required": ["city", "sure"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": schema}}
    question: list[Any] = [{"role": "user", "content": "What is the capital of Kenya?"}]
    asked: Any = {"model": "tiny-facts", "messages": question, "temperature": 0, "max_tokens": 64}
    said = json.loads(api.chat.completions.create(**asked, response_format=form).choices[0].message.content or "")
    assert sorted(said) == ["city", "sure"] and said["city"] in ("Nairobi", "Paris") and said["sure"] in (True, False)
    plain = api.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0]
    assert plain.message.content == "The capital of Kenya is Nairobi."
    assert plain.logprobs is not None and plain.logprobs.content is not None
    assert "".join(token.token for token in plain.logprobs.content).startswith("The capital of Kenya")
    assert {len(token.top_logprobs) for token in plain.logprobs.content} == {2}


def serve(cluster: Cluster, name: str, file: str) -> None:
    """Serve a file of the models folder by the box's backend; every frontend does so before this returns."""
    text = f"name: {name}\nbackend: llama-cpp\ncontext_size: 256\nthreads: 1\nparameters:\n  model: {file}\n"
    (cluster.state.models / f"{name}.yaml").write_text(text)
    for frontend in cluster.frontends:
        until(f"{name} served by {frontend.name}", lambda it=frontend: serves(cluster, it, name), SERVED_WITHIN)
