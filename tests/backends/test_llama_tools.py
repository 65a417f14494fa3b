"""Tools and grammars of the llama-cpp backend, with a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from localai_dist.grpcclient import RpcError, StatusCode
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.serving.grammar import ANY_OBJECT
from localai_dist.serving.schemas import grammar_for
from tests.backends.programs import FACTS
from tests.backends.test_llama import KENYA, NAIROBI, LlamaTestCase, chat, options
from tests.support.gguf import with_template

TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]},
            },
        }
    ]
)
NO_BREAKS = json.dumps({"\n": -100, "\t": -100})
"""The tiny model would fill its context with them: the engine's grammar lets it."""


class WithoutToolsTests(LlamaTestCase):
    """The tiny model as it is."""

    async def setUp(self) -> None:
        await super().setUp()
        result = await self.channel.load_model(options(), timeout=30)
        self.assertTrue(result.success, result.message)

    async def test_a_grammar_of_a_schema(self) -> None:
        """
        The engine keeps to the grammars that frontends make of schemas: what the tiny model says is valid.
        """
        place = {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "kind": {"enum": ['a "b"\n', 2, None]},
                "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
                "when": {"type": "string", "format": "date-time"},
                "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            },
            "required": ["city", "kind", "tags", "when"],
            "additionalProperties": False,
        }
        valid = 0
        for seed in range(10):
            request = chat(KENYA, Grammar=grammar_for(place), Temperature=1.5, Seed=seed)
            request.Tokens = 220
            reply = await self.channel.predict(request)
            if reply.tokens < 220:  # not cut short
                jsonschema.validate(json.loads(reply.message), place)
                valid += 1
        self.assertGreater(valid, 0)
        reply = await self.channel.predict(chat(KENYA, Grammar=grammar_for({"enum": ["yes", "no"]})))
        self.assertIn(json.loads(reply.message), ("yes", "no"))
        reply = await self.channel.predict(chat(KENYA, Grammar=ANY_OBJECT))
        self.assertTrue(reply.message.startswith(b"{"), reply.message)

    async def test_tools_nobody_would_hear_of(self) -> None:
        """
        A model whose template has no place for tools, or for their results, says so instead of leaving them out.
        """
        call = '[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]'
        told = chat("x")
        told.Messages.append(pb.Message(role="assistant", tool_calls=call))
        for request in (chat("x", Tools=TOOLS), chat("x", Tools=TOOLS, ToolChoice="required"), told):
            with self.assertRaises(RpcError) as caught:
                await self.channel.predict(request)
            self.assertEqual(caught.exception.status, StatusCode.INVALID_ARGUMENT)
            self.assertIn("template in its file has no place", caught.exception.details)
        self.assertEqual((await self.channel.predict(chat(KENYA, Tools=TOOLS, ToolChoice="none"))).message, NAIROBI)


class ToolTests(LlamaTestCase):
    """The tiny model, its template replaced by one with a place for tools; it must be led to call one."""

    async def setUp(self) -> None:
        await super().setUp()
        model = with_template(FACTS, Path(self.mktemp()).absolute())
        result = await self.channel.load_model(options(ModelFile=str(model)), timeout=30)
        self.assertTrue(result.success, result.message)

    def asked(self, **more: Any) -> pb.PredictOptions:
        """A request that must call a tool, and whose answer has begun to."""
        request = chat("hi", Tools=TOOLS, ToolChoice='"required"', LogitBias=NO_BREAKS, **more)
        request.Metadata["parallel_tool_calls"] = "false"
        request.Messages.append(pb.Message(role="assistant", content="I look.<tool_call>\n"))
        return request

    async def test_a_call(self) -> None:
        """
        A call that the engine makes out in what the model says comes as a call, whole and in pieces.
        """
        whole = await self.channel.predict(self.asked())
        replies = [reply async for reply in self.channel.predict_stream(self.asked())]
        self.assertGreater(len(replies), 3)
        for found in ([whole], replies):
            calls = [call for reply in found for delta in reply.chat_deltas for call in delta.tool_calls]
            first = [call for call in calls if call.index == 0]
            self.assertEqual((first[0].name, len({call.id for call in first if call.id})), ("f", 1))
            self.assertIn(json.loads("".join(call.arguments for call in first)), ({"a": "x"}, {"a": "y"}))
            self.assertEqual(b"".join(reply.message for reply in found), b"")

    async def test_choices_and_results(self) -> None:
        """
        Of several tools the one that is named is called; calls and results of before have their place in the prompt.
        """
        named = '{"type": "function", "function": {"name": "g"}}'
        two = json.dumps([*json.loads(TOOLS), json.loads(TOOLS.replace('"f"', '"g"'))[0]])
        request = self.asked()
        request.Tools, request.ToolChoice = two, named
        (delta, *_) = (await self.channel.predict(request)).chat_deltas
        self.assertEqual(delta.tool_calls[0].name, "g")
        before = await self.channel.predict(chat("hi"))
        told = chat("hi")
        call = '[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\\"a\\": \\"x\\"}"}}]'
        told.Messages.extend([pb.Message(role="assistant", tool_calls=call), pb.Message(role="tool", content="wet")])
        self.assertGreater((await self.channel.predict(told)).prompt_tokens, before.prompt_tokens + 20)

    async def test_a_grammar_beside_tools(self) -> None:
        """
        What the engine does not take together is the caller's error, in its words.
        """
        with self.assertRaises(RpcError) as caught:
            await self.channel.predict(self.asked(Grammar='root ::= "a"'))
        self.assertEqual(caught.exception.status, StatusCode.INVALID_ARGUMENT)
        self.assertIn("grammar", caught.exception.details)
