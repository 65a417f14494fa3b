"""The door for peers, and the whole way of a relayed stream, on real sockets of this machine."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from localai_dist import reach
from localai_dist.ids import Epoch, InstanceId, NodeId
from localai_dist.mux.classes import TrafficClass
from localai_dist.net import websocket
from localai_dist.net.errors import DialRefused
from localai_dist.net.handshake import read_frame, write_frame
from localai_dist.net.request import StreamingSite
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.stream import MuxStream
from localai_dist.reach import Unreached
from localai_dist.registry.presence import Presence, PresenceState, RouteFact
from localai_dist.relay.acceptor import PeerResource
from localai_dist.relay.forward import Forwarder, GrpcTarget
from localai_dist.relay.peers import PeerPool
from localai_dist.relay.serve import RelayService
from localai_dist.store.errors import StoreUnavailable
from localai_dist.testing.memory import Recorder
from localai_dist.tunnel.acceptor import ConnectResource
from localai_dist.tunnel.dialer import TunnelClient
from localai_dist.tunnel.held import HeldTunnels
from localai_dist.wire.credentials import digest
from tests.relay.mesh import Held, Registry
from tests.tunnel.doubles import Rows
from tests.tunnel.sockets import Nodes, cluster_root, no_connection_left, reactor, until

HERE, THERE, N = InstanceId("here"), InstanceId("there"), NodeId("n-1")


class Instances:
    """The published digests."""

    def __init__(self) -> None:
        self.hashes = {HERE: digest("mine"), THERE: digest("theirs"), InstanceId("empty"): ""}
        self.down = False
        self.asked = 0

    async def peer_token_hash(self, instance: InstanceId) -> str | None:
        """As published."""
        self.asked += 1
        if self.down:
            raise StoreUnavailable("away")
        return self.hashes.get(instance)


class PeerCase(TestCase):
    """Frontend ``there``: it holds tunnels and takes peers."""

    def setUp(self) -> None:
        self.instances = Instances()
        self.rows = Rows()
        self.held = HeldTunnels(self.rows, THERE, clock=reactor)
        self.sessions: list[MuxSession] = []
        self.address = self.listen("shared")

    def listen(self, token: str) -> str:
        """A frontend; its ``host:port``."""
        config = SessionConfig()
        self.peers = PeerResource(
            instances=self.instances,
            registration_token=token,
            on_stream=RelayService(self.held, clock=reactor).serve,
            config=config,
            clock=reactor,
        )
        door = ConnectResource(nodes=Nodes(), held=self.held, config=config, clock=reactor)
        site = StreamingSite(cluster_root(peer=self.peers, connect=door), max_body=1024, reactor=reactor)
        port = reactor.listenTCP(0, site, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        return f"127.0.0.1:{port.getHost().port}"

    async def dial(self, query: str, *, address: str = "", **headers: str) -> MuxSession:
        """Dial as a peer would."""
        session = await websocket.dial(
            reactor,
            f"ws://{address or self.address}/api/cluster/peer{query}",
            headers={name.replace("_", "-"): value for name, value in headers.items()},
            client=True,
            config=SessionConfig(),
        )
        self.sessions.append(session)
        return session

    async def assert_refused(self, status: int, query: str, says: str = "", **options: Any) -> None:
        """The dial is answered with that status and no upgrade."""
        try:
            await self.dial(query, **options)
        except DialRefused as refused:
            self.assertEqual(refused.status, status)
        else:
            self.fail("it was admitted")

    async def tearDown(self) -> None:
        """Close what is open, and wait until every end saw it."""
        for session in [*self.sessions, *self.held.sessions().values()]:
            session.close()
        await until(lambda: not self.held.sessions(), "no tunnel is held")
        await no_connection_left()


BOTH = {"Authorization": "Bearer shared", "X_LocalAI_Peer_Token": "mine"}


class PeerResourceTests(PeerCase):
    """Both credentials, in order."""

    async def test_refusals(self) -> None:
        """The shared token alone, a wrong own secret, an unknown or unpublished one: refused (CLUS-7)."""
        await self.assert_refused(401, "")
        await self.assert_refused(401, "?id=here", X_LocalAI_Peer_Token="mine")
        await self.assert_refused(401, "?id=here", Authorization="Bearer wrong", X_LocalAI_Peer_Token="mine")
        for first, second in (("Bearer shared", "Bearer x"), ("Bearer x", "Bearer shared")):
            twice = {**BOTH, "Authorization": first, "authorization": second}
            await self.assert_refused(401, "?id=here", **twice)
        await self.assert_refused(400, "", **BOTH)
        self.assertEqual(self.instances.asked, 0)
        for first, second in (("mine", "x"), ("x", "mine")):
            twice = {**BOTH, "X_LocalAI_Peer_Token": first, "x_localai_peer_token": second}
            await self.assert_refused(401, "?id=here", **twice)
        await self.assert_refused(401, "?id=here", Authorization="Bearer shared")
        await self.assert_refused(401, "?id=here", Authorization="Bearer shared", X_LocalAI_Peer_Token="")
        await self.assert_refused(401, "?id=there", **BOTH)
        await self.assert_refused(401, "?id=nobody", **BOTH)
        await self.assert_refused(401, "?id=empty", **BOTH)
        await self.assert_refused(401, "?id=a%20b", **BOTH)
        await self.assert_refused(426, "?id=here", X_LocalAI_Dist_Version="7.0.0", **BOTH)
        self.instances.down = True
        await self.assert_refused(500, "?id=here", **BOTH)

    async def test_an_empty_configured_token_admits_nobody(self) -> None:
        """A deployment without a registration token has no peer links (CLUS-7)."""
        open_door = self.listen("")
        for token in ("Bearer ", "Bearer shared", ""):
            await self.assert_refused(
                401, "?id=here", address=open_door, Authorization=token, X_LocalAI_Peer_Token="mine"
            )

    async def test_a_refused_dial_does_not_displace_the_real_peer(self) -> None:
        """Another's id with the wrong secret leaves the real link alone; the real one's second dial replaces it."""
        first = await self.dial("?id=here", **BOTH)
        await self.assert_refused(401, "?id=here", Authorization="Bearer shared", X_LocalAI_Peer_Token="theirs")
        stream = await first.open()
        write_frame(stream, b"n-1 - i")
        self.assertIn(b"relay-not-owner", await read_frame(stream, clock=reactor, timeout=5))
        self.assertTrue(first.is_open)
        second = await self.dial("?id=here", **BOTH)
        await first.when_closed()
        self.assertTrue(second.is_open)
        self.peers.close()
        await second.when_closed()

    async def test_an_unforeseen_error_is_500_and_logged(self) -> None:
        """A defect is told as 500, never as a refusal of the identity."""
        self.instances.hashes = None  # type: ignore[assignment]
        await self.assert_refused(500, "?id=here", **BOTH)
        self.assertEqual(len(self.flushLoggedErrors(AttributeError)), 1)


class WholeWayTests(PeerCase):
    """A worker's tunnel at one frontend, a request at the other."""

    async def test_a_request_crosses_the_relay(self) -> None:
        """Ten streams at once through the frontend that does not hold the tunnel reach the worker whole (WALK-5)."""
        worker = TunnelClient(
            name="box",
            reactor=reactor,
            urls=[f"http://{self.address}"],
            node_id=lambda: N,
            token=lambda: "t",
            on_stream=lambda stream: _serve(stream),
            chance=lambda: 0.0,
        )
        worker.startService()
        await until(lambda: self.held.get(N) is not None, "the tunnel is held")
        pool = PeerPool(reactor=reactor, instance=HERE, registration_token="shared", secret="mine")
        registry = Registry()
        presence = Presence(PresenceState.CONNECTED, THERE, Epoch(1))
        registry.fact = RouteFact(presence, THERE, self.address, Epoch(1))
        forwarder = Forwarder(Held(HERE), pool, registry, clock=reactor, grace=90.0)
        body = bytes(range(256)) * 1000
        for traffic in TrafficClass:
            recorders = [Recorder() for _ in range(10)]
            for recorder in recorders:
                stream = await forwarder.open(N, GrpcTarget("127.0.0.1:1"), traffic=traffic, deadline=None)
                stream.start(recorder)
                stream.write(body)
            await until(lambda rs=recorders: all(len(r.data) == len(body) for r in rs), "all came back")  # type: ignore[misc]
            for recorder in recorders:
                self.assertEqual(recorder.data, body)
                assert recorder.transport is not None
                recorder.transport.loseConnection()
            await until(lambda rs=recorders: all(r.lost for r in rs), "all are closed")  # type: ignore[misc]
        await worker.stopService()
        await until(lambda: not self.rows.rows, "the tunnel is released")
        try:
            await forwarder.open(N, GrpcTarget("127.0.0.1:1"))
        except Unreached as error:
            self.assertIsInstance(error.outcome, reach.PeerUnreachable)
        pool.close()

    async def test_a_frontend_whose_identity_is_refused(self) -> None:
        """A wrong peer secret is "rejected", which is unreachable and nothing that may be acted on (CLUS-7)."""
        pool = PeerPool(reactor=reactor, instance=HERE, registration_token="shared", secret="stolen")
        try:
            await pool.open(THERE, self.address, TrafficClass.INFERENCE)
        except Unreached as error:
            assert isinstance(error.outcome, reach.PeerUnreachable)
            self.assertTrue(error.outcome.rejected)
            self.assertFalse(reach.may_reap(error.outcome))
        else:
            self.fail("it was admitted")
        pool.close()


class Echo(Recorder):
    """Sends back what it gets, holding the sender to its own pace."""

    def connectionMade(self) -> None:
        """Stop reading while the answer does not get away."""
        stream: Any = self.transport
        stream.registerProducer(stream, True)

    def dataReceived(self, data: bytes) -> None:
        """Send it back."""
        assert self.transport is not None
        self.transport.write(data)

    def connectionLost(self, reason: Any = None) -> None:
        """Let a close go on."""
        stream: Any = self.transport
        stream.unregisterProducer()


def _serve(stream: MuxStream) -> None:
    async def serve() -> None:
        stream.accept()
        await read_frame(stream, clock=reactor, timeout=5)
        write_frame(stream, b"ok")
        stream.start(Echo())

    Deferred.fromCoroutine(serve())
