"""What OpenAI's clients send and get."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.catalog.snapshot import ModelProblem
from localai_dist.grpcclient.status import Origin, RpcError, StatusCode
from localai_dist.httpapi import resource
from localai_dist.loads.errors import LoadFailed, StillLoading
from localai_dist.loads.status import LoadStatus
from localai_dist.reach import Answer, Answered, Reconnecting, Unreached
from localai_dist.rpc import backend_pb2 as pb
from tests.httpapi.doubles import NODE, Exchange, FakeCatalog, World
from tests.serving.doubles import FakeChannel, FakeStream, make_model

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What is the capital of Kenya?"}]}


def streamed(*pieces: bytes, usage: tuple[int, int] = (0, 0)) -> FakeStream:
    stream = FakeStream()
    for count, piece in enumerate(pieces, 1):
        stream.feed(pb.Reply(message=piece, tokens=count, prompt_tokens=usage[0]))
    stream.finish()
    return stream


DATA = "data:image/png;base64,%s"


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


class WholeAnswerTests(SynchronousTestCase):
    def test_chat(self) -> None:
        """
        A chat answer has OpenAI's shape, the requested model's name, the engine's own counts and an id (WALK-4).
        """
        world = World()
        world.channel.reply = pb.Reply(message=b"Nairobi.", tokens=3, prompt_tokens=11)
        got = world.send("POST", "/v1/chat/completions", CHAT)
        self.assertEqual((got.status, got.headers["content-type"]), (200, "application/json"))
        self.assertRegex(got.headers["x-request-id"], "^[0-9a-f]{32}$")
        answer = got.json
        self.assertRegex(answer.pop("id"), "^chatcmpl-")
        self.assertEqual(
            answer,
            {
                "object": "chat.completion",
                "created": 1_000_000,
                "model": "tiny",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Nairobi.", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
            },
        )
        asked = world.channel.asked[0]
        self.assertEqual([(m.role, m.content) for m in asked.Messages], [("user", CHAT["messages"][0]["content"])])  # type: ignore[index]
        self.assertEqual(asked.CorrelationId, got.headers["x-request-id"])
        self.assertEqual(world.replicas.running, 0)

    def test_completion(self) -> None:
        """
        A completion has its text in the choice; both paths serve, with and without /v1 (WALK-4).
        """
        for path in ("/v1/completions", "/completions"):
            world = World()
            got = world.send("POST", path, {"model": "tiny", "prompt": ["Once"], "max_tokens": 2})
            self.assertEqual(got.json["object"], "text_completion")
            self.assertEqual(
                got.json["choices"], [{"text": "hello", "index": 0, "logprobs": None, "finish_reason": "length"}]
            )
            self.assertEqual((world.channel.asked[0].Prompt, world.channel.asked[0].Tokens), ("Once", 2))

    def test_wishes_reach_the_backend(self) -> None:
        """
        What the client asks for is what the backend is told; fields nobody knows are ignored (WALK-17).
        """
        world = World()
        wishes = {
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 3,
            "max_completion_tokens": 7,
            "max_tokens": 9,
            "seed": 42,
            "stop": ["a", "b"],
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "n": 1,
            "logit_bias": {"5": 1},
            "a_field_of_next_year": {},
            "stream": None,
        }
        self.assertEqual(world.send("POST", "/v1/chat/completions", {**CHAT, **wishes}).status, 200)
        told = world.channel.asked[0]
        self.assertEqual((told.Temperature, told.TopP, told.TopK, told.Tokens, told.Seed), (0, 0.5, 3, 7, 42))
        self.assertEqual(json.loads(told.LogitBias), {"5": 1})
        self.assertEqual((list(told.StopPrompts), told.PresencePenalty, told.FrequencyPenalty), (["a", "b"], 0.5, -0.5))

    def test_content_in_parts(self) -> None:
        """
        Text parts are joined; pictures that are in the request go to the backend, in their order.
        """
        world = World()
        said = [
            {"role": "user", "content": [_text("a"), _picture(DATA % "AAAA"), _text("b")]},
            {"role": "assistant", "content": "nice"},
            {"role": "user", "content": [_picture("DATA:image/PNG;Base64,BBBB")]},
        ]
        got = world.send("POST", "/v1/chat/completions", {"model": "tiny", "messages": said})
        self.assertEqual(got.status, 200, got.body)
        told = world.channel.asked[0]
        self.assertEqual([message.content for message in told.Messages], ["ab", "nice", ""])
        self.assertEqual(list(told.Images), ["AAAA", "BBBB"])

    def test_parts_that_are_not_served(self) -> None:
        """
        An address is not fetched, whatever it leads to; what is no picture, and other parts, are refused by name.
        """
        url = "messages[0].content[0].image_url.url"
        for part, param in (
            (_picture("http://169.254.169.254/latest/meta-data"), url),
            (_picture("HTTPS://example.org/cat.png"), url),
            (_picture("file:///etc/passwd"), url),
            (_picture("data:image/png,plain"), url),
            (_picture("data:text/html;base64,AAAA"), url),
            (_picture(DATA % "no base64!"), url),
            (_picture(DATA % "AAA"), url),
            (_picture(DATA % "===="), url),
            ({"type": "image_url"}, "messages[0].content[0].type"),
            ({"type": "text"}, "messages[0].content[0].type"),
            ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0].type"),
        ):
            world = World()
            body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
            got = world.send("POST", "/v1/chat/completions", body)
            self.assertEqual((got.status, got.error["param"]), (400, param), part)
            self.assertFalse(world.channel_asked)

    def test_embeddings(self) -> None:
        """
        Embeddings come as numbers or as base64, one for each input, with the prompt's tokens counted (WALK-4).
        """
        vectors = [
            pb.EmbeddingResult(embeddings=[0.5, -1.0], prompt_tokens=2),
            pb.EmbeddingResult(embeddings=[0.25, 2.0], prompt_tokens=3),
        ]
        world = World(FakeChannel(vectors=vectors))
        got = world.send("POST", "/v1/embeddings", {"model": "tiny", "input": ["a", "b"]}).json
        self.assertEqual([one["embedding"] for one in got["data"]], [[0.5, -1.0], [0.25, 2.0]])
        self.assertEqual([one["index"] for one in got["data"]], [0, 1])
        self.assertEqual((got["object"], got["model"]), ("list", "tiny"))
        self.assertEqual(got["usage"], {"prompt_tokens": 5, "total_tokens": 5})
        world = World(FakeChannel(vectors=vectors[:1]))
        asked = {"model": "tiny", "input": "a", "encoding_format": "base64"}
        got = world.send("POST", "/embeddings", asked).json
        self.assertEqual(struct.unpack("<2f", base64.b64decode(got["data"][0]["embedding"])), (0.5, -1.0))

    def test_models(self) -> None:
        """
        The list has every served model; a disabled one is not in it and is refused by name (WALK-4).
        """
        world = World()
        world.api.catalog.all().append(make_model("off", disabled=True))
        got = world.send("GET", "/v1/models").json
        self.assertEqual((got["object"], [one["id"] for one in got["data"]]), ("list", ["tiny", "words"]))
        self.assertEqual(got["data"][0], {"id": "tiny", "object": "model", "created": 0, "owned_by": "localai-dist"})
        self.assertEqual(world.send("GET", "/v1/models/words").json["id"], "words")
        got = world.send("POST", "/v1/chat/completions", {**CHAT, "model": "off"})
        self.assertEqual(
            (got.status, got.error["code"], got.error["type"]), (403, "model_disabled", "permission_error")
        )


class RefusalTests(SynchronousTestCase):
    def refused(self, body: Any, status: int, param: str | None, path: str = "/v1/chat/completions") -> str:
        got = World().send("POST", path, body)
        self.assertEqual((got.status, got.error["param"]), (status, param), got.error)
        self.assertEqual(got.error["type"], "invalid_request_error")
        self.assertIn("x-request-id", got.headers)
        return str(got.error["code"])

    def test_unknown_model(self) -> None:
        """
        A model nobody serves is 404 model_not_found, in the envelope (WALK-17).
        """
        self.assertEqual(self.refused({**CHAT, "model": "nope"}, 404, "model"), "model_not_found")
        got = World().send("GET", "/v1/models/nope")
        self.assertEqual((got.status, got.error["code"]), (404, "model_not_found"))

    def test_a_model_whose_file_is_broken(self) -> None:
        """
        A model with a broken file says what is wrong with it, and a mistyped one which names are like it.
        """
        problem = ModelProblem("mine.yaml", "mine", "context_size: want a number, got text")
        world = World(catalog=FakeCatalog(problems=[problem]))
        for path, body in (
            ("/v1/chat/completions", {**CHAT, "model": "mine"}),
            ("/backend/load", {"model": "mine"}),
        ):
            got = world.send("POST", path, body)
            self.assertEqual((got.status, got.error["code"]), (404, "model_not_found"))
            self.assertIn("mine.yaml is wrong: context_size: want a number, got text", got.error["message"])
        self.assertIn("mine.yaml", world.send("GET", "/v1/models/mine").error["message"])
        got = world.send("POST", "/v1/chat/completions", {**CHAT, "model": "word"})
        self.assertEqual(got.error["message"], "the model 'word' does not exist; did you mean words?")
        listed = world.send("GET", "/api/models/problems").json["problems"]
        self.assertEqual([(one["file"], one["model"], one["served"]) for one in listed], [("mine.yaml", "mine", False)])
        self.assertEqual(world.send("GET", "/api/models/problems", key=None).status, 401)

    def test_known_field_of_wrong_type_or_range(self) -> None:
        """
        A known field of a wrong type or range is a 400 that names the field (WALK-17).
        """
        for field, wrong in (
            ("temperature", "hot"),
            ("temperature", 2.1),
            ("temperature", -0.1),
            ("top_p", 1.5),
            ("top_k", -1),
            ("top_k", 2**31),
            ("repeat_penalty", 1e39),
            ("repeat_penalty", -1),
            ("min_p", 1e39),
            ("max_completion_tokens", 2**31),
            ("max_tokens", 2**31),
            ("max_tokens", 0),
            ("max_tokens", "many"),
            ("max_tokens", 2**40),
            ("seed", "x"),
            ("seed", 2**70),
            ("stop", 5),
            ("n", 2),
            ("stream", "yes"),
            ("presence_penalty", 3),
            ("frequency_penalty", -3),
            ("logit_bias", []),
            ("messages", []),
            ("messages", "hello"),
            ("model", 7),
            ("model", ""),
        ):
            self.assertEqual(self.refused({**CHAT, field: wrong}, 400, field), "invalid_request")
        self.refused({"model": "tiny"}, 400, "messages")
        self.refused({"messages": CHAT["messages"]}, 400, "model")
        self.refused({**CHAT, "messages": [{"content": "x"}]}, 400, "messages[0].role")
        self.refused({**CHAT, "messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role")
        for calls, param in (([1], "[0]"), ("x", ""), ({}, ""), ([{}, "x"], "[1]")):
            said = {"role": "assistant", "tool_calls": calls}
            self.refused({**CHAT, "messages": [said]}, 400, f"messages[0].tool_calls{param}")
        self.refused({**CHAT, "logit_bias": {"5": 101}}, 400, "logit_bias[...]")
        self.refused({**CHAT, "stream_options": {"include_usage": 3}}, 400, "stream_options.include_usage")
        self.refused({"model": "tiny"}, 400, "prompt", "/v1/completions")
        self.refused({"model": "tiny", "prompt": [1, 2]}, 400, "prompt[0]", "/v1/completions")
        self.refused({"model": "tiny", "input": []}, 400, "input", "/v1/embeddings")
        self.refused({"model": "tiny", "input": [""]}, 400, "input", "/v1/embeddings")
        bad = {"model": "tiny", "input": "x", "encoding_format": "hex"}
        self.refused(bad, 400, "encoding_format", "/v1/embeddings")

    def test_malformed_json(self) -> None:
        """
        A body that is no JSON, no object or no text is a 400 in the envelope (WALK-17).
        """
        for body in (b"{", b"[]", b"7", b"\xff\xfe", b"", b'{"model": "\xff"}', b"[" * 5000):
            got = World().send("POST", "/v1/chat/completions", body)
            self.assertEqual((got.status, got.error["code"]), (400, "invalid_request"), body[:20])
        calls = b'{"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [%b]}]}'
        for call in (b'{"id": "\xff"}', b'{"\xff": 1}', b'{"n": 1e999}', b'{"":' * 1500 + b"1" + b"}" * 1500):
            got = World().send("POST", "/v1/chat/completions", calls % call)
            self.assertEqual((got.status, got.error["code"]), (400, "invalid_request"), call[:20])

    def test_tool_calls_reach_the_backend(self) -> None:
        """
        The tool calls of an earlier answer go to the backend as the JSON they came as.
        """
        world = World()
        calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
        said = {"role": "assistant", "content": None, "tool_calls": calls}
        body = {**CHAT, "messages": [*CHAT["messages"], said]}  # type: ignore[misc]
        self.assertEqual(world.send("POST", "/v1/chat/completions", body).status, 200)
        self.assertEqual(json.loads(world.channel.asked[0].Messages[1].tool_calls), calls)

    def test_body_over_the_limit(self) -> None:
        """
        A body over the limit is refused before it is read (WALK-17).
        """
        world = World()
        exchange = world.send("POST", "/v1/chat/completions", None, content_length="10001")
        self.assertEqual((exchange.status, exchange.error["code"]), (413, "request_too_large"))
        self.assertEqual(exchange.error["type"], "invalid_request_error")

    def test_key(self) -> None:
        """
        Without a key, or with a wrong one, the answer is 401 with WWW-Authenticate; any way of sending it serves
        (WALK-17).
        """
        for key in (None, "wrong", ""):
            got = World().send("POST", "/v1/chat/completions", CHAT, key=key)
            self.assertEqual((got.status, got.headers["www-authenticate"]), (401, "Bearer"))
            self.assertEqual((got.error["code"], got.error["type"]), ("invalid_api_key", "invalid_request_error"))
        self.assertEqual(World().send("GET", "/v1/models", key=None, x_api_key="the-key").status, 200)
        self.assertEqual(World(keys=("a", "b")).send("GET", "/v1/models", key="b").status, 200)

    def test_bytes_that_are_no_text(self) -> None:
        """
        Headers and paths with bytes that are no text are refused like any other wrong ones.
        """
        for header in (b"authorization: Bearer \xff\xfe", b"x-localai-timeout: \xff"):
            world = World(keys=() if b"timeout" in header else ("the-key",))
            exchange = Exchange(world.site)
            exchange.receive(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + header + b"\r\n\r\n")
            self.assertEqual(exchange.status, 400 if b"timeout" in header else 401, header)
        exchange = Exchange(World().site)
        exchange.receive(b"GET /v1/%ff HTTP/1.1\r\nhost: x\r\n\r\n")
        self.assertEqual(exchange.status, 404)

    def test_no_key_configured(self) -> None:
        """
        With no key configured inference is open and the admin routes are closed.
        """
        world = World(keys=())
        self.assertEqual(world.send("GET", "/v1/models", key=None).status, 200)
        self.assertEqual(world.send("GET", "/api/nodes", key=None).status, 401)
        self.assertEqual(world.send("GET", "/api/nodes", key="anything").status, 401)
        self.assertEqual(world.send("GET", "/api/nodes", key="").status, 401)
        self.assertIn(b"set LOCALAI_API_KEY", world.send("GET", "/api/nodes", key="anything").body)

    def test_nobody_listens_for_what_failed(self) -> None:
        """
        A call that fails in an unforeseen way after its client left is logged, and nothing is written.
        """
        hold: Deferred[None] = Deferred(lambda waiting: waiting.errback(ZeroDivisionError()))
        got = World(FakeChannel(hold=hold)).send("POST", "/v1/chat/completions", CHAT)
        got.leave()
        self.assertEqual((got.raw, len(self.flushLoggedErrors(ZeroDivisionError))), (b"", 1))

    def test_answer_that_can_not_be_written(self) -> None:
        """
        An answer whose error can't even be told closes the connection: nobody hangs.
        """
        world = World()
        self.patch(type(world.api.catalog), "all", lambda _self: 1 / 0)
        got = world.send("GET", "/v1/models")
        self.assertEqual(got.status, 500)
        self.flushLoggedErrors(ZeroDivisionError)
        self.patch(resource, "send_error", lambda call, error: 1 / 0)
        got = world.send("GET", "/v1/models")
        self.assertEqual((got.raw, got.transport.disconnecting), (b"", True))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)

    def test_nothing_there(self) -> None:
        """
        An unknown path is 404 and a wrong method 405, both in the envelope.
        """
        got = World().send("GET", "/v1/nothing")
        self.assertEqual((got.status, got.error["code"]), (404, "not_found"))
        got = World().send("DELETE", "/v1/models")
        self.assertEqual((got.status, got.headers["allow"]), (405, "GET"))

    def test_request_id_is_adopted(self) -> None:
        """
        A client's own request id, or its correlation id, comes back; a dangerous one does not.
        """
        got = World().send("GET", "/v1/nothing", x_request_id="mine-1")
        self.assertEqual(got.headers["x-request-id"], "mine-1")
        got = World().send("GET", "/v1/models", x_correlation_id="corr-1")
        self.assertEqual((got.headers["x-request-id"], got.headers["x-correlation-id"]), ("corr-1", "corr-1"))
        got = World().send("GET", "/v1/models", x_request_id="a b")
        self.assertNotEqual(got.headers["x-request-id"], "a b")


class ConditionTests(SynchronousTestCase):
    def test_conditions_are_told(self) -> None:
        """
        Each condition has its own status, code, header and Retry-After, stream or not (WALK-16).
        """
        for stream in (False, True):
            world = World(Unreached(Reconnecting(NODE)))
            got = world.send("POST", "/v1/chat/completions", {**CHAT, "stream": stream})
            self.assertFalse(got.answered)
            world.clock.pump([0.25] * 21)
            self.assertEqual((got.status, got.error["code"]), (503, "worker_reconnecting"))
            self.assertEqual((got.headers["retry-after"], got.error["type"]), ("2", "server_error"))
            self.assertEqual(got.headers["x-localai-condition"], "worker_reconnecting")
            self.assertEqual(world.timers, [])

    def test_workers_own_words(self) -> None:
        """
        What the worker itself said is passed on as it said it.
        """
        error = RpcError(StatusCode.INTERNAL, "CUDA out of memory")
        got = World(FakeChannel(reply=error)).send("POST", "/v1/chat/completions", CHAT)
        self.assertEqual((got.status, got.error["code"]), (500, "worker_error"))
        self.assertIn("CUDA out of memory", got.error["message"])
        refused = RpcError(StatusCode.INVALID_ARGUMENT, "300 tokens do not fit into 256")
        got = World(FakeChannel(reply=refused)).send("POST", "/v1/chat/completions", CHAT)
        self.assertEqual((got.status, got.error["message"]), (400, "300 tokens do not fit into 256"))

    def test_model_loading(self) -> None:
        """
        A load that takes longer than the wait is 503 model_loading with what is known of it.
        """
        world = World()
        world.replicas.rows = []
        status = LoadStatus("tiny", "staging", "box", 41, 100, 1, 1, eta_seconds=30.0)
        world.loads.result = StillLoading(status)
        got = world.send("POST", "/v1/chat/completions", CHAT)
        self.assertEqual((got.status, got.error["code"], got.error["type"]), (503, "model_loading", "model_loading"))
        self.assertEqual((got.headers["retry-after"], got.json["loading"]["progress"]), ("30", 41.0))
        world.loads.result = LoadFailed("the file is truncated")
        got = world.send("POST", "/v1/chat/completions", CHAT)
        self.assertEqual((got.status, got.error["message"]), (500, "the file is truncated"))

    def test_own_deadline(self) -> None:
        """
        The caller's own deadline ends the request at the deadline with 504, and the call on the backend.
        """
        channel = FakeChannel(hold=Deferred())
        world = World(channel)
        got = world.send("POST", "/v1/chat/completions", CHAT, x_localai_timeout="5s")
        self.assertEqual(world.connect.deadlines, [1_000_005])
        world.clock.advance(5)
        self.assertEqual((got.status, got.error["code"], channel.cancelled), (504, "deadline_exceeded", True))
        for wrong in ("5", "soon", "0s", "-1s"):
            got = world.send("POST", "/v1/chat/completions", CHAT, x_localai_timeout=wrong)
            self.assertEqual((got.status, got.error["param"]), (400, "X-LocalAI-Timeout"))

    def test_client_leaves(self) -> None:
        """
        A client that leaves while it waits cancels the call on the backend (WALK-7).
        """
        channel = FakeChannel(hold=Deferred())
        world = World(channel)
        got = world.send("POST", "/v1/chat/completions", CHAT)
        got.leave()
        self.assertEqual((channel.cancelled, world.replicas.running, got.raw), (True, 0, b""))

    def test_unforeseen(self) -> None:
        """
        Something nobody foresaw is a 500 that names the request, and the log has the cause.
        """
        got = World(FakeChannel(reply=ZeroDivisionError("secret detail"))).send("POST", "/v1/chat/completions", CHAT)
        self.assertEqual((got.status, got.error["code"]), (500, "internal_error"))
        self.assertIn(got.headers["x-request-id"], got.error["message"])
        self.assertNotIn("secret detail", got.body.decode())
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)


class StreamTests(SynchronousTestCase):
    def ask(self, world: World, **wishes: Any) -> Any:
        return world.send("POST", "/v1/chat/completions", {**CHAT, "stream": True, **wishes})

    def test_framing(self) -> None:
        """
        The stream is OpenAI's: a role chunk, content chunks with null finish_reason, one final chunk, [DONE] (WALK-7).
        """
        world = World(FakeChannel(stream=streamed(b"Nai", b"robi")))
        got = self.ask(world)
        self.assertEqual((got.status, got.headers["content-type"]), (200, "text/event-stream; charset=utf-8"))
        self.assertIn("x-request-id", got.headers)
        *chunks, done = got.frames
        self.assertEqual(done, "[DONE]")
        choices = [chunk["choices"] for chunk in chunks]
        self.assertEqual(
            [(one[0]["delta"], one[0]["finish_reason"]) for one in choices],
            [
                ({"role": "assistant", "content": ""}, None),
                ({"content": "Nai"}, None),
                ({"content": "robi"}, None),
                ({}, "stop"),
            ],
        )
        self.assertEqual({chunk["object"] for chunk in chunks}, {"chat.completion.chunk"})
        self.assertEqual(
            {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks},
            {(chunks[0]["id"], 1_000_000, "tiny")},
        )
        self.assertNotIn("usage", chunks[0])
        self.assertTrue(got.ended)
        self.assertEqual((world.replicas.running, world.channel.asked), (0, []))

    def test_usage(self) -> None:
        """
        Usage comes in a trailer of its own when asked for, after the final chunk (WALK-4).
        """
        got = self.ask(
            World(FakeChannel(stream=streamed(b"a", b"b", usage=(5, 0)))), stream_options={"include_usage": True}
        )
        *chunks, last, trailer, done = got.frames
        self.assertEqual((last["choices"][0]["finish_reason"], done), ("stop", "[DONE]"))
        self.assertEqual(trailer["choices"], [])
        self.assertEqual(trailer["usage"], {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7})
        self.assertEqual([chunk["usage"] for chunk in [*chunks, last]], [None] * 4)

    def test_completion_stream(self) -> None:
        """
        A completion streams its text in the choices, with no role chunk.
        """
        world = World(FakeChannel(stream=streamed(b"a", b"b")))
        got = world.send("POST", "/v1/completions", {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 2})
        *chunks, done = got.frames
        self.assertEqual([one["choices"][0]["text"] for one in chunks], ["a", "b", ""])
        self.assertEqual([one["choices"][0]["finish_reason"] for one in chunks], [None, None, "length"])
        self.assertEqual((chunks[0]["object"], done), ("text_completion", "[DONE]"))

    def test_text_reaches_the_client_as_it_is_produced(self) -> None:
        """
        The first chunk is with the client before the backend has produced the last (WALK-7).
        """
        stream = FakeStream()
        got = self.ask(World(FakeChannel(stream=stream)))
        self.assertFalse(got.answered)
        stream.feed(b"one")
        self.assertEqual(got.frames[-1]["choices"][0]["delta"], {"content": "one"})
        stream.feed(b"two")
        self.assertEqual(got.frames[-1]["choices"][0]["delta"], {"content": "two"})
        stream.finish()
        self.assertTrue(got.ended)

    def test_split_characters(self) -> None:
        """
        A character split over tokens arrives whole; half a one at the end is marked, never an error.
        """
        snow = "☃".encode()
        got = self.ask(World(FakeChannel(stream=streamed(b"a" + snow[:1], snow[1:2], snow[2:] + b"b", snow[:2]))))
        texts = [one["choices"][0]["delta"].get("content") for one in got.frames[1:-2]]
        self.assertEqual(texts, ["a", "☃b", "\ufffd"])

    def test_slow_client_stops_the_backend(self) -> None:
        """
        A client that does not read stops the pulling of replies, and goes on where it was (WALK-6).
        """
        stream = FakeStream()
        stream.feed(*[b"x"] * 100)
        stream.finish()
        channel = FakeChannel(stream=FakeStream())
        world = World(channel)
        got = self.ask(world)
        assert isinstance(channel.stream, FakeStream)
        channel.stream.feed(b"first")
        got.pause()
        channel.stream.feed(*[b"x"] * 50)
        self.assertLessEqual(channel.stream.pulled, 2)
        world.clock.advance(60)
        self.assertEqual((channel.stream.pulled <= 2, got.comments), (True, 0))
        got.unpause()
        self.assertEqual(channel.stream.pulled, 51)
        channel.stream.finish()
        self.assertEqual((len(got.frames), got.ended), (1 + 51 + 1 + 1, True))

    def test_client_leaves(self) -> None:
        """
        A client that closes after three tokens cancels the call on the backend at once (WALK-7).
        """
        stream = FakeStream()
        world = World(FakeChannel(stream=stream))
        got = self.ask(world)
        stream.feed(b"1", b"2", b"3")
        self.assertEqual(world.replicas.running, 1)
        got.leave()
        self.assertEqual((stream.cancelled, world.replicas.running), (True, 0))
        self.assertEqual(world.timers, [])

    def test_client_that_is_paused_leaves(self) -> None:
        """
        A client that reads nothing and then closes cancels the call as well.
        """
        stream = FakeStream()
        world = World(FakeChannel(stream=stream))
        got = self.ask(world)
        stream.feed(b"1")
        got.pause()
        stream.feed(b"2", b"3")
        got.leave()
        self.assertEqual((stream.cancelled, world.replicas.running), (True, 0))

    def test_failure_in_a_begun_stream(self) -> None:
        """
        A stream that has begun and fails ends with one error frame, no [DONE], and the connection closes.
        """
        stream = FakeStream()
        world = World(FakeChannel(stream=stream))
        got = self.ask(world)
        stream.feed(b"one", RpcError(StatusCode.UNAVAILABLE, "lost", Origin.TRANSPORT))
        self.assertEqual(got.status, 200)
        self.assertEqual(got.frames[-1]["error"]["code"], "worker_unavailable")
        self.assertNotIn("[DONE]", got.frames)
        self.assertTrue(got.transport.disconnecting)
        self.assertEqual(world.replicas.running, 0)

    def test_failure_before_the_stream(self) -> None:
        """
        A failure before the first token still has its HTTP status.
        """
        error = Unreached(Answered(Answer.ERROR, "no such thing"))
        got = self.ask(World(error))
        self.assertEqual((got.status, got.error["message"]), (500, "no such thing"))
        self.assertEqual(got.headers["content-type"], "application/json")

    def test_long_wait(self) -> None:
        """
        A stream that waits long opens with a comment and says one every ten seconds; the tokens follow.
        """
        stream = FakeStream()
        world = World(FakeChannel(stream=stream))
        got = self.ask(world)
        world.clock.advance(9.9)
        self.assertFalse(got.answered)
        world.clock.advance(0.1)
        self.assertEqual((got.status, got.comments, got.frames), (200, 1, []))
        world.clock.advance(10)
        self.assertEqual(got.comments, 2)
        stream.feed(b"hi")
        world.clock.advance(9)
        self.assertEqual(got.comments, 2)
        stream.finish()
        self.assertEqual([frame["choices"][0]["delta"] for frame in got.frames[:-1]][1], {"content": "hi"})
        self.assertEqual(world.timers, [])

    def test_load_that_fails_after_a_long_wait(self) -> None:
        """
        A load that fails while its stream is open is an error frame.
        """
        stream = FakeStream()
        world = World(FakeChannel(stream=stream))
        got = self.ask(world)
        world.clock.advance(10)
        stream.feed(RpcError(StatusCode.INTERNAL, "the engine crashed"))
        self.assertEqual([list(frame) for frame in got.frames], [["error"]])
        self.assertIn("the engine crashed", got.frames[0]["error"]["message"])

    def test_deadline_in_a_stream(self) -> None:
        """
        The caller's deadline ends a begun stream with an error frame, and the call on the backend.
        """
        stream = FakeStream()
        world = World(FakeChannel(stream=stream))
        got = world.send("POST", "/v1/chat/completions", {**CHAT, "stream": True}, x_localai_timeout="5s")
        stream.feed(b"one")
        world.clock.advance(5)
        self.assertEqual((got.frames[-1]["error"]["code"], stream.cancelled), ("deadline_exceeded", True))
        self.assertEqual(world.replicas.running, 0)
