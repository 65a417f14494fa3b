"""
The owner's side of a relayed stream.

One hop: a node whose tunnel does not end here is refused, never looked up and never passed on, so that two frontends
with stale knowledge can't send a stream around for ever.

Source: wire contract §4b and §4d.
"""

from __future__ import annotations

from typing import Final, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.ids import NodeId, NodeNames
from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import MuxError
from localai_dist.net.errors import HandshakeLate, NetError
from localai_dist.net.handshake import read_frame, write_frame
from localai_dist.net.session import MuxSession
from localai_dist.net.splice import splice
from localai_dist.net.stream import MuxStream
from localai_dist.reach import Unreached
from localai_dist.relay.deadline import before
from localai_dist.wire import preamble
from localai_dist.wire.preamble import HANDSHAKE_TIMEOUT, MalformedPreamble, RelayCode, RelayRequest


class Held(Protocol):
    """The tunnels that end here."""

    def get(self, node: NodeId) -> MuxSession | None:
        """The open session of ``node``, or None."""


class NotRelayed(Exception):
    """Why a relayed stream is not served; told to the peer."""

    def __init__(self, code: RelayCode, text: str) -> None:
        super().__init__(text)
        self.code: Final = code


class RelayService:
    """
    Joins a peer's streams to the tunnels held here.

    Args:
        held: the tunnels.
        clock: bounds the opening.
        names: what people call the nodes.
    """

    log = Logger()

    def __init__(self, held: Held, *, clock: IReactorTime, names: NodeNames | None = None) -> None:
        self._names = names or NodeNames()
        self._held = held
        self._clock = clock

    def serve(self, stream: MuxStream) -> None:
        """Serve one stream to its end; a trouble of this one touches no other."""
        stream.accept()
        Deferred.fromCoroutine(self._serve(stream)).addErrback(self._broken, stream)

    async def _serve(self, stream: MuxStream) -> None:
        try:
            ahead = await self._join(stream)
        except NotRelayed as refused:
            write_frame(stream, preamble.relay_err(refused.code, str(refused)))
            stream.loseConnection()
            return
        except (MuxError, NetError) as error:
            self.log.debug("a peer's stream ended before it was joined: {error}", error=error)
            stream.abortConnection()
            return
        write_frame(stream, preamble.relay_ok())
        await splice(stream, ahead)

    async def _join(self, stream: MuxStream) -> MuxStream:
        """The worker's end for what ``stream`` asks."""
        request = await self._request(stream)
        session = self._held.get(request.node)
        if session is None:
            raise NotRelayed(RelayCode.NOT_OWNER, f"the tunnel of node {self._names(request.node)} does not end here")
        traffic = TrafficClass.INFERENCE if request.traffic is None else TrafficClass.from_letter(request.traffic)
        stream.traffic = traffic
        budget = HANDSHAKE_TIMEOUT if request.budget_ms is None else request.budget_ms / 1000
        deadline = self._clock.seconds() + min(budget, HANDSHAKE_TIMEOUT)
        try:
            return await before(deadline, _opened(session, traffic), clock=self._clock)
        except (MuxError, Unreached) as error:
            text = f"the tunnel of node {self._names(request.node)} opens no stream: {error}"
            raise NotRelayed(RelayCode.UNAVAILABLE, text) from error

    async def _request(self, stream: MuxStream) -> RelayRequest:
        try:
            return preamble.parse_relay_request(await read_frame(stream, clock=self._clock, timeout=HANDSHAKE_TIMEOUT))
        except (MalformedPreamble, HandshakeLate) as error:
            raise NotRelayed(RelayCode.BAD_REQUEST, str(error)) from error

    def _broken(self, failure: Failure, stream: MuxStream) -> None:
        self.log.failure("a relayed stream failed in an unforeseen way", failure)
        stream.abortConnection()


async def _opened(session: MuxSession, traffic: TrafficClass) -> MuxStream:
    return await session.open(traffic)
