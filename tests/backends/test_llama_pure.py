"""Requests and replies of the llama-cpp backend, as values."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.backends.llama_cpp.asked import BadRequest, embedding_input, engine_settings, generation
from localai_dist.backends.llama_cpp.replies import joined, reply_of
from localai_dist.rpc import backend_pb2 as pb


def tool(name: str) -> dict[str, object]:
    """A tool, and a choice of it."""
    return {"type": "function", "function": {"name": name}}


class SettingsTests(SynchronousTestCase):
    def test_relative_file(self) -> None:
        """
        A model file is looked for under the models folder, unless it is absolute.
        """
        found = engine_settings(pb.ModelOptions(ModelFile="a/b.gguf", ModelPath="/models", MMProj="p.gguf"))
        self.assertEqual((found.model_file, found.mmproj), ("/models/a/b.gguf", "/models/p.gguf"))
        self.assertEqual(
            engine_settings(pb.ModelOptions(ModelFile="/x.gguf", ModelPath="/models")).model_file, "/x.gguf"
        )

    def test_slots(self) -> None:
        """
        ``parallel:N`` gives N slots; without it there is one; nonsense is refused by name.
        """
        four = pb.ModelOptions(ModelFile="/x", ContextSize=9, Options=["parallel:4"])
        self.assertEqual(engine_settings(four).slots, 4)
        self.assertEqual(engine_settings(pb.ModelOptions(ModelFile="/x", Options=["other"])).slots, 1)
        for wrong in ("0", "many", "-1"):
            options = pb.ModelOptions(ModelFile="/x", Options=[f"parallel:{wrong}"])
            self.assertIn(wrong, str(self.assertRaises(BadRequest, engine_settings, options)))

    def test_slots_need_a_context(self) -> None:
        """
        Several slots without a context size are refused: nobody could say what each gets.
        """
        options = pb.ModelOptions(ModelFile="/x", Options=["parallel:3"])
        self.assertIn("context_size", str(self.assertRaises(BadRequest, engine_settings, options)))

    @given(st.integers(1, 64), st.integers(0, 5000))
    def test_batch_divides_among_slots(self, slots: int, batch: int) -> None:
        """
        Whatever was asked for, a batch divides evenly among the slots: the engine aborts otherwise.
        """
        options = pb.ModelOptions(ModelFile="/x", ContextSize=9, NBatch=batch, Options=[f"parallel:{slots}"])
        found = engine_settings(options).batch
        self.assertEqual(found % slots, 0)
        self.assertLess(found - (batch or 512), slots)

    def test_no_file(self) -> None:
        """
        A load that names no file is refused, and so is an adapter that would be ignored.
        """
        self.assertRaises(BadRequest, engine_settings, pb.ModelOptions())
        self.assertRaises(BadRequest, engine_settings, pb.ModelOptions(ModelFile="/x", LoraAdapter="a"))


class GenerationTests(SynchronousTestCase):
    def test_chat(self) -> None:
        """
        With the tokenizer's template asked for, messages and tools go to the engine as they are.
        """
        options = pb.PredictOptions(
            UseTokenizerTemplate=True,
            Messages=[
                pb.Message(role="user", content="hi"),
                pb.Message(role="assistant", tool_calls='[{"id": "1"}]'),
                pb.Message(role="tool", content="42", tool_call_id="1"),
            ],
            Tools=json.dumps([tool("f"), tool("g")]),
            ToolChoice='"required"',
            Tokens=7,
            Temperature=0,
            StopPrompts=["end"],
            LogitBias='{"5": -1}',
            Metadata={"enable_thinking": "false"},
            Logprobs=1,
            TopLogprobs=3,
        )
        chat, body = generation(options)
        self.assertTrue(chat)
        self.assertEqual(body["messages"][0], {"role": "user", "content": "hi"})
        self.assertEqual(body["messages"][1]["tool_calls"], [{"id": "1"}])
        self.assertEqual(body["messages"][2]["tool_call_id"], "1")
        self.assertEqual(body["tools"], [tool("f"), tool("g")])
        self.assertEqual(body["tool_choice"], "required")
        self.assertNotIn("parallel_tool_calls", body)
        self.assertEqual((body["max_tokens"], body["temperature"], body["stop"]), (7, 0.0, ["end"]))
        self.assertEqual(body["logit_bias"], {"5": -1})
        self.assertEqual(body["chat_template_kwargs"], {"enable_thinking": False})
        self.assertEqual((body["logprobs"], body["top_logprobs"]), (True, 3))
        self.assertNotIn("top_k", body)

    def test_plain(self) -> None:
        """
        Without messages, or without the template, the prompt is completed; what is zero is left to the engine.
        """
        for options in (
            pb.PredictOptions(Prompt="Once", TopK=5, UseTokenizerTemplate=True),
            pb.PredictOptions(Prompt="Once", TopK=5, Messages=[pb.Message(role="user")]),
        ):
            chat, body = generation(options)
            self.assertFalse(chat)
            self.assertEqual((body["prompt"], body["top_k"], body["max_tokens"]), ("Once", 5, -1))
        self.assertEqual(generation(pb.PredictOptions(Mirostat=2, MirostatTAU=0.5))[1]["mirostat_tau"], 0.5)
        self.assertEqual(generation(pb.PredictOptions(Logprobs=2))[1]["logprobs"], 2)

    def test_refusals(self) -> None:
        """
        Media, and JSON that is none, are refused by name instead of ignored.
        """
        chat = {"UseTokenizerTemplate": True, "Messages": [pb.Message(role="user")]}
        tools = json.dumps([tool("f")])
        cases = [
            (pb.PredictOptions(Images=["x"]), "text only"),
            (pb.PredictOptions(LogitBias="{"), "LogitBias"),
            (pb.PredictOptions(Tools="{", **chat), "Tools"),
            (pb.PredictOptions(Tools="{}", **chat), "Tools"),
            (pb.PredictOptions(Tools="[5]", **chat), "Tools"),
            (pb.PredictOptions(Tools='[{"function": {"name": 5}}]', **chat), "Tools"),
            (pb.PredictOptions(Tools=tools, ToolChoice="sometimes", **chat), "ToolChoice"),
            (pb.PredictOptions(Tools=tools, ToolChoice='"sometimes"', **chat), "ToolChoice"),
            (pb.PredictOptions(Tools=tools, ToolChoice="[]", **chat), "ToolChoice"),
            (pb.PredictOptions(Tools=tools, ToolChoice=json.dumps(tool("g")), **chat), "'g'"),
        ]
        for options, named in cases:
            self.assertIn(named, str(self.assertRaises(BadRequest, generation, options)))
        self.assertNotIn("tool_choice", generation(pb.PredictOptions(ToolChoice="auto", **chat))[1])

    def test_tool_choices(self) -> None:
        """
        A choice is a word, bare or quoted; one by name leaves that tool alone and requires it, which is what the engine
        knows; one call at a time is asked for where the caller wants it.
        """
        chat = {"UseTokenizerTemplate": True, "Messages": [pb.Message(role="user")]}
        tools = json.dumps([tool("f"), tool("g")])
        for text, told in (("", "auto"), ("none", "none"), ('"none"', "none"), ("required", "required")):
            body = generation(pb.PredictOptions(Tools=tools, ToolChoice=text, **chat))[1]
            self.assertEqual((body["tool_choice"], len(body["tools"])), (told, 2))
        body = generation(
            pb.PredictOptions(
                Tools=tools, ToolChoice=json.dumps(tool("g")), Metadata={"parallel_tool_calls": "false"}, **chat
            )
        )[1]
        self.assertEqual(
            (body["tools"], body["tool_choice"], body["parallel_tool_calls"]), ([tool("g")], "required", False)
        )

    def test_embedding_input(self) -> None:
        """
        Token ids win over text.
        """
        self.assertEqual(embedding_input(pb.PredictOptions(EmbeddingTokens=[1, 2], Embeddings="x")), [1, 2])
        self.assertEqual(embedding_input(pb.PredictOptions(Embeddings="x", Prompt="y")), "x")
        self.assertEqual(embedding_input(pb.PredictOptions(Prompt="y")), "y")


class ReplyTests(SynchronousTestCase):
    def test_pieces(self) -> None:
        """
        Text, reasoning and tool calls each come as what they are; chunks that say nothing make no reply.
        """
        self.assertIsNone(reply_of({"choices": [{"delta": {"role": "assistant", "content": None}}]}))
        self.assertIsNone(reply_of({"choices": [{"finish_reason": "stop", "delta": {}}]}))
        told = reply_of({"choices": [{"delta": {"content": "hi"}}], "timings": {"predicted_n": 2, "prompt_n": 3}})
        assert told is not None
        self.assertEqual((told.message, told.tokens, told.prompt_tokens), (b"hi", 2, 3))
        call = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{}"}}
        told = reply_of({"choices": [{"delta": {"reasoning_content": "hm", "tool_calls": [call]}}]})
        assert told is not None
        self.assertEqual(told.message, b"")
        self.assertEqual(told.chat_deltas[0].reasoning_content, "hm")
        self.assertEqual(told.chat_deltas[0].tool_calls[0].name, "f")
        told = reply_of({"choices": [{"text": " plain"}]})
        assert told is not None
        self.assertEqual(told.message, b" plain")

    def test_usage(self) -> None:
        """
        The last reply carries the engine's own count, cached prompt tokens included.
        """
        chunk = {"choices": [], "usage": {"completion_tokens": 16, "prompt_tokens": 14}, "timings": {"prompt_n": 1}}
        told = reply_of(chunk)
        assert told is not None
        self.assertEqual((told.message, told.tokens, told.prompt_tokens), (b"", 16, 14))

    def test_joined(self) -> None:
        """
        A whole answer is its pieces run together, with the numbers of the last.
        """
        self.assertEqual(joined([]), pb.Reply())
        pieces = [
            {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [1]}}]},
            {"choices": [{"delta": {"content": "b"}, "logprobs": {"content": [2]}}]},
            {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]},
            {"choices": [], "usage": {"completion_tokens": 9, "prompt_tokens": 4}},
        ]
        whole = joined(reply for reply in map(reply_of, pieces) if reply is not None)
        self.assertEqual((whole.message, whole.tokens, whole.prompt_tokens), (b"ab", 9, 4))
        self.assertEqual([delta.content for delta in whole.chat_deltas], ["ab", ""])
        self.assertEqual(json.loads(whole.logprobs), {"content": [1, 2]})
