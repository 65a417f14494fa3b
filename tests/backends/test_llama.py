"""The llama-cpp backend as a worker runs it, with a real model."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import stat
import subprocess
from pathlib import Path
from unittest import SkipTest

import yaml
from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from localai_dist.grpcclient import BackendChannel, RpcError, StatusCode
from localai_dist.grpcclient.channel import ReplyStream
from localai_dist.rpc import backend_pb2 as pb
from tests.backends.programs import (
    FACTS,
    LLAMA,
    MODELS,
    TOKEN,
    Program,
    environment,
    gone_within,
    listening_addresses,
    next_line,
)
from tests.tunnel.sockets import no_connection_left

RUN = LLAMA / "run.sh"
KENYA = "What is the capital of Kenya?"
NAIROBI = b"The capital of Kenya is Nairobi."


def chat(text: str, **more: object) -> pb.PredictOptions:
    """A chat request for the tiny model."""
    message = pb.Message(role="user", content=text)
    return pb.PredictOptions(UseTokenizerTemplate=True, Messages=[message], Tokens=32, **more)  # type: ignore[arg-type]


def options(**more: object) -> pb.ModelOptions:
    """A load of the tiny model."""
    given = {"Model": "tiny-facts", "ModelFile": str(FACTS), "ContextSize": 256, "Threads": 1, "Embeddings": True}
    return pb.ModelOptions(**{**given, **more})


async def ending(stream: ReplyStream[pb.Reply]) -> StatusCode | None:
    """How a stream ends; None: with its whole answer."""
    try:
        async for _reply in stream:
            pass
    except RpcError as error:
        return error.status
    return None


class LlamaTestCase(TestCase):
    """A program and a channel to it."""

    timeout = 60
    channel: BackendChannel

    async def setUp(self) -> None:
        if importlib.util.find_spec("xllamacpp") is None:
            raise SkipTest("xllamacpp is not installed")
        self.program = Program([RUN, "--addr", "127.0.0.1:0"])
        self.addCleanup(no_connection_left)
        self.addCleanup(self.program.end)
        self.channel = await self.program.channel()
        self.addCleanup(self.channel.close)

    async def state(self) -> int:
        """The backend's state."""
        return (await self.channel.status()).state

    async def ready_within(self, seconds: float) -> None:
        """Wait for a free slot."""
        end = reactor.seconds() + seconds
        while await self.state() != pb.StatusResponse.READY:
            self.assertLess(reactor.seconds(), end, "the slot is not free")
            await deferLater(reactor, 0.005)


class AnswerTests(LlamaTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        result = await self.channel.load_model(options(), timeout=30)
        self.assertTrue(result.success, result.message)

    async def test_chat(self) -> None:
        """
        The tiny model knows the capital of Kenya, through its own chat template (WALK-4).
        """
        reply = await self.channel.predict(chat(KENYA))
        self.assertEqual(reply.message, NAIROBI)
        self.assertEqual([delta.content for delta in reply.chat_deltas], [NAIROBI.decode()])

    async def test_stream(self) -> None:
        """
        Streamed, the same answer comes in pieces, and the last reply has the same usage as the whole answer (WALK-4).
        """
        whole = await self.channel.predict(chat(KENYA))
        replies = [reply async for reply in self.channel.predict_stream(chat(KENYA))]
        self.assertGreater(len(replies), 5)
        self.assertEqual(b"".join(reply.message for reply in replies), NAIROBI)
        self.assertEqual((replies[-1].tokens, replies[-1].prompt_tokens), (whole.tokens, whole.prompt_tokens))
        counts = [reply.tokens for reply in replies]
        self.assertEqual(counts, sorted(counts))

    async def test_usage_is_the_tokenizers(self) -> None:
        """
        Usage equals what the model's tokenizer says of prompt and answer; a prompt begins and an answer ends
        with a token of its own (WALK-4).
        """
        reply = await self.channel.predict(chat(KENYA))
        prompt = f"<|user|>{KENYA}<|end|><|assistant|>"
        asked = await self.channel.tokenize(pb.PredictOptions(Prompt=prompt))
        said = await self.channel.tokenize(pb.PredictOptions(Prompt=NAIROBI.decode() + "<|end|>"))
        self.assertEqual((reply.prompt_tokens, reply.tokens), (1 + asked.length, said.length))
        self.assertEqual(len(asked.tokens), asked.length)

    async def test_completion(self) -> None:
        """
        A plain prompt is continued, up to the tokens asked for.
        """
        reply = await self.channel.predict(pb.PredictOptions(Prompt="Once upon a time", Tokens=5))
        self.assertEqual(reply.tokens, 5)
        self.assertTrue(reply.message.startswith(b" there was"), reply.message)

    async def test_embedding(self) -> None:
        """
        An embedding has one normalised vector, the same for the same text, another for another (WALK-4).
        """
        first = await self.channel.embedding(pb.PredictOptions(Embeddings="hello world"))
        again = await self.channel.embedding(pb.PredictOptions(Embeddings="hello world"))
        other = await self.channel.embedding(pb.PredictOptions(Embeddings="grass is green"))
        self.assertEqual((len(first.embeddings), first.layout), (first.dim, pb.EmbeddingResult.LAYOUT_FINAL))
        self.assertAlmostEqual(math.hypot(*first.embeddings), 1.0, places=3)
        self.assertAlmostEqual(math.dist(first.embeddings, again.embeddings), 0.0, places=3)
        self.assertGreater(math.dist(first.embeddings, other.embeddings), 0.01)
        self.assertGreater(first.prompt_tokens, 0)

    async def test_cancel_frees_the_slot(self) -> None:
        """
        A client that leaves after three tokens frees the slot within 2 s (WALK-7).
        """
        stream = self.channel.predict_stream(pb.PredictOptions(Prompt="Once upon a time", Tokens=240, IgnoreEOS=True))
        for _ in range(3):
            await stream.__anext__()
        stream.cancel()
        await self.ready_within(2.0)
        self.assertEqual((await self.channel.predict(chat(KENYA))).message, NAIROBI)

    async def test_cancelled_whole_answer_frees_the_slot(self) -> None:
        """
        So does a caller that stops waiting for a whole answer.
        """
        request = pb.PredictOptions(Prompt="Once upon a time", Tokens=240, IgnoreEOS=True)
        with self.assertRaises(RpcError) as caught:
            await self.channel.predict(request, timeout=0.01)
        self.assertEqual(caught.exception.status, StatusCode.DEADLINE_EXCEEDED)
        await self.ready_within(2.0)

    async def test_many_at_once(self) -> None:
        """
        Requests that come together are all answered, and Health answers meanwhile.
        """
        calls = [Deferred.fromCoroutine(self.channel.predict(chat(KENYA))) for _ in range(20)]
        self.assertTrue(await self.channel.health())
        self.assertEqual({reply.message for reply in await gatherResults(calls)}, {NAIROBI})

    async def test_identity(self) -> None:
        """
        A caller that means another model is told so, in the words routing looks for.
        """
        self.assertEqual((await self.channel.predict(chat(KENYA, ModelIdentity="tiny-facts"))).message, NAIROBI)
        for call in (self.channel.predict, self.channel.embedding, self.channel.tokenize):
            with self.assertRaises(RpcError) as caught:
                await call(chat(KENYA, ModelIdentity="other"))
            self.assertEqual(caught.exception.status, StatusCode.NOT_FOUND)
            self.assertIn("model identity mismatch", caught.exception.details)

    async def test_refusals(self) -> None:
        """
        What the engine can't take is the caller's error, in the engine's words.
        """
        for request in (
            pb.PredictOptions(Prompt="x " * 5000),
            chat("x", Images=["a"]),
            chat("x", Grammar="root ::= ("),
        ):
            with self.assertRaises(RpcError) as caught:
                await self.channel.predict(request)
            self.assertEqual(caught.exception.status, StatusCode.INVALID_ARGUMENT, caught.exception.details)
        for given in (pb.PredictOptions(Embeddings="x " * 5000), pb.PredictOptions(EmbeddingTokens=[1] * 5000)):
            with self.assertRaises(RpcError) as caught:
                await self.channel.embedding(given)
            self.assertEqual(caught.exception.status, StatusCode.INVALID_ARGUMENT, caught.exception.details)
            self.assertIn("tokens) is too large", caught.exception.details)

    async def test_free_ends_what_runs(self) -> None:
        """
        Free ends running answers with "not loaded", gives the memory back and leaves a working backend (WALK-21).
        """
        request = pb.PredictOptions(Prompt="Once upon a time", Tokens=240, IgnoreEOS=True)
        streams = [self.channel.predict_stream(request) for _ in range(20)]
        await streams[0].__anext__()
        self.assertTrue((await self.channel.free()).success)
        ends = [await ending(stream) for stream in streams]
        self.assertEqual(set(ends) - {None}, {StatusCode.FAILED_PRECONDITION}, "whoever had no turn before it")
        self.assertEqual(await self.state(), pb.StatusResponse.UNINITIALIZED)
        with self.assertRaises(RpcError) as caught:
            await self.channel.predict(chat(KENYA))
        self.assertEqual(
            (caught.exception.status, caught.exception.details), (StatusCode.FAILED_PRECONDITION, "model not loaded")
        )
        self.assertTrue((await self.channel.load_model(options(), timeout=30)).success)
        self.assertEqual((await self.channel.predict(chat(KENYA))).message, NAIROBI)


class LoadTests(LlamaTestCase):
    async def test_failed_loads_say_why(self) -> None:
        """
        A model that can't be loaded is reported with the engine's reason, and the backend goes on.
        """
        folder = Path(self.mktemp()).absolute()
        folder.mkdir()
        (folder / "junk.gguf").write_bytes(b"junk" * 1000)
        (folder / "cut.gguf").write_bytes(FACTS.read_bytes()[:400_000])
        for name, reason in (("missing.gguf", "no such model file"), ("junk.gguf", "magic"), ("cut.gguf", "cut.gguf")):
            result = await self.channel.load_model(options(ModelFile=str(folder / name)), timeout=30)
            self.assertFalse(result.success)
            self.assertIn(reason, result.message)
        self.assertFalse((await self.channel.load_model(pb.ModelOptions(), timeout=30)).success)
        self.assertTrue((await self.channel.load_model(options(), timeout=30)).success)

    async def test_another_model_replaces_the_first(self) -> None:
        """
        Loading another model answers with its knowledge.
        """
        words = options(Model="tiny-words", ModelFile="tiny-words-1m-q8_0.gguf", ModelPath=str(MODELS))
        self.assertTrue((await self.channel.load_model(options(), timeout=30)).success)
        self.assertTrue((await self.channel.load_model(words, timeout=30)).success)
        reply = await self.channel.predict(chat("What is cat in French?", ModelIdentity="tiny-words"))
        self.assertEqual(reply.message, b"The French word for cat is chat.")

    async def test_padded_file(self) -> None:
        """
        A model in a file much larger than its tensors loads and answers, mapped into memory or read.
        """
        padded = Path(self.mktemp()).absolute()
        padded.write_bytes(FACTS.read_bytes())
        os.truncate(padded, 256 * 1024 * 1024)
        for mapped in (True, False):
            result = await self.channel.load_model(options(ModelFile=str(padded), MMap=mapped), timeout=30)
            self.assertTrue(result.success, result.message)
            self.assertEqual((await self.channel.predict(chat(KENYA))).message, NAIROBI)

    async def test_slots(self) -> None:
        """
        With several slots each has the whole context.
        """
        self.assertTrue((await self.channel.load_model(options(Options=["parallel:3"]), timeout=30)).success)
        request = pb.PredictOptions(Prompt="Once upon a time", Tokens=200, IgnoreEOS=True)
        calls = [Deferred.fromCoroutine(self.channel.predict(request)) for _ in range(3)]
        self.assertEqual([reply.tokens for reply in await gatherResults(calls)], [200] * 3)

    async def test_token(self) -> None:
        """
        Without the backend's own token nothing is answered, Health included.
        """
        for token in ("", "wrong"):
            channel = await self.program.channel(token)
            with self.assertRaises(RpcError) as caught:
                await channel.status()
            self.assertEqual(caught.exception.status, StatusCode.UNAUTHENTICATED)
            self.assertFalse(await channel.health())
            channel.close()

    async def test_only_loopback_and_no_secret(self) -> None:
        """
        It listens on loopback alone, the engine's own port included; its command line has no token (WALK-8, WALK-23).
        """
        self.assertTrue((await self.channel.load_model(options(), timeout=30)).success)
        pid = self.program.process.pid
        self.assertEqual(listening_addresses(pid), {"0100007F", "0000000000000000FFFF00000100007F"})
        self.assertNotIn(TOKEN.encode(), Path(f"/proc/{pid}/cmdline").read_bytes())


class ProgramTests(SynchronousTestCase):
    """Starting and ending."""

    def refused(self, *arguments: str, **env: str) -> str:
        """What it says when it won't start."""
        ended = subprocess.run([RUN, *arguments], env=environment(**env), capture_output=True, text=True, timeout=30)
        self.assertNotEqual(ended.returncode, 0)
        self.assertNotIn("Traceback", ended.stderr)
        return ended.stderr

    def test_refuses_to_start(self) -> None:
        """
        Without a token, on an address others can reach, or on a port somebody holds, it says so and exits.
        """
        self.assertIn("LOCALAI_GRPC_AUTH_TOKEN", self.refused("--addr", "127.0.0.1:0", LOCALAI_GRPC_AUTH_TOKEN=""))
        self.assertIn("loopback", self.refused("--addr", "0.0.0.0:0"))
        self.assertIn("--addr", self.refused())
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            self.assertIn("can't listen", self.refused("--addr", f"127.0.0.1:{holder.getsockname()[1]}"))

    def test_sigterm(self) -> None:
        """
        Asked to end, it ends well.
        """
        program = Program([RUN, "--addr", "127.0.0.1:0"])
        self.addCleanup(program.end)
        program.process.terminate()
        self.assertEqual(program.process.wait(10), 0)

    def test_ends_with_its_parent(self) -> None:
        """
        Its parent killed, it ends by itself within 5 s (WALK-11).
        """
        parent = subprocess.Popen(
            ["/bin/sh", "-c", f'"{RUN}" --addr 127.0.0.1:0 & echo $!; wait'],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(parent.wait)
        assert parent.stdout is not None
        self.addCleanup(parent.stdout.close)
        pid = int(next_line(parent))
        self.assertIn("listening", next_line(parent))
        os.kill(parent.pid, signal.SIGKILL)
        self.assertTrue(gone_within(pid, 5.0))

    def test_directory_form(self) -> None:
        """
        It installs like every backend: the gallery names a folder with an executable run.sh and metadata.json, and a
        copy of that folder runs (WALK-11).
        """
        index = yaml.safe_load((LLAMA.parent / "index.yaml").read_text())
        entry = next(entry for entry in index if entry["name"] == "llama-cpp")
        folder = LLAMA.parent / entry["uri"]
        self.assertEqual(json.loads((folder / "metadata.json").read_text())["name"], "llama-cpp")
        copy = Path(self.mktemp()).absolute()
        shutil.copytree(folder, copy)
        self.assertTrue((copy / "run.sh").stat().st_mode & stat.S_IXUSR)
        program = Program([copy / "run.sh", "--addr", "127.0.0.1:0"])
        self.addCleanup(program.end)
        self.assertGreater(program.port, 0)
