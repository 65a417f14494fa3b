"""The calls of a backend, typed: what the rest of the frontend and the worker use."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, Self, TypeVar

from google.protobuf.message import DecodeError, Message
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory

from localai_dist.grpcclient.call import Call
from localai_dist.grpcclient.connection import GrpcConnection
from localai_dist.grpcclient.status import RpcError, StatusCode
from localai_dist.rpc import backend_pb2 as pb

M = TypeVar("M", bound=Message)


class _Connections(Factory):
    noisy = False

    def __init__(self, token: str, clock: IReactorTime) -> None:
        self._token = token
        self._clock = clock

    def buildProtocol(self, addr: IAddress | None) -> GrpcConnection:
        return GrpcConnection(token=self._token, clock=self._clock)


async def connect(endpoint: IStreamClientEndpoint, *, token: str, clock: IReactorTime) -> BackendChannel:
    """
    A channel to the backend behind ``endpoint``. Cancelling it cancels the endpoint's attempt.

    Args:
        endpoint: TCP, a unix socket or a tunnel; its errors are passed on unchanged.
        token: the backend's own token; empty sends none.
        clock: for deadlines.
    """
    connection = await endpoint.connect(_Connections(token, clock))
    assert isinstance(connection, GrpcConnection)
    return BackendChannel(connection)


def _decode(reply_type: type[M], encoded: bytes) -> M:
    try:
        return reply_type.FromString(encoded)
    except DecodeError as error:
        raise RpcError(StatusCode.INTERNAL, f"the reply is no {reply_type.__name__}: {error}") from error


class ReplyStream(Generic[M]):
    """
    The replies of a streaming call: ``async for reply in stream``.

    Whoever stops reading early must ``cancel`` it (or use ``async with``); an abandoned stream holds its window and the
    backend's slot. A reader that pauses pauses the backend.
    """

    def __init__(self, call: Call, reply_type: type[M]) -> None:
        self._call = call
        self._reply_type = reply_type

    def __aiter__(self) -> Self:
        """The stream is its own iterator: replies are read once."""
        return self

    async def __anext__(self) -> M:
        """
        The next reply. Cancelling the awaiting coroutine cancels the call on the backend.

        Raises:
            RpcError: the call failed, after the replies that came before.
        """
        encoded = await self._call.read()
        if encoded is None:
            raise StopAsyncIteration
        return _decode(self._reply_type, encoded)

    async def __aenter__(self) -> Self:
        """Enter: nothing to wait for."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave: whatever was not read is cancelled."""
        self.cancel()

    def cancel(self) -> None:
        """Stop the call on the backend; nothing once it is over. A waiting reader gets RpcError CANCELLED."""
        self._call.cancel()


class BackendChannel:
    """
    One connection to one backend; any number of calls at once.

    Every call raises RpcError when it does not end with OK. ``timeout`` is in seconds, None for no limit. Cancelling a
    coroutine that awaits a call cancels the call on the backend.
    """

    def __init__(self, connection: GrpcConnection) -> None:
        self._connection = connection

    @property
    def is_open(self) -> bool:
        """Whether a new call can be started."""
        return self._connection.is_open

    @property
    def call_count(self) -> int:
        """Calls that are running."""
        return self._connection.call_count

    def when_closed(self) -> Deferred[RpcError]:
        """Fires with the reason once no new call can be started; at once if that is so."""
        return self._connection.when_closed()

    def close(self) -> None:
        """Close the connection; calls that still run end with CANCELLED, here and on the backend."""
        self._connection.close()

    async def unary(self, method: str, request: Message, reply_type: type[M], *, timeout: float | None) -> M:
        """Call ``method`` and wait for its one reply."""
        call = self._connection.start_call(method, request.SerializeToString(), timeout)
        try:
            encoded = await call.read()
            if encoded is None:
                raise RpcError(StatusCode.INTERNAL, f"{method} ended without a reply")
            if await call.read() is not None:
                raise RpcError(StatusCode.INTERNAL, f"{method} sent more than one reply")
        finally:
            call.cancel()
        return _decode(reply_type, encoded)

    def stream(self, method: str, request: Message, reply_type: type[M], *, timeout: float | None) -> ReplyStream[M]:
        """Call ``method`` and read its replies as they come."""
        return ReplyStream(self._connection.start_call(method, request.SerializeToString(), timeout), reply_type)

    async def health(self, timeout: float = 2.0) -> bool:
        """
        Whether the backend said ``OK`` in time.

        False says nothing about why (the connection may be lost): never act on it, use ``status`` to learn more.
        """
        try:
            reply = await self.unary("Health", pb.HealthMessage(), pb.Reply, timeout=timeout)
        except RpcError:
            return False
        return reply.message == b"OK"

    async def load_model(self, options: pb.ModelOptions, timeout: float | None) -> pb.Result:
        """Load a model; ``success`` False carries the backend's reason in ``message``."""
        return await self.unary("LoadModel", options, pb.Result, timeout=timeout)

    async def predict(self, options: pb.PredictOptions, timeout: float | None = None) -> pb.Reply:
        """The whole answer at once."""
        return await self.unary("Predict", options, pb.Reply, timeout=timeout)

    def predict_stream(self, options: pb.PredictOptions, timeout: float | None = None) -> ReplyStream[pb.Reply]:
        """The answer as it is generated."""
        return self.stream("PredictStream", options, pb.Reply, timeout=timeout)

    async def embedding(self, options: pb.PredictOptions, timeout: float | None = None) -> pb.EmbeddingResult:
        """The embedding of ``options.Embeddings`` (text) or ``options.EmbeddingTokens``."""
        return await self.unary("Embedding", options, pb.EmbeddingResult, timeout=timeout)

    async def transcribe(self, request: pb.TranscriptRequest, timeout: float | None = None) -> pb.TranscriptResult:
        """What is said in the recording at ``request.dst``, a path on the backend's own machine."""
        return await self.unary("AudioTranscription", request, pb.TranscriptResult, timeout=timeout)

    async def tokenize(self, options: pb.PredictOptions, timeout: float | None = None) -> pb.TokenizationResponse:
        """The tokens of ``options.Prompt``."""
        return await self.unary("TokenizeString", options, pb.TokenizationResponse, timeout=timeout)

    async def free(self, timeout: float | None = 5.0) -> pb.Result:
        """Have the backend give the memory of its model back."""
        return await self.unary("Free", pb.HealthMessage(), pb.Result, timeout=timeout)

    async def status(self, timeout: float | None = 5.0) -> pb.StatusResponse:
        """State and memory of the backend."""
        return await self.unary("Status", pb.HealthMessage(), pb.StatusResponse, timeout=timeout)
