"""
A stream of the tunnel: its opening frame is read and answered, then it is joined to a backend or given to our HTTP
server.

Only backends are dialled, on loopback: of a ``grpc`` target only the port counts, and it must be one of ours.

Source: wire contract §4a.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.error import ConnectError, ConnectionRefusedError
from twisted.internet.error import TimeoutError as ConnectTimeout
from twisted.internet.interfaces import IProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import MuxError
from localai_dist.net.errors import HandshakeLate, NetError
from localai_dist.net.handshake import read_frame, write_frame
from localai_dist.net.splice import splice_stream_to_endpoint
from localai_dist.net.stream import MuxStream
from localai_dist.wire.preamble import (
    GRPC,
    HANDSHAKE_TIMEOUT,
    HTTP,
    MalformedPreamble,
    TunnelCode,
    TunnelRequest,
    parse_tunnel_request,
    tunnel_err,
    tunnel_ok,
)
from localai_dist.worker.ports import LOOPBACK

DIAL_TIMEOUT = 10
"""Seconds a connect on loopback may take; a backend that doesn't accept for so long is busy, not gone."""


class Refusal(Exception):
    """Why a stream is not served; ``code`` decides what the frontend may do about it."""

    def __init__(self, code: TunnelCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamRouter:
    """
    Joins streams to what they ask for.

    Args:
        reactor: dials, and is the clock.
        is_backend: whether a port is one of our backends' right now.
        in_range: whether a port is in the backends' range at all.
        http: makes the server's end of a connection to our own HTTP server.
    """

    _log = Logger()

    def __init__(
        self,
        *,
        reactor: Any,
        is_backend: Callable[[int], bool],
        in_range: Callable[[int], bool],
        http: Callable[[], IProtocol],
    ) -> None:
        self._reactor = reactor
        self._is_backend = is_backend
        self._in_range = in_range
        self._http = http

    def serve(self, stream: MuxStream) -> None:
        """Serve one stream to its end; trouble of this one touches no other."""
        stream.accept()
        Deferred.fromCoroutine(self._serve(stream)).addErrback(self._broken, stream)

    async def _serve(self, stream: MuxStream) -> None:
        try:
            request = await self._request(stream)
            if request.tag == HTTP:
                self._hand_over(stream, request)
                return
            await self._join(stream, self._port(request))
        except Refusal as refused:
            self._log.debug("a stream was refused: {code} {text}", code=refused.code.value, text=str(refused))
            write_frame(stream, tunnel_err(refused.code, str(refused)))
            stream.loseConnection()
        except (MuxError, NetError) as error:
            self._log.debug("a stream ended before it was joined: {error}", error=error)
            stream.abortConnection()

    def _hand_over(self, stream: MuxStream, request: TunnelRequest) -> None:
        # No loopback connection in between: it would cost a send and a receive for every byte of a staged model.
        if request.traffic is not None:
            stream.traffic = TrafficClass.from_letter(request.traffic)
        write_frame(stream, tunnel_ok())
        stream.start(self._http())

    async def _request(self, stream: MuxStream) -> TunnelRequest:
        try:
            payload = await read_frame(stream, clock=self._reactor, timeout=HANDSHAKE_TIMEOUT)
        except HandshakeLate as error:
            # Too late for an answer: the stream was aborted, which says "not served" just as well.
            raise NetError(str(error)) from error
        try:
            return parse_tunnel_request(payload)
        except MalformedPreamble as error:
            raise Refusal(TunnelCode.BAD_REQUEST, str(error)) from error

    def _port(self, request: TunnelRequest) -> int:
        if request.tag != GRPC:
            raise Refusal(TunnelCode.UNKNOWN_TAG, f"this worker knows {GRPC} and {HTTP}, not {request.tag[:48]}")
        _host, _colon, text = request.target.rpartition(":")
        port = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
        if not self._in_range(port):
            raise Refusal(TunnelCode.BAD_REQUEST, f"{request.target[:80]!r} is not in this worker's backend range")
        if not self._is_backend(port):
            raise Refusal(TunnelCode.UNAVAILABLE, f"no backend of this worker is on port {port}")
        return port

    async def _join(self, stream: MuxStream, port: int) -> None:
        endpoint = TCP4ClientEndpoint(self._reactor, LOOPBACK, port, timeout=DIAL_TIMEOUT)
        joined = False

        def connected() -> None:
            nonlocal joined
            joined = True
            write_frame(stream, tunnel_ok())

        try:
            await splice_stream_to_endpoint(stream, endpoint, connected=connected)
        except (ConnectError, ConnectTimeout) as error:
            if joined:
                raise
            raise Refusal(_code_of(error), f"connecting to it on loopback failed: {error}") from error

    def _broken(self, failure: Failure, stream: MuxStream) -> None:
        """Whatever went wrong in one stream: it is logged, and only this stream ends."""
        self._log.failure("serving a stream failed", failure)
        stream.abortConnection()


def _code_of(error: Exception) -> TunnelCode:
    """Refused = nobody listens. Anything else (timeout, no descriptors) is our trouble, not a word on the backend."""
    return TunnelCode.UNAVAILABLE if isinstance(error, ConnectionRefusedError) else TunnelCode.NOT_SERVED
