"""The calls of the contract, on one asyncio loop; the engine works in threads."""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio

from localai_dist.backends.llama_cpp.asked import (
    BadRequest,
    EngineSettings,
    embedding_input,
    engine_settings,
    generation,
)
from localai_dist.backends.llama_cpp.engine import Engine, EngineError
from localai_dist.backends.llama_cpp.flow import Flow
from localai_dist.backends.llama_cpp.replies import joined, reply_of
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.rpc import backend_pb2_grpc

T = TypeVar("T")
Context: TypeAlias = Any
"""grpc.aio.ServicerContext; its published types differ by release."""
_Interceptor: Any = grpc.aio.ServerInterceptor

_THREADS = 64


class TokenCheck(_Interceptor):
    """Lets a call through that presents the token; every call has to."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """Refuse with UNAUTHENTICATED, or go on."""
        for name, value in handler_call_details.invocation_metadata:
            given = value if isinstance(value, bytes) else value.encode()
            if name == "authorization" and hmac.compare_digest(given, self._wanted):
                return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(_request: object, context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong backend token")
    raise AssertionError("abort raises")


class LlamaService(backend_pb2_grpc.BackendServicer):
    """One model at a time. ``start_engine`` is the engine's constructor (tests give another)."""

    def __init__(self, start_engine: Callable[[EngineSettings], Engine] = Engine) -> None:
        self._start_engine = start_engine
        self._engine: Engine | None = None
        self._identity = ""
        self._changing = asyncio.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="engine")
        self._running: set[asyncio.Task[Any]] = set()
        self._flows: set[Flow] = set()

    async def Health(self, request: pb.HealthMessage, context: Context) -> pb.Reply:
        """Alive, with or without a model."""
        return pb.Reply(message=b"OK")

    async def LoadModel(self, request: pb.ModelOptions, context: Context) -> pb.Result:
        """Load a model in place of the one that is loaded; a failure is told in the result."""
        async with self._changing:
            await self._drop()
            try:
                settings = engine_settings(request)
                self._engine = await self._in_thread(self._start_engine, settings)
            except (BadRequest, EngineError) as error:
                return pb.Result(success=False, message=str(error))
            self._identity = request.Model
        return pb.Result(success=True, message="loaded")

    async def Free(self, request: pb.HealthMessage, context: Context) -> pb.Result:
        """Stop what runs and give the model's memory back."""
        async with self._changing:
            await self._drop()
        return pb.Result(success=True, message="freed")

    async def Status(self, request: pb.HealthMessage, context: Context) -> pb.StatusResponse:
        """State, and this process's resident memory."""
        state = "BUSY" if self._running else "READY" if self._engine else "UNINITIALIZED"
        resident = _resident()
        return pb.StatusResponse(state=state, memory=pb.MemoryUsageData(total=resident, breakdown={"rss": resident}))

    async def Predict(self, request: pb.PredictOptions, context: Context) -> pb.Reply:
        """The whole answer; cancelled like a stream."""
        async with aclosing(self._replies(request, context)) as replies:
            return joined([reply async for reply in replies])

    async def PredictStream(self, request: pb.PredictOptions, context: Context) -> None:
        """The answer as it is generated. A caller that stops reading stops it; one that cancels frees the slot."""
        # A coroutine, not an async generator: grpc closes a generator of a cancelled call only when it is collected.
        async with aclosing(self._replies(request, context)) as replies:
            async for reply in replies:
                await context.write(reply)

    async def Embedding(self, request: pb.PredictOptions, context: Context) -> pb.EmbeddingResult:
        """Mean-pooled, normalised."""
        engine = await self._loaded(request.ModelIdentity, context)
        vector, tokens = await self._asked(context, engine.embed, embedding_input(request))
        return pb.EmbeddingResult(
            embeddings=vector, dim=len(vector), tokens=tokens, prompt_tokens=tokens, layout="LAYOUT_FINAL"
        )

    async def TokenizeString(self, request: pb.PredictOptions, context: Context) -> pb.TokenizationResponse:
        """The tokens of the prompt."""
        engine = await self._loaded(request.ModelIdentity, context)
        tokens = await self._asked(context, engine.tokenize, request.Prompt)
        return pb.TokenizationResponse(length=len(tokens), tokens=tokens)

    # -- inside ----------------------------------------------------------------------------------------------

    async def _replies(self, request: pb.PredictOptions, context: Context) -> AsyncGenerator[pb.Reply, None]:
        engine = await self._loaded(request.ModelIdentity, context)
        try:
            chat, body = generation(request)
        except BadRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        flow = Flow(asyncio.get_running_loop())
        self._flows.add(flow)
        task = asyncio.create_task(self._in_thread(engine.generate, chat, body, flow.offer))
        self._track(task)
        task.add_done_callback(lambda _done: flow.end())
        try:
            while (chunk := await flow.next()) is not None:
                reply = reply_of(chunk)
                if reply is not None:
                    yield reply
            await asyncio.shield(task)
            if flow.stopped:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "model not loaded: it was freed meanwhile")
        except EngineError as error:
            await context.abort(_status_of(error), str(error))
        finally:
            flow.stop()
            self._flows.discard(flow)

    async def _loaded(self, identity: str, context: Context) -> Engine:
        """The engine, if the model the caller means is loaded (an empty identity means any)."""
        if self._engine is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "model not loaded")
            raise AssertionError("abort raises")
        if identity and identity != self._identity:
            text = f"model identity mismatch: {self._identity!r} is loaded, {identity!r} was asked for"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        return self._engine

    async def _asked(self, context: Context, call: Callable[..., T], *args: Any) -> T:
        task = asyncio.create_task(self._in_thread(call, *args))
        self._track(task)
        try:
            return await asyncio.shield(task)
        except EngineError as error:
            await context.abort(_status_of(error), str(error))
            raise AssertionError("abort raises") from error

    def _track(self, task: asyncio.Task[Any]) -> None:
        self._running.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: its caller may be gone

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def _drop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for flow in self._flows:
            flow.stop()
        if self._running:
            await asyncio.wait(set(self._running))
        await self._in_thread(engine.close)


def _status_of(error: EngineError) -> grpc.StatusCode:
    return grpc.StatusCode.INVALID_ARGUMENT if 400 <= error.code < 500 else grpc.StatusCode.INTERNAL


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
