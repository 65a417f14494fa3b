"""
A scriptable backend: speaks ``backend.proto`` by stubs generated freshly beside it, and imports nothing of ours.

``localai_dist.testing.backend`` copies this file into a folder of its own with ``backend_pb2.py`` and
``backend_pb2_grpc.py``; see there for what can be scripted.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

pb: Any = importlib.import_module("backend_pb2")
stubs: Any = importlib.import_module("backend_pb2_grpc")

_Interceptor: Any = grpc.ServerInterceptor

LIMIT = 50 * 1024 * 1024
PIECE = 64 * 1024


class Script:
    """What ``test:`` options of LoadModel asked for, and the file it reports to."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._lock = threading.Lock()

    def learn(self, options: list[str]) -> None:
        """Take the options of a load; those of an earlier load are forgotten."""
        pairs = (option.removeprefix("test:").partition("=") for option in options if option.startswith("test:"))
        self._told = {name: value for name, _, value in pairs}

    def text(self, name: str, default: str = "") -> str:
        """An option as text."""
        return self._told.get(name, default)

    def number(self, name: str, default: float = 0) -> float:
        """An option as a number."""
        return float(self._told.get(name, default))

    def report(self, event: str, **facts: object) -> None:
        """Append one JSON line to the file of option ``events``, if there is one."""
        path = self.text("events")
        if path:
            line = json.dumps({"event": event, "pid": os.getpid(), "at": time.time(), **facts})
            with self._lock, open(path, "a") as file:
                file.write(line + "\n")


class Running:
    """One call that runs: how much it said, whether that was all, and whether anybody still listens."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.said = 0
        self.whole = False


class TestBackend(stubs.BackendServicer):
    """Answers as its script says."""

    def __init__(self) -> None:
        self.script = Script()
        self.loaded: str | None = None
        self._running = 0
        self._lock = threading.Lock()

    def Health(self, request: Any, context: Any) -> Any:
        return pb.Reply(message=b"OK" if self.script.text("health", "ok") == "ok" else b"BAD")

    def LoadModel(self, request: Any, context: Any) -> Any:
        self.script.learn(list(request.Options))
        self.script.report("load", model=request.Model, file=request.ModelFile, path=request.ModelPath)
        self._wait_at_gate()
        time.sleep(self.script.number("load_delay"))
        if self.script.text("load", "ok") == "hang":
            threading.Event().wait()
        if self.script.text("load", "ok") == "die":
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short
        if self.script.text("load", "ok") == "fail":
            return pb.Result(success=False, message="the script says: no load")
        self.loaded = request.Model
        return pb.Result(success=True, message="loaded")

    def Free(self, request: Any, context: Any) -> Any:
        how = self.script.text("free", "ok")
        self.script.report("free", how=how)
        if how == "hang":
            self._until_cancelled(context, 3600)
        if how == "fail":
            return pb.Result(success=False, message="the script says: no free")
        self.loaded = None
        return pb.Result(success=True, message="freed")

    def Status(self, request: Any, context: Any) -> Any:
        state = "BUSY" if self._running else "READY" if self.loaded is not None else "UNINITIALIZED"
        return pb.StatusResponse(state=state, memory={"total": 1})

    def Predict(self, request: Any, context: Any) -> Any:
        sent = list(self._generate("Predict", request, context))
        return pb.Reply(
            message=b"".join(reply.message for reply in sent),
            chat_deltas=[delta for reply in sent for delta in reply.chat_deltas],
            tokens=len(sent),
            prompt_tokens=_words(request),
        )

    def PredictStream(self, request: Any, context: Any) -> Iterator[Any]:
        yield from self._generate("PredictStream", request, context)

    def Embedding(self, request: Any, context: Any) -> Any:
        self._check(request, context)
        size = int(self.script.number("dim", 4))
        text = request.Embeddings or request.Prompt
        seed = sum(text.encode()) or 1
        count = len(text.split())
        vector = [((seed * (index + 1)) % 97) / 97 for index in range(size)]
        return pb.EmbeddingResult(embeddings=vector, dim=size, tokens=count, prompt_tokens=count)

    def AudioTranscription(self, request: Any, context: Any) -> Any:
        """Reads the file it is given: its size and hash are the text, and a pause before each segment."""
        if self.script.text("transcribe") == "no":
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not implemented!")
        self._check(request, context)
        facts = {
            "language": request.language,
            "prompt": request.prompt,
            "temperature": round(request.temperature, 3),
            "translate": request.translate,
        }
        with self._told("AudioTranscription", context, file=request.dst, **facts) as call:
            try:
                with open(request.dst, "rb") as file:
                    heard = hashlib.file_digest(file, "sha256").hexdigest()
                    size = file.tell()
            except OSError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the recording can't be read: {error}")
            words = [f"{size} bytes", f"sha256 {heard}"]
            for number, _ in enumerate(words, 1):
                if call.cancelled.wait(self.script.number("delay")) or self._dies(context, number):
                    return pb.TranscriptResult()
                call.said = number
            call.whole = True
        seconds = 1_000_000_000
        segments = [
            pb.TranscriptSegment(id=n, start=n * seconds, end=(n + 1) * seconds, text=word, tokens=[n])
            for n, word in enumerate(words)
        ]
        return pb.TranscriptResult(
            text=" ".join(words), segments=segments, language=request.language or "en", duration=len(words)
        )

    def TokenizeString(self, request: Any, context: Any) -> Any:
        self._check(request, context)
        words = request.Prompt.split()
        return pb.TokenizationResponse(length=len(words), tokens=list(range(len(words))))

    # -- inside ----------------------------------------------------------------------------------------------

    def _wait_at_gate(self) -> None:
        """A load that is held up until its test says so: by a file that comes."""
        gate = self.script.text("load_gate")
        while gate and not os.path.exists(gate):
            time.sleep(0.02)

    def _check(self, request: Any, context: Any) -> None:
        if self.loaded is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "model not loaded")
        if request.ModelIdentity and request.ModelIdentity != self.loaded:
            context.abort(grpc.StatusCode.NOT_FOUND, "model identity mismatch")

    def _generate(self, method: str, request: Any, context: Any) -> Iterator[Any]:
        self._check(request, context)
        with self._told(method, context, **_asked(request)) as call:
            for number, reply in enumerate(self._replies(request), 1):
                call.said = number
                if number == 2 and not self._passes_the_gate(call, "gate"):
                    return
                if call.cancelled.wait(self.script.number("delay")) or self._dies(context, number):
                    return
                reply.tokens, reply.prompt_tokens = number, _words(request)
                yield reply
            call.whole = self._passes_the_gate(call, "end_gate")

    def _passes_the_gate(self, call: Running, option: str) -> bool:
        """Whether the call may go on: it stands until the gate is open, a file, or until it is given up."""
        gate = self.script.text(option)
        while gate and not os.path.exists(gate):
            if call.cancelled.wait(0.02):
                return False
        return True

    @contextmanager
    def _told(self, method: str, context: Any, **facts: object) -> Iterator[Running]:
        """Report the beginning and the end of one call."""
        call = Running()
        if not context.add_callback(call.cancelled.set):
            call.cancelled.set()
        self.script.report("start", method=method, **facts)
        with self._lock:
            self._running += 1
        try:
            yield call
        finally:
            with self._lock:
                self._running -= 1
            self.script.report("done" if call.whole else "cancelled", method=method, tokens=call.said)

    def _replies(self, request: Any) -> Iterator[Any]:
        deltas = self.script.text("deltas")
        if deltas:
            return (pb.Reply(chat_deltas=[pb.ChatDelta(**delta) for delta in reply]) for reply in json.loads(deltas))
        return (pb.Reply(message=piece) for piece in self._pieces(request))

    def _pieces(self, request: Any) -> Iterator[bytes]:
        size = int(self.script.number("reply_bytes"))
        if size:
            piece = int(self.script.number("piece_bytes", PIECE))
            for start in range(0, size, piece):
                yield b"x" * min(piece, size - start)
            return
        answer = self.script.text("answer")
        words = answer.split() if answer else [f"token{n}" for n in range(int(self.script.number("tokens", 10)))]
        for index, word in enumerate(words[: request.Tokens or None]):
            yield (word if index == 0 else f" {word}").encode()

    def _dies(self, context: Any, number: int) -> bool:
        if number == self.script.number("die_at"):
            os._exit(9)
        if number == self.script.number("error_at"):
            context.abort(grpc.StatusCode.INTERNAL, self.script.text("error", "the script says: no more"))
        return False

    def _until_cancelled(self, context: Any, seconds: float) -> None:
        cancelled = threading.Event()
        if context.add_callback(cancelled.set):
            cancelled.wait(seconds)


class TokenCheck(_Interceptor):
    """Every call must present the token of the environment, if there is one."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Go on, or refuse."""
        given = dict(handler_call_details.invocation_metadata).get("authorization")
        if not self._token or given == f"Bearer {self._token}":
            return continuation(handler_call_details)

        def refuse(request: Any, context: Any) -> Any:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong backend token")

        return grpc.unary_unary_rpc_method_handler(refuse)


def _asked(request: Any) -> dict[str, object]:
    """What a test wants to know of a request."""
    messages = [
        {field.name: value for field, value in message.ListFields()}  # those that are not empty
        for message in request.Messages
    ]
    return {
        "images": list(request.Images),
        "messages": messages,
        "tools": request.Tools,
        "choice": request.ToolChoice,
        "grammar": request.Grammar,
        "hints": dict(request.Metadata),
    }


def _words(request: Any) -> int:
    return sum(len(message.content.split()) for message in request.Messages) or len(request.Prompt.split())


def _end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Serve until SIGTERM (unless the script ignores it) or until the parent ends."""
    parser = argparse.ArgumentParser(description="scriptable test backend")
    parser.add_argument("--addr", required=True)
    parser.add_argument("--remove", help="folder of this program, to be removed once it runs")
    options = parser.parse_args()
    _end_with_parent()
    if options.remove:
        shutil.rmtree(options.remove)
    backend = TestBackend()
    server = grpc.server(
        ThreadPoolExecutor(64),
        interceptors=[TokenCheck(os.environ.get("LOCALAI_GRPC_AUTH_TOKEN", ""))],
        options=[
            ("grpc.max_receive_message_length", LIMIT),
            ("grpc.max_send_message_length", LIMIT),
            ("grpc.so_reuseport", 0),
        ],
    )
    stubs.add_BackendServicer_to_server(backend, server)
    try:
        port = server.add_insecure_port(options.addr)
    except RuntimeError:
        sys.exit(f"test backend: can't listen on {options.addr}")
    server.start()
    ended = threading.Event()

    def asked_to_end(_number: int, _frame: object) -> None:
        backend.script.report("sigterm")
        if backend.script.text("sigterm", "obey") == "obey":
            ended.set()

    signal.signal(signal.SIGTERM, asked_to_end)
    sys.stdout.write(f"listening on {options.addr.rpartition(':')[0]}:{port}\n")
    sys.stdout.flush()
    ended.wait()
    server.stop(0.2).wait()
    os._exit(0)


if __name__ == "__main__":
    main()
