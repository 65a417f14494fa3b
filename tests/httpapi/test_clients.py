"""The official client over a real socket: shapes it accepts, and a client that leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import openai
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from localai_dist.rpc import backend_pb2 as pb
from tests.httpapi.doubles import KEY, World
from tests.serving.doubles import FakeChannel, FakeStream

T = TypeVar("T")


class Served(TestCase):
    timeout = 120

    def serve(self, channel: FakeChannel) -> World:
        world = World(channel)
        port = reactor.listenTCP(0, world.site, interface="127.0.0.1")  # type: ignore[attr-defined]
        self.addCleanup(port.stopListening)
        self.port = port.getHost().port
        return world

    def call(self, ask: Callable[[openai.OpenAI], T], key: str = KEY) -> Deferred[T]:
        """Run ``ask`` with the official client, in a thread as its users do."""

        def work() -> T:
            with openai.OpenAI(api_key=key, base_url=f"http://127.0.0.1:{self.port}/v1", max_retries=0) as client:
                return ask(client)

        return deferToThread(work)


class OfficialClientTests(Served):
    async def test_models(self) -> None:
        """
        The official client lists the models (WALK-4).
        """
        self.serve(FakeChannel())
        names = await self.call(lambda client: [model.id for model in client.models.list()])
        self.assertEqual(names, ["tiny", "words"])

    async def test_chat(self) -> None:
        """
        The official client reads a chat answer, its usage and its request id (WALK-4).
        """
        self.serve(FakeChannel(reply=pb.Reply(message=b"Nairobi.", tokens=3, prompt_tokens=11)))
        messages: Any = [{"role": "user", "content": "?"}]
        answer = await self.call(lambda client: client.chat.completions.create(model="tiny", messages=messages))
        self.assertEqual(answer.choices[0].message.content, "Nairobi.")
        self.assertEqual((answer.choices[0].finish_reason, answer.usage and answer.usage.total_tokens), ("stop", 14))
        self.assertTrue(answer._request_id)

    async def test_streams(self) -> None:
        """
        The official client reads a stream with comments in it, its text and the usage at its end (WALK-4, WALK-7).
        """
        stream = FakeStream()
        world = self.serve(FakeChannel(stream=stream))
        messages: Any = [{"role": "user", "content": "?"}]

        def read(client: openai.OpenAI) -> list[Any]:
            chunks = client.chat.completions.create(
                model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            return list(chunks)

        reading = self.call(read)
        while not world.channel_asked:
            await pause(0.01)
        world.clock.advance(10)
        stream.feed(pb.Reply(message=b"Nai", tokens=1, prompt_tokens=4), pb.Reply(message=b"robi", tokens=2))
        stream.finish()
        chunks = await reading
        texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        self.assertEqual(texts, ["", "Nai", "robi", None])
        self.assertEqual((chunks[-1].choices, chunks[-1].usage.total_tokens), ([], 6))

    async def test_embeddings(self) -> None:
        """
        The official client reads embeddings, which it asks for as base64 by itself (WALK-4).
        """
        self.serve(FakeChannel(vectors=[pb.EmbeddingResult(embeddings=[0.5, -1.0], prompt_tokens=2)]))
        answer = await self.call(lambda client: client.embeddings.create(model="tiny", input="x"))
        self.assertEqual((list(answer.data[0].embedding), answer.usage.prompt_tokens), ([0.5, -1.0], 2))

    async def test_errors(self) -> None:
        """
        The official client raises the exception that belongs to each refusal (WALK-17).
        """
        self.serve(FakeChannel())
        messages: Any = [{"role": "user", "content": "?"}]

        def ask(client: openai.OpenAI) -> Any:
            return client.chat.completions.create(model="nope", messages=messages)

        error = await self.assertFailure(self.call(ask), openai.NotFoundError)
        self.assertEqual((error.code, error.param), ("model_not_found", "model"))
        await self.assertFailure(self.call(ask, key="wrong"), openai.AuthenticationError)


class LeavingTests(Served):
    async def test_client_that_closes(self) -> None:
        """
        A client that closes its connection in the middle of a stream cancels the call on the backend (WALK-7).
        """
        stream = FakeStream()
        world = self.serve(FakeChannel(stream=stream))
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", self.port)
        client = await endpoint.connect(Factory.forProtocol(Protocol))
        body = b'{"model": "tiny", "stream": true, "messages": [{"role": "user", "content": "x"}]}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        client.transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        while not world.channel_asked:
            await pause(0.01)
        stream.feed(b"1", b"2", b"3")
        client.transport.loseConnection()
        while not stream.cancelled:
            await pause(0.01)
        self.assertEqual(world.replicas.running, 0)


async def pause(seconds: float) -> None:
    turn: Deferred[None] = Deferred()
    reactor.callLater(seconds, turn.callback, None)  # type: ignore[attr-defined]
    await turn
