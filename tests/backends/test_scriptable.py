"""The scriptable test backend: freshly generated stubs, started and spoken to like any backend of LocalAI."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import yaml
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from localai_dist.grpcclient import BackendChannel, Origin, RpcError, StatusCode
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.testing import backend
from tests.backends.programs import Program, gone_within
from tests.tunnel.sockets import no_connection_left


class ScriptableTests(TestCase):
    timeout = 60
    channel: BackendChannel

    async def setUp(self) -> None:
        self.folder = backend.install(Path(self.mktemp()).absolute())
        self.program = Program([self.folder / "run.sh", "--addr", "127.0.0.1:0"])
        self.addCleanup(no_connection_left)
        self.addCleanup(self.program.end)
        self.channel = await self.program.channel()
        self.addCleanup(self.channel.close)
        self.events_file = self.folder / "events"

    async def load(self, **script: object) -> pb.Result:
        """Load with a script."""
        told = [f"test:{name}={value}" for name, value in {"events": self.events_file, **script}.items()]
        return await self.channel.load_model(pb.ModelOptions(Model="m", Options=told), timeout=10)

    async def event(self, name: str, seconds: float = 20.0) -> dict[str, object]:
        """The event of that name, reported within ``seconds``; what follows the last newline is still being written."""
        end = reactor.seconds() + seconds
        while True:
            lines = self.events_file.read_text().split("\n")[:-1] if self.events_file.exists() else []
            for line in map(json.loads, lines):
                if line["event"] == name:
                    return line
            self.assertLess(reactor.seconds(), end, f"no {name} in {lines}")
            await deferLater(reactor, 0.01)

    async def test_all_calls(self) -> None:
        """
        A program that never saw this package answers Health, LoadModel, Predict, PredictStream and Embedding (WALK-12).
        """
        self.assertTrue(await self.channel.health())
        with self.assertRaises(RpcError) as caught:
            await self.channel.predict(pb.PredictOptions())
        self.assertEqual(caught.exception.status, StatusCode.FAILED_PRECONDITION)
        self.assertTrue((await self.load(answer="one two three", dim=3)).success)
        reply = await self.channel.predict(pb.PredictOptions(Prompt="a b", ModelIdentity="m"))
        self.assertEqual((reply.message, reply.tokens, reply.prompt_tokens), (b"one two three", 3, 2))
        said = [reply.message async for reply in self.channel.predict_stream(pb.PredictOptions(Tokens=2))]
        self.assertEqual(said, [b"one", b" two"])
        self.assertEqual(len((await self.channel.embedding(pb.PredictOptions(Embeddings="x"))).embeddings), 3)
        self.assertEqual((await self.channel.tokenize(pb.PredictOptions(Prompt="a b c"))).length, 3)
        self.assertEqual((await self.channel.status()).state, pb.StatusResponse.READY)

    async def test_deltas(self) -> None:
        """
        It answers with the chat deltas it is told, and reports the messages and tools it was asked with.
        """
        call = {"index": 0, "id": "c1", "name": "f", "arguments": "{"}
        deltas = [[{"content": "hm"}], [{"tool_calls": [call]}, {"tool_calls": [{"arguments": "}"}]}]]
        await self.load(deltas=json.dumps(deltas))
        message = pb.Message(role="tool", content="wet", tool_call_id="c0")
        request = pb.PredictOptions(Messages=[message], Tools="[]", ToolChoice='"auto"', Metadata={"a": "b"})
        replies = [reply async for reply in self.channel.predict_stream(request)]
        self.assertEqual([len(reply.chat_deltas) for reply in replies], [1, 2])
        whole = await self.channel.predict(request)
        self.assertEqual(
            list(whole.chat_deltas),
            [
                pb.ChatDelta(content="hm"),
                pb.ChatDelta(tool_calls=[pb.ToolCallDelta(**call)]),
                pb.ChatDelta(tool_calls=[pb.ToolCallDelta(arguments="}")]),
            ],
        )
        event = await self.event("start")
        self.assertEqual(event["messages"], [{"role": "tool", "content": "wet", "tool_call_id": "c0"}])
        self.assertEqual((event["tools"], event["choice"], event["hints"]), ("[]", '"auto"', {"a": "b"}))

    async def test_gate(self) -> None:
        """
        It holds its second token back until a file is there, or nobody listens any more.
        """
        gate = self.folder / "gate"
        await self.load(gate=gate, tokens=3)
        stream = self.channel.predict_stream(pb.PredictOptions())
        await stream.__anext__()
        stream.cancel()
        await self.event("cancelled")
        stream = self.channel.predict_stream(pb.PredictOptions())
        await stream.__anext__()
        self.assertNotIn('"done"', self.events_file.read_text())
        gate.touch()
        self.assertEqual(len([reply async for reply in stream]), 2)
        await self.event("done")

    async def test_cancel_is_reported(self) -> None:
        """
        It reports a cancellation within 2 s, with how far it had come (WALK-7).
        """
        await self.load(delay=0.05, tokens=1000)
        stream = self.channel.predict_stream(pb.PredictOptions())
        for _ in range(3):
            await stream.__anext__()
        stream.cancel()
        event = await self.event("cancelled", 2.0)
        self.assertLess(event["tokens"], 1000)
        self.assertEqual((await self.channel.status()).state, pb.StatusResponse.READY)

    async def test_end_gate(self) -> None:
        """
        All tokens said, an answer stands before its end until the gate's file is there, or until it is given up.
        """
        gate = self.folder / "end-gate"
        await self.load(end_gate=gate, tokens=2)
        given_up = self.channel.predict_stream(pb.PredictOptions())
        for _ in range(2):
            await given_up.__anext__()
        given_up.cancel()
        self.assertEqual((await self.event("cancelled"))["tokens"], 2)
        stream = self.channel.predict_stream(pb.PredictOptions())
        for _ in range(2):
            await stream.__anext__()
        end = Deferred.fromCoroutine(rest_of(stream))
        self.assertTrue(await self.channel.health())
        self.assertFalse(end.called)
        gate.touch()
        self.assertEqual(await end, [])

    async def test_unread_answer(self) -> None:
        """
        Of a 50 MB answer nobody reads it makes a bounded part; leaving ends it (WALK-6).
        """
        await self.load(reply_bytes=50_000_000)
        stream = self.channel.predict_stream(pb.PredictOptions())
        await self.event("start")
        for _ in range(50):
            self.assertTrue(await self.channel.health())
        stream.cancel()
        event = await self.event("cancelled", 2.0)
        self.assertLess(event["tokens"], 50_000_000 // 65536 // 2)

    async def test_bad_frees(self) -> None:
        """
        Free fails, or hangs, when told to (WALK-21).
        """
        await self.load(free="fail")
        self.assertFalse((await self.channel.free()).success)
        await self.load(free="hang")
        with self.assertRaises(RpcError) as caught:
            await self.channel.free(timeout=0.2)
        self.assertEqual(caught.exception.status, StatusCode.DEADLINE_EXCEEDED)
        await self.load()
        self.assertTrue((await self.channel.free()).success)

    async def test_bad_ends(self) -> None:
        """
        It survives SIGTERM when told to, and dies in the middle of an answer when told to (WALK-21).
        """
        await self.load(sigterm="ignore", die_at=3)
        self.program.process.send_signal(signal.SIGTERM)
        await self.event("sigterm")
        self.assertTrue(await self.channel.health())
        got = 0
        with self.assertRaises(RpcError) as caught:
            async for _reply in self.channel.predict_stream(pb.PredictOptions()):
                got += 1
        self.assertLessEqual(got, 2)
        self.assertEqual(caught.exception.origin, Origin.TRANSPORT)
        self.assertTrue(gone_within(self.program.process.pid, 2.0))

    async def test_errors(self) -> None:
        """
        Loads and answers fail when told to, with the text told.
        """
        self.assertFalse((await self.load(load="fail")).success)
        await self.load(error_at=2, error="out of luck", health="bad")
        with self.assertRaises(RpcError) as caught:
            await self.channel.predict(pb.PredictOptions())
        self.assertEqual((caught.exception.status, caught.exception.details), (StatusCode.INTERNAL, "out of luck"))
        self.assertFalse(await self.channel.health())
        await self.load(load_delay=0)
        gate = self.folder / "gate"
        held = Deferred.fromCoroutine(self.load(load_gate=gate, load="fail"))
        self.assertTrue(await self.channel.health())
        self.assertFalse(held.called)
        gate.touch()
        self.assertFalse((await held).success)
        call = Deferred.fromCoroutine(self.load(load="hang"))
        await self.event("load")
        call.cancel()
        call.addErrback(lambda _cancelled: None)


async def rest_of(stream: AsyncIterator[pb.Reply]) -> list[pb.Reply]:
    """What still comes."""
    return [reply async for reply in stream]


class FormTests(TestCase):
    def test_directory_form(self) -> None:
        """
        It installs as a folder with run.sh and metadata.json, and as a gallery that names one.
        """
        gallery = Path(self.mktemp()).absolute()
        index = yaml.safe_load(backend.write_gallery(gallery).read_text())
        folder = gallery / index[0]["uri"]
        self.assertTrue((folder / "run.sh").stat().st_mode & stat.S_IXUSR)
        self.assertEqual(json.loads((folder / "metadata.json").read_text())["name"], index[0]["name"])
        self.assertNotIn("localai_dist.", (folder / "backend_pb2_grpc.py").read_text())

    def test_runs_by_itself(self) -> None:
        """
        It also runs without being installed, and leaves no folder behind.
        """
        temporary = Path(self.mktemp()).absolute()
        temporary.mkdir()
        program = Program(
            [sys.executable, "-m", "localai_dist.testing.backend", "--addr", "127.0.0.1:0"], TMPDIR=str(temporary)
        )
        self.addCleanup(program.end)
        self.assertEqual(os.listdir(temporary), [])
        shutil.rmtree(temporary)
