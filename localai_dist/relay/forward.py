"""
From a node to a stream: the one way in which anything here reaches a worker.

Whatever goes wrong comes out as ``reach.Unreached`` with exactly one outcome, decided in this order: the caller's
deadline, the database's failure, the routing fact, the peer link, the worker's own reply.

Source: design §2 and §5.16, wire contract §4.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, assert_never

from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.logger import Logger

from localai_dist import reach
from localai_dist.ids import InstanceId, NodeId, NodeNames
from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import MuxError, SessionDead, TooManyStreams
from localai_dist.net.endpoints import StreamEndpoint
from localai_dist.net.errors import NetError
from localai_dist.net.handshake import send_frame_and_read_reply
from localai_dist.net.session import MuxSession
from localai_dist.net.stream import MuxStream
from localai_dist.reach import Unreached
from localai_dist.registry.presence import RouteFact
from localai_dist.relay.deadline import before, remaining
from localai_dist.relay.peers import PeerPool, PoolClosed
from localai_dist.relay.routes import Local, ViaPeer, decide
from localai_dist.store.errors import StoreError
from localai_dist.wire import preamble
from localai_dist.wire.preamble import HANDSHAKE_TIMEOUT, RelayCode, RelayErr, RelayOk, RelayRequest, TunnelRequest

OWNER_CACHE: Final = 5.0
"""Seconds a remote owner is believed without asking again. Source: design §5.16."""


@dataclass(frozen=True, slots=True)
class GrpcTarget:
    """A backend process on the node; ``address`` is worker-local ``host:port``, of which only the port counts."""

    address: str


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """The node's own HTTP server."""


TunnelTarget: TypeAlias = GrpcTarget | HttpTarget


class Held(Protocol):
    """The tunnels that end here."""

    @property
    def instance(self) -> InstanceId:
        """This frontend."""

    def get(self, node: NodeId) -> MuxSession | None:
        """The open session of ``node``, or None; asks nobody."""


class Routing(Protocol):
    """What is needed of the registry's ownership."""

    def route(self, node: NodeId, *, grace: float) -> Awaitable[RouteFact]:
        """Who holds the tunnel, or what became of it; raises ``StoreError``."""


class StaleRoute(Exception):
    """The route that was tried is not the tunnel's (any more): asking once more may tell another one."""

    def __init__(self, outcome: reach.Outcome) -> None:
        super().__init__(reach.describe(outcome))
        self.outcome: Final = outcome


class Forwarder:
    """
    Opens streams to nodes, wherever their tunnels end.

    Args:
        held: the tunnels that end here; used without asking the database.
        peers: links to other frontends, or None when this one has no advertised address and so no peers.
        ownership: who holds the other tunnels.
        clock: for deadlines and the cache.
        grace: the reconnect grace (s).
        cache: how long a remote owner is believed (s).
        names: what people call the nodes.
    """

    log = Logger()

    def __init__(
        self,
        held: Held,
        peers: PeerPool | None,
        ownership: Routing,
        *,
        clock: IReactorTime,
        grace: float,
        cache: float = OWNER_CACHE,
        names: NodeNames | None = None,
    ) -> None:
        self._names = names or NodeNames()
        self._held = held
        self._peers = peers
        self._ownership = ownership
        self._clock = clock
        self._grace = grace
        self._cache = cache
        self._owners: dict[NodeId, tuple[ViaPeer, float]] = {}
        if peers is not None:
            peers.on_link_lost = self._link_lost

    async def open(
        self,
        node: NodeId,
        target: TunnelTarget,
        *,
        traffic: TrafficClass = TrafficClass.INFERENCE,
        deadline: float | None = None,
    ) -> MuxStream:
        """
        A stream that the worker has joined to ``target``: the next byte belongs to gRPC or HTTP.

        Cancelling it gives the half-open stream up and raises ``CancelledError``.

        Args:
            traffic: its class, on every leg.
            deadline: the caller's, an instant on the clock (s).

        Raises:
            Unreached: every outcome but ``Answered`` with success; ``Answered`` when the backend is not there.
        """
        return await before(deadline, self._open(node, target, traffic, deadline), clock=self._clock)

    def endpoint(
        self,
        node: NodeId,
        target: TunnelTarget,
        *,
        traffic: TrafficClass = TrafficClass.INFERENCE,
        deadline: float | None = None,
    ) -> IStreamClientEndpoint:
        """The same as an ordinary endpoint; connecting fails with ``Unreached``."""
        return StreamEndpoint(lambda: self.open(node, target, traffic=traffic, deadline=deadline))

    def forget(self, node: NodeId) -> None:
        """Do not believe what was known of the owner of ``node``'s tunnel."""
        self._owners.pop(node, None)

    def forget_all(self) -> None:
        """Believe nothing of what was known of owners: word of a claim may have been missed."""
        self._owners.clear()

    async def _open(
        self, node: NodeId, target: TunnelTarget, traffic: TrafficClass, deadline: float | None
    ) -> MuxStream:
        try:
            stream, peer = await self._stream(node, traffic, deadline)
        except StaleRoute as stale:
            self.log.info("asking again for the route to {node}: {reason}", node=self._names(node), reason=str(stale))
            self.forget(node)
            try:
                stream, peer = await self._stream(node, traffic, deadline)
            except StaleRoute as still:
                raise Unreached(still.outcome) from still
        return await self._join(stream, request_for(target, traffic), peer)

    async def _stream(
        self, node: NodeId, traffic: TrafficClass, deadline: float | None
    ) -> tuple[MuxStream, ViaPeer | None]:
        """A stream to the worker, and via which peer; no tunnel request was sent on it yet."""
        session = self._held.get(node)
        stream = None if session is None else await _on_own_tunnel(session, traffic)
        if stream is not None:
            return stream, None
        cached = self._cached(node)
        route = cached or await self._ask(node)
        stream = await self._relayed(node, route, traffic, deadline, believed=cached is not None)
        return stream, route

    def _cached(self, node: NodeId) -> ViaPeer | None:
        route, until = self._owners.get(node, (None, 0.0))
        return route if self._clock.seconds() < until else None

    async def _ask(self, node: NodeId) -> ViaPeer:
        try:
            fact = await self._ownership.route(node, grace=self._grace)
        except StoreError as error:
            raise Unreached(reach.RegistryUnknown(str(error))) from error
        match decide(node, fact, this=self._held.instance):
            case ViaPeer() as route:
                self._owners[node] = (route, self._clock.seconds() + self._cache)
                return route
            case Local():
                # The row names us, we hold nothing (any more): the tunnel was lost a moment ago and its release is on
                # the way. No relaying to ourselves.
                raise Unreached(reach.Reconnecting(node, name=fact.presence.name))
            case outcome:
                raise Unreached(outcome)

    async def _relayed(
        self, node: NodeId, route: ViaPeer, traffic: TrafficClass, deadline: float | None, *, believed: bool
    ) -> MuxStream:
        """A stream to the worker through the owner; ``believed``: the route comes from the cache."""
        if self._peers is None:
            raise Unreached(
                reach.PeerUnreachable(route.owner, "this frontend has no advertised address, so it has no peer links")
            )
        try:
            stream = await self._peers.open(route.owner, route.address, traffic)
        except PoolClosed as error:
            raise Unreached(reach.PeerUnreachable(route.owner, str(error))) from error
        except Unreached as error:
            self.forget(node)
            if believed:
                raise StaleRoute(error.outcome) from error
            raise
        await self._ask_owner(stream, node, route, traffic, deadline)
        return stream

    async def _ask_owner(
        self, stream: MuxStream, node: NodeId, route: ViaPeer, traffic: TrafficClass, deadline: float | None
    ) -> None:
        request = preamble.encode_relay_request(RelayRequest(node, self._budget(deadline), traffic.letter))
        try:
            reply = await self._exchange(stream, request)
        except (MuxError, NetError) as error:
            raise Unreached(reach.PeerUnreachable(route.owner, f"no answer to the relay request: {error}")) from error
        match preamble.parse_relay_reply(reply):
            case RelayOk():
                return
            case RelayErr(RelayCode.NOT_OWNER, text):
                stream.abortConnection()
                self.forget(node)
                raise StaleRoute(reach.PeerUnreachable(route.owner, text))
            case RelayErr(code, text):
                stream.abortConnection()
                raise Unreached(reach.PeerUnreachable(route.owner, f"{code.value}: {text}"))
            case unknown:
                stream.abortConnection()
                raise Unreached(reach.PeerUnreachable(route.owner, f"an unknown relay reply: {unknown.text[:120]!r}"))

    async def _join(self, stream: MuxStream, request: TunnelRequest, peer: ViaPeer | None) -> MuxStream:
        try:
            reply = await self._exchange(stream, preamble.encode_tunnel_request(request))
        except SessionDead as error:
            if peer is not None:
                raise Unreached(reach.PeerUnreachable(peer.owner, str(error))) from error
            raise Unreached(reach.NotServed(str(error))) from error
        except (MuxError, NetError) as error:
            raise Unreached(reach.NotServed(str(error))) from error
        outcome = preamble.outcome_of_tunnel_reply(reply, request.tag)
        if outcome is not None:
            stream.abortConnection()
            raise Unreached(outcome)
        return stream

    async def _exchange(self, stream: MuxStream, payload: bytes) -> bytes:
        """One frame out and its reply; the caller's deadline cancels it, so the time here is the contract's own."""
        try:
            return await send_frame_and_read_reply(stream, payload, clock=self._clock, timeout=HANDSHAKE_TIMEOUT)
        except (MuxError, NetError):
            stream.abortConnection()
            raise

    def _budget(self, deadline: float | None) -> int | None:
        """What is left of the caller's time in ms, rounded up, never 0."""
        if deadline is None:
            return None
        left = remaining(deadline, self._clock, at_most=preamble.MAX_BUDGET_MS / 1000)
        return max(1, math.ceil(left * 1000))

    def _link_lost(self, peer: InstanceId) -> None:
        for node in [node for node, (route, _) in self._owners.items() if route.owner == peer]:
            self.forget(node)


def request_for(target: TunnelTarget, traffic: TrafficClass) -> TunnelRequest:
    """What the worker is asked; an ``http`` request carries its class unless it is the usual one."""
    match target:
        case GrpcTarget(address):
            return TunnelRequest(preamble.GRPC, address)
        case HttpTarget():
            return TunnelRequest(preamble.HTTP, "" if traffic is TrafficClass.INFERENCE else traffic.letter)
        case _:
            assert_never(target)


async def _on_own_tunnel(session: MuxSession, traffic: TrafficClass) -> MuxStream | None:
    """A stream on a tunnel held here, or None if that tunnel is on its way out."""
    try:
        return await session.open(traffic)
    except TooManyStreams as error:
        raise Unreached(reach.NotServed(str(error))) from error
    except MuxError:
        return None
