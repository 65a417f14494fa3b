"""Tools, formats and likelihoods in chats: what the backend is told, and what the client gets of its answer."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.catalog.model import Template
from localai_dist.httpapi.openai.tools import MAX_DEPTH, MAX_TOOLS
from localai_dist.rpc import backend_pb2 as pb
from tests.httpapi.doubles import Exchange, FakeCatalog, World
from tests.serving.doubles import FakeChannel, FakeStream, make_model

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Rain in Paris?"}]}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": CITY, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def delta(content: str = "", reasoning: str = "", *calls: pb.ToolCallDelta) -> pb.ChatDelta:
    return pb.ChatDelta(content=content, reasoning_content=reasoning, tool_calls=calls)


def call(index: int = 0, id: str = "", name: str = "", arguments: str = "") -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=index, id=id, name=name, arguments=arguments)


def deltas(*found: pb.ChatDelta, **more: Any) -> pb.Reply:
    return pb.Reply(chat_deltas=found, **more)


def ask(reply: pb.Reply, **more: Any) -> Exchange:
    world = World(FakeChannel(reply=reply))
    return world.send("POST", "/v1/chat/completions", {**CHAT, **more})


def stream(*replies: pb.Reply, **more: Any) -> Exchange:
    source = FakeStream()
    source.feed(*replies)
    source.finish()
    world = World(FakeChannel(stream=source))
    return world.send("POST", "/v1/chat/completions", {**CHAT, "stream": True, **more})


def said(exchange: Exchange) -> list[dict[str, Any]]:
    """The deltas between the first chunk and the last."""
    return [frame["choices"][0]["delta"] for frame in exchange.frames[1:-2]]


def ending(exchange: Exchange) -> str:
    reason: str = exchange.frames[-2]["choices"][0]["finish_reason"]
    return reason


class OfferTests(SynchronousTestCase):
    def told(self, **more: Any) -> pb.PredictOptions:
        world = World()
        got = world.send("POST", "/v1/chat/completions", {**CHAT, **more})
        self.assertEqual(got.status, 200, got.body)
        return world.channel.asked[0]

    def test_the_backend_is_told(self) -> None:
        """
        The backend gets the tools as the client wrote them, and that the model may choose.
        """
        told = self.told(tools=[tool(), tool("clock", strict=True)])
        self.assertEqual(json.loads(told.Tools), [tool(), tool("clock", strict=True)])
        self.assertEqual((json.loads(told.ToolChoice), dict(told.Metadata)), ("auto", {}))

    def test_choices(self) -> None:
        """
        "required" is passed on; of a choice by name only that tool is told; with "none" the backend hears of none.
        """
        both = [tool(), tool("clock")]
        self.assertEqual(json.loads(self.told(tools=both, tool_choice="required").ToolChoice), "required")
        told = self.told(tools=both, tool_choice=named("clock"))
        self.assertEqual((json.loads(told.Tools), json.loads(told.ToolChoice)), ([tool("clock")], named("clock")))
        for silent in ({"tools": both, "tool_choice": "none"}, {"tools": []}, {"tools": None, "tool_choice": "auto"}):
            told = self.told(**silent)
            self.assertEqual((told.Tools, told.ToolChoice), ("", ""))

    def test_one_at_a_time(self) -> None:
        """
        Whoever wants one call at a time has the backend told so.
        """
        told = self.told(tools=[tool()], parallel_tool_calls=False)
        self.assertEqual(dict(told.Metadata), {"parallel_tool_calls": "false"})
        self.assertEqual(dict(self.told(parallel_tool_calls=False).Metadata), {})

    def test_the_round_trip(self) -> None:
        """
        Calls, their results and what was thought before go to the backend as they came.
        """
        calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]
        history = [
            *CHAT["messages"],
            {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "look it up"},
            {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "wet"},
        ]
        told = self.told(messages=history, tools=[tool()])
        self.assertEqual([message.role for message in told.Messages], ["user", "assistant", "tool"])
        self.assertEqual(json.loads(told.Messages[1].tool_calls), calls)
        self.assertEqual(told.Messages[1].reasoning_content, "look it up")
        result = told.Messages[2]
        self.assertEqual((result.tool_call_id, result.name, result.content), ("c1", "weather", "wet"))

    def test_formats(self) -> None:
        """
        JSON, or JSON by a schema, becomes the grammar that the backend keeps to; text needs none.
        """
        self.assertEqual(self.told(response_format={"type": "text"}).Grammar, "")
        self.assertTrue(self.told(response_format={"type": "json_object"}).Grammar.startswith("root ::= object\n"))
        wish = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": CITY}}
        told = self.told(response_format=wish, tools=[tool()], tool_choice="none")
        self.assertIn('"\\"city\\""', told.Grammar)

    def test_likely(self) -> None:
        """
        The backend is asked how likely tokens are only where the client asks.
        """
        self.assertEqual(self.told().Logprobs, 0)
        told = self.told(logprobs=True)
        self.assertEqual((told.Logprobs, told.TopLogprobs), (1, 0))
        told = self.told(logprobs=True, top_logprobs=5)
        self.assertEqual((told.Logprobs, told.TopLogprobs), (5, 5))


class RefusalTests(SynchronousTestCase):
    def refused(self, param: str | None, **more: Any) -> str:
        world = World(max_body=1_000_000)
        got = world.send("POST", "/v1/chat/completions", {**CHAT, **more})
        self.assertEqual((got.status, got.json["error"]["param"]), (400, param), got.body)
        self.assertFalse(world.channel_asked)
        return str(got.error["message"])

    def test_tools(self) -> None:
        """
        A tool that is wrong or not served is a 400 that names it (WALK-17).
        """
        for tools, param in (
            ("x", "tools"),
            ([5], "tools[0]"),
            ([{"type": "function"}], "tools[0].function"),
            ([{"type": "custom", "custom": {"name": "x"}}], "tools[0].type"),
            ([{"function": {"name": "x"}}], "tools[0].type"),
            ([tool(), tool("a b")], "tools[1].function.name"),
            ([tool("x" * 65)], "tools[0].function.name"),
            ([tool(""), tool()], "tools[0].function.name"),
            ([tool(parameters=[])], "tools[0].function.parameters"),
            ([tool(description=5)], "tools[0].function.description"),
            ([tool(strict="yes")], "tools[0].function.strict"),
            ([tool(), tool("b"), tool()], "tools[2].function.name"),
            ([tool(f"t{number}") for number in range(MAX_TOOLS + 1)], "tools"),
        ):
            self.refused(param, tools=tools)
        self.refused("parallel_tool_calls", tools=[tool()], parallel_tool_calls=1)

    def test_choices(self) -> None:
        """
        A choice that is not there, or of nothing, is refused.
        """
        for choice in ("sometimes", named("clock"), {"type": "allowed_tools"}, {"type": "function"}):
            self.refused("tool_choice", tools=[tool()], tool_choice=choice)
        self.refused("tool_choice", tools=[tool()], tool_choice=5)
        self.refused("tool_choice.function.name", tools=[tool()], tool_choice={"type": "function", "function": {}})
        for choice in ("required", named("weather")):
            self.assertIn("no tools", self.refused("tool_choice", tool_choice=choice))

    def test_depth(self) -> None:
        """
        A schema nested deeper than the bound is refused; the deepest that is not goes through.
        """
        for levels, status in ((MAX_DEPTH, 200), (MAX_DEPTH + 1, 400)):
            schema: Any = {}
            for level in range(levels - 2):
                schema = {"x": schema} if level % 2 else [schema]
            world = World()
            got = world.send("POST", "/v1/chat/completions", {**CHAT, "tools": [tool(parameters={"y": schema})]})
            self.assertEqual(got.status, status, levels)
        self.assertEqual(got.error["param"], "tools[0].function.parameters")
        deep = b'{"a":' * 3000 + b"{}" + b"}" * 3000
        body = b'{"model": "tiny", "messages": [], "tools": [{"function": {"parameters": %b}}]}' % deep
        self.assertEqual(World(max_body=1_000_000).send("POST", "/v1/chat/completions", body).status, 400)

    def test_formats(self) -> None:
        """
        A format that is not served, and a schema that can't be kept to, are refused with their place.
        """
        schema = "response_format.json_schema"
        for wish, param in (
            ("json", "response_format"),
            ({}, "response_format.type"),
            ({"type": "xml"}, "response_format.type"),
            ({"type": "json_schema"}, schema),
            ({"type": "json_schema", "json_schema": {"name": "x"}}, f"{schema}.schema"),
            ({"type": "json_schema", "json_schema": {"name": "a b", "schema": CITY}}, f"{schema}.name"),
            ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, f"{schema}.schema"),
        ):
            self.refused(param, response_format=wish)
        large = {"enum": ["x" * 1000] * 132}
        message = self.refused(
            f"{schema}.schema", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": large}}
        )
        self.assertIn("over 131072 bytes", message)
        for inner, place in (({"type": "integer", "minimum": 1}, ".minimum"), ({"type": "what"}, ".type")):
            wish = {"name": "x", "schema": {"type": "object", "properties": {"a": inner}}}
            message = self.refused(
                f"{schema}.schema.properties.a{place}", response_format={"type": "json_schema", "json_schema": wish}
            )
            self.assertIn("properties.a", message)

    def test_not_together(self) -> None:
        """
        A format beside tools is refused: a backend takes one grammar.
        """
        text = self.refused("response_format", tools=[tool()], response_format={"type": "json_object"})
        self.assertIn("not together with tools", text)

    def test_likely(self) -> None:
        """
        Likelihoods out of range, or half asked for, are refused; completions have none.
        """
        self.refused("top_logprobs", logprobs=True, top_logprobs=21)
        self.refused("top_logprobs", top_logprobs=2)
        self.refused("logprobs", logprobs=3)
        got = World().send("POST", "/v1/completions", {"model": "tiny", "prompt": "x", "logprobs": 1})
        self.assertEqual((got.status, got.error["param"]), (400, "logprobs"))

    def test_biases(self) -> None:
        """
        There is a bound to the tokens whose score is changed.
        """
        self.refused("logit_bias", logit_bias={str(number): 1 for number in range(1025)})

    def test_sound(self) -> None:
        """
        An answer that is to be heard is refused; text is what there is.
        """
        self.refused("modalities", modalities=["text", "audio"])
        got = World().send("POST", "/v1/chat/completions", {**CHAT, "modalities": ["text"]})
        self.assertEqual(got.status, 200)

    def test_what_tools_were_called_once(self) -> None:
        """
        The names that tools had once are refused in words, not left out.
        """
        self.assertIn("tools", self.refused("functions", functions=[{"name": "x"}]))
        self.assertIn("tools", self.refused("function_call", function_call="auto"))

    def test_a_model_without_a_template(self) -> None:
        """
        A model whose prompt is bare text is offered no tools.
        """
        catalog = FakeCatalog([make_model("tiny", template=Template(use_tokenizer_template=False))])
        got = World(catalog=catalog).send("POST", "/v1/chat/completions", {**CHAT, "tools": [tool()]})
        self.assertEqual((got.status, got.error["param"]), (400, "tools"))
        self.assertIn("use_tokenizer_template: false", got.error["message"])


class WholeAnswerTests(SynchronousTestCase):
    def message(self, got: Exchange) -> dict[str, Any]:
        found: dict[str, Any] = got.json["choices"][0]["message"]
        return found

    def test_calls(self) -> None:
        """
        Calls have their ids, names and arguments, no content, and the answer ends with tool_calls (BR-079).
        """
        first, second = call(0, "c1", "weather", '{"city": "Paris"}'), call(1, "c2", "clock", "{}")
        got = ask(deltas(delta("", "", first, second), tokens=3), tools=[tool(), tool("clock")])
        self.assertEqual(
            self.message(got),
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
                    {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
                ],
            },
        )
        self.assertEqual(got.json["choices"][0]["finish_reason"], "tool_calls")

    def test_pieces_run_together(self) -> None:
        """
        A whole answer that the backend made in pieces is one answer.
        """
        pieces = [
            delta("", "hm"),
            delta("", ", "),
            delta("I ", "", call(0, "c1", "weather")),
            delta("look.", "", call(0, "", "", '{"ci'), call(1, "c2", "clock", "{}")),
            delta("", "", call(0, "", "", 'ty": 1}')),
        ]
        message = self.message(ask(deltas(*pieces), tools=[tool()]))
        self.assertEqual((message["content"], message["reasoning_content"]), ("I look.", "hm, "))
        self.assertEqual(
            [one["function"] for one in message["tool_calls"]],
            [{"name": "weather", "arguments": '{"city": 1}'}, {"name": "clock", "arguments": "{}"}],
        )

    def test_text_is_not_told_twice(self) -> None:
        """
        A backend that says its text raw and split is heard once: split.
        """
        raw = b"<think>hm</think>Hello"
        message = self.message(ask(deltas(delta("Hello", "hm"), message=raw)))
        self.assertEqual((message["content"], message["reasoning_content"]), ("Hello", "hm"))
        got = World(FakeChannel(reply=deltas(delta("Hello"), message=b"Hello"))).send(
            "POST", "/v1/completions", {"model": "tiny", "prompt": "x"}
        )
        self.assertEqual(got.json["choices"][0]["text"], "Hello")

    def test_a_call_without_an_id(self) -> None:
        """
        A call that comes without an id gets one, or nobody could answer it.
        """
        message = self.message(ask(deltas(delta("", "", call(0, "", "weather", "{}"))), tools=[tool()]))
        self.assertRegex(message["tool_calls"][0]["id"], "^call_[0-9a-f]{24}$")

    def test_calls_with_one_number(self) -> None:
        """
        Calls that the backend all numbers alike are told apart by their ids.
        """
        calls = [call(0, "a", "weather", "{}"), call(0, "b", "clock", "{}")]
        message = self.message(ask(deltas(delta("", "", *calls)), tools=[tool()]))
        self.assertEqual([one["id"] for one in message["tool_calls"]], ["a", "b"])

    def test_one_call_was_wanted(self) -> None:
        """
        Whoever wants one call at a time gets the first, whatever the backend does.
        """
        calls = [call(0, "a", "weather"), call(1, "b", "clock", "{}"), call(0, "", "", "{}"), call(1, "", "", "x")]
        got = ask(deltas(delta("", "", *calls), tokens=5), tools=[tool()], parallel_tool_calls=False, max_tokens=5)
        self.assertEqual(got.json["choices"][0]["finish_reason"], "tool_calls")
        self.assertEqual([one["id"] for one in self.message(got)["tool_calls"]], ["a"])
        self.assertEqual(self.message(got)["tool_calls"][0]["function"]["arguments"], "{}")

    def test_no_call(self) -> None:
        """
        An answer without a call has no tool_calls and doesn't end with them, though tools were offered (BR-079).
        """
        for reply in (pb.Reply(message=b"no"), deltas(delta("no")), deltas(delta("no", "", call(0)))):
            got = ask(reply, tools=[tool()], tool_choice="required")
            self.assertEqual(self.message(got), {"role": "assistant", "content": "no", "refusal": None})
            self.assertEqual(got.json["choices"][0]["finish_reason"], "stop")

    def test_cut_short(self) -> None:
        """
        A call that the limit of tokens cut short is told as that.
        """
        got = ask(deltas(delta("", "", call(0, "a", "weather", '{"ci')), tokens=5), tools=[tool()], max_tokens=5)
        self.assertEqual(got.json["choices"][0]["finish_reason"], "length")

    def test_likely(self) -> None:
        """
        How likely tokens were is told in OpenAI's shape, with as many others as asked for, and only if asked for.
        """
        others = [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}, {"token": "Ho", "logprob": -1.5}]
        token = {"id": 7, "token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": others}
        reply = pb.Reply(message=b"Hi", logprobs=json.dumps({"content": [token]}).encode())
        self.assertIsNone(ask(reply).json["choices"][0]["logprobs"])
        told = ask(reply, logprobs=True, top_logprobs=1).json["choices"][0]["logprobs"]
        wanted = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": others[:1]}
        self.assertEqual(told, {"content": [wanted], "refusal": None})
        for empty in (b"", b"null", b"{}", b'{"content": null}'):
            got = ask(pb.Reply(message=b"Hi", logprobs=empty), logprobs=True)
            self.assertIsNone(got.json["choices"][0]["logprobs"])
        for wrong in (b"x", b"[]", b'{"content": [{}]}', b"\xff"):
            got = ask(pb.Reply(message=b"Hi", logprobs=wrong), logprobs=True)
            self.assertEqual(got.status, 500)
            self.assertIn("logprobs", got.error["message"])


class StreamTests(SynchronousTestCase):
    def test_a_call_in_pieces(self) -> None:
        """
        Number, id and name come once, the arguments as they are made; the last chunk says tool_calls (BR-036, BR-079).
        """
        got = stream(
            deltas(delta("", "", call(0, "c1", "weather"))),
            deltas(delta("", "", call(0, "c1", "weather", '{"ci'))),
            deltas(delta("", "", call(0, "", "", 'ty": 1}'))),
            deltas(delta("", "", call(1, "c2", "clock", "{}"))),
            tools=[tool()],
        )
        self.assertEqual(
            [one["tool_calls"] for one in said(got)],
            [
                [{"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}],
                [{"index": 0, "function": {"arguments": '{"ci'}}],
                [{"index": 0, "function": {"arguments": 'ty": 1}'}}],
                [{"index": 1, "id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{}"}}],
            ],
        )
        self.assertEqual(ending(got), "tool_calls")
        reasons = [frame["choices"][0]["finish_reason"] for frame in got.frames[:-2]]
        self.assertEqual(reasons, [None] * 5)

    def test_a_name_that_comes_late(self) -> None:
        """
        A call whose name comes after its id is told both.
        """
        pieces = [call(0, "c1"), call(0, "", "weather"), call(0, "", "weather"), call(0, "", "", "{}")]
        got = stream(*(deltas(delta("", "", piece)) for piece in pieces), tools=[tool()])
        told = [one["tool_calls"][0]["function"] for one in said(got)]
        self.assertEqual(told, [{"arguments": ""}, {"name": "weather", "arguments": ""}, {"arguments": "{}"}])

    def test_thoughts_and_text(self) -> None:
        """
        What was thought and what is said come in fields of their own, once, though the backend says them raw too.
        """
        got = stream(
            deltas(delta("", "hm"), message=b"<think>hm"),
            pb.Reply(message=b"</think>"),
            deltas(delta("Hello"), message=b"Hello"),
        )
        self.assertEqual(said(got), [{"reasoning_content": "hm"}, {"content": "Hello"}])
        self.assertEqual(ending(got), "stop")

    def test_raw_first_and_split_at_the_end(self) -> None:
        """
        A backend that streams its text raw and ends with all of it split is heard once; its calls are told.
        """
        got = stream(
            pb.Reply(message=b"Let me "),
            pb.Reply(message=b"look."),
            deltas(delta("Let me look.", "", call(0, "c1", "weather", "{}"))),
            tools=[tool()],
        )
        self.assertEqual("".join(one.get("content", "") for one in said(got)), "Let me look.")
        self.assertEqual((said(got)[-1]["tool_calls"][0]["id"], ending(got)), ("c1", "tool_calls"))

    def test_one_call_was_wanted(self) -> None:
        """
        Streamed too, whoever wants one call at a time gets one; at the second the backend is stopped.
        """
        source = FakeStream()
        world = World(FakeChannel(stream=source))
        wish = {"stream": True, "tools": [tool()], "parallel_tool_calls": False, "max_tokens": 9}
        got = world.send("POST", "/v1/chat/completions", {**CHAT, **wish})
        source.feed(deltas(delta("", "", call(0, "a", "weather", "{"))))
        source.feed(deltas(delta("", "", call(0, "", "", "}")), tokens=8))
        self.assertFalse(source.cancelled)
        source.feed(deltas(delta("", "", call(1, "b", "clock")), tokens=9))
        self.assertEqual((source.cancelled, world.replicas.running, got.ended), (True, 0, True))
        pieces = [piece for one in said(got) for piece in one["tool_calls"]]
        self.assertEqual([(piece["index"], piece["function"]["arguments"]) for piece in pieces], [(0, "{"), (0, "}")])
        self.assertEqual(ending(got), "tool_calls")

    def test_likely(self) -> None:
        """
        Each chunk has the tokens it was made of; a token that is part of a character is told too.
        """
        replies = [
            pb.Reply(message=piece, logprobs=json.dumps({"content": [{"token": "t", "logprob": -1}]}).encode())
            for piece in (b"a", "é".encode()[:1], "é".encode()[1:])
        ]
        got = stream(*replies, logprobs=True)
        told = [frame["choices"][0] for frame in got.frames[1:-2]]
        self.assertEqual([one["delta"]["content"] for one in told], ["a", "", "é"])
        self.assertEqual([len(one["logprobs"]["content"]) for one in told], [1, 1, 1])

    def test_completions(self) -> None:
        """
        A completion streams text alone.
        """
        source = FakeStream()
        source.feed(deltas(delta("", "hm")), deltas(delta("Hi", "", call(0, "a", "b"))))
        source.finish()
        got = World(FakeChannel(stream=source)).send(
            "POST", "/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}
        )
        self.assertEqual([frame["choices"][0]["text"] for frame in got.frames[:-1]], ["Hi", ""])
