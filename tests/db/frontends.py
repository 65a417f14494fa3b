"""Frontends in this process over one real PostgreSQL: real doors on loopback sockets, and a worker that echoes."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

from twisted.internet.defer import Deferred
from twisted.web.client import Agent, FileBodyProducer, readBody
from twisted.web.http_headers import Headers

from localai_dist import __version__
from localai_dist.health.departure import SUBSCRIBERS, Departures
from localai_dist.health.monitor import HealthMonitor
from localai_dist.httpapi.site import make_site
from localai_dist.ids import InstanceId, NodeId
from localai_dist.net import websocket
from localai_dist.net.errors import DialRefused
from localai_dist.net.handshake import read_frame, write_frame
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.stream import MuxStream
from localai_dist.registry.instances import Instances
from localai_dist.registry.nodes import Nodes
from localai_dist.registry.ownership import Ownership
from localai_dist.registry.replicas import Replicas
from localai_dist.relay.acceptor import PeerResource
from localai_dist.relay.forward import Forwarder, GrpcTarget
from localai_dist.relay.peers import PeerPool
from localai_dist.relay.serve import RelayService
from localai_dist.roles.frontend import departures_for
from localai_dist.store.pool import Pool
from localai_dist.testing.memory import Recorder
from localai_dist.tunnel.acceptor import ConnectResource
from localai_dist.tunnel.held import HeldTunnels
from localai_dist.wire.credentials import AUTHORIZATION, NODE_TOKEN, PEER_TOKEN, authorization, digest
from tests.db.case import DatabaseTestCase, until
from tests.httpapi.doubles import KEY, World
from tests.tunnel.sockets import no_connection_left, reactor

REGISTRATION = "the-registration-token"
WINDOW, GRACE = 30.0, 90.0
CONFIG = SessionConfig()


class Frontend:
    """
    One frontend: its own pool and its own port.

    Attributes:
        secret: what it proves itself with to its peers.
        accepting: False while it starts or drains.
    """

    def __init__(self, pool: Pool, name: str, *, token: str = REGISTRATION, loose: bool = False) -> None:
        self.pool = pool
        self.instance = InstanceId(name)
        self.secret = f"secret-of-{name}"
        self.accepting = True
        self.nodes = Nodes(pool)
        self.replicas = Replicas(pool)
        self.instances = Instances(pool, live_window=WINDOW)
        self.ownership = Ownership(pool, live_window=WINDOW)
        self.held = HeldTunnels(self.ownership, self.instance, clock=reactor)
        self.peers = PeerPool(
            reactor=reactor, instance=self.instance, registration_token=token, secret=self.secret, config=CONFIG
        )
        self.forwarder = Forwarder(self.held, self.peers, self.ownership, clock=reactor, grace=GRACE)
        self.monitor = HealthMonitor(
            self.nodes, self.ownership, departures_for(self.forwarder), clock=reactor, grace=GRACE
        )
        self.connect_door = ConnectResource(
            nodes=self.nodes, held=self.held, config=CONFIG, clock=reactor, accepting=lambda: self.accepting
        )
        self.peer_door = PeerResource(
            instances=self.instances,
            registration_token=token,
            on_stream=RelayService(self.held, clock=reactor).serve,
            config=CONFIG,
            clock=reactor,
        )
        world = World(
            nodes=self.nodes,
            replicas=self.replicas,
            ownership=self.ownership,
            clock=reactor,
            registration_token=token,
            loose_identity=loose,
        )
        site = make_site(
            world.api,
            connect_resource=self.connect_door,
            peer_resource=self.peer_door,
            reactor=reactor,
        )
        self.port = reactor.listenTCP(0, site, interface="127.0.0.1")
        self.address = f"127.0.0.1:{self.port.getHost().port}"
        self.url = f"http://{self.address}"

    async def join(self) -> None:
        """Publish it, as at its start."""
        await self.instances.arrive(self.instance, self.address, __version__, digest(self.secret))

    async def close(self) -> None:
        """Everything closed."""
        await self.stop_listening()
        self.peers.close()
        self.peer_door.close()
        await self.held.release_all()

    async def stop_listening(self) -> None:
        """Nobody reaches it any more; what is open stays."""
        stopping = self.port.stopListening()
        if stopping is not None:
            await stopping


class FrontendsCase(DatabaseTestCase):
    """Frontends ``a`` and ``b``; sessions that were dialled are closed with the test."""

    a: Frontend
    b: Frontend

    async def begin(self, **options: Any) -> None:
        """Both frontends, no node."""
        self.sessions: list[MuxSession] = []
        self.frontends: list[Frontend] = []
        self.pool_ = await self.pool()
        for table in ("node_connections", "instances", "backend_nodes"):
            await self.pool_.execute(f"delete from {table}")
        self.a, self.b = [await self.frontend(name, **options) for name in "ab"]
        self.addCleanup(lambda: Deferred.fromCoroutine(self.end()))

    async def frontend(self, name: str, **options: Any) -> Frontend:
        """One more."""
        made = Frontend(await self.pool(), name, **options)
        self.frontends.append(made)
        await made.join()
        return made

    async def end(self) -> None:
        """No socket is left."""
        for session in self.sessions:
            session.abort(Exception("the test is over"))
        for frontend in self.frontends:
            await frontend.close()
        await no_connection_left()

    async def register(self, at: Frontend, name: str = "gpu-1", *, token: str = "", **more: Any) -> dict[str, Any]:
        """Register over HTTP; the answer."""
        status, answer = await self.http(
            at, "POST", "/api/node/register", {"name": name, "boot_id": "boot", **more}, node_token=token
        )
        self.assertEqual(status, 201, answer)
        return answer

    async def approved(self, at: Frontend, name: str = "gpu-1", **more: Any) -> tuple[NodeId, str]:
        """A registered and approved node and its token."""
        answer = await self.register(at, name, **more)
        await at.nodes.approve(NodeId(answer["id"]))
        return NodeId(answer["id"]), answer["tunnel_token"]

    async def dial(
        self, at: Frontend, node: str, token: str | None, *, query: str | None = None, says: bytes = b"", **headers: str
    ) -> MuxSession:
        """Dial the tunnel's door; the worker's end of the tunnel echoes on every stream, with ``says`` before it."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            given = {AUTHORIZATION: authorization(token), **given}
        session = await websocket.dial(
            reactor,
            f"{at.url}/api/cluster/connect{f'?id={node}' if query is None else query}",
            headers=given,
            client=True,
            config=CONFIG,
            on_stream=lambda stream: echo(stream, says),
        )
        self.sessions.append(session)
        return session

    async def held(self, at: Frontend, node: NodeId) -> MuxSession:
        """The frontend's end of the node's tunnel, once it is held there."""
        return await until(lambda: at.held.get(node), f"{at.instance} holds the tunnel")

    async def refused(self, status: int, dialling: Any) -> DialRefused:
        """The dial is answered with that status, before any upgrade."""
        refusal: DialRefused = await self.assert_raises(DialRefused, dialling)
        self.assertEqual(refusal.status, status, str(refusal))
        return refusal

    async def dial_peer(
        self, at: Frontend, id: str | None, *, bearer: str = "", secret: str | None = None
    ) -> MuxSession:
        """Dial the peers' door."""
        headers = {AUTHORIZATION: authorization(bearer)} if bearer else {}
        if secret is not None:
            headers[PEER_TOKEN] = secret
        query = "" if id is None else f"?id={id}"
        session = await websocket.dial(
            reactor, f"{at.url}/api/cluster/peer{query}", headers=headers, client=True, config=CONFIG
        )
        self.sessions.append(session)
        return session

    async def works(self, at: Frontend, node: NodeId, *, within: float = 5.0, says: bytes = b"") -> None:
        """A request through ``at`` reaches the worker and comes back, from the one that ``says`` that."""
        deadline = reactor.seconds() + within
        stream = await at.forwarder.open(node, GrpcTarget("127.0.0.1:20000"), deadline=deadline)
        recorder = Recorder()
        stream.start(recorder)
        stream.write(b"hello")
        await until(lambda: recorder.data == says + b"hello", f"the answer through {at.instance}")
        stream.abortConnection()

    async def http(
        self,
        at: Frontend,
        method: str,
        path: str,
        body: Any = None,
        *,
        node_token: str = "",
        key: str = REGISTRATION,
        **more: str,
    ) -> tuple[int, Any]:
        """Status and decoded body of one request."""
        headers = {AUTHORIZATION: [authorization(key)], "Content-Type": ["application/json"], "Connection": ["close"]}
        if node_token:
            headers[NODE_TOKEN] = [node_token]
        headers.update({name.replace("_", "-"): [value] for name, value in more.items()})
        producer = None if body is None else _body(body)
        answer: Any = await Agent(reactor).request(
            method.encode(), (at.url + path).encode(), Headers(headers), producer
        )
        text = await readBody(answer)
        return answer.code, json.loads(text) if text else None

    async def admin(self, at: Frontend, method: str, path: str) -> tuple[int, Any]:
        """The same as an operator."""
        return await self.http(at, method, path, key=KEY)

    async def row(self, node: NodeId) -> dict[str, Any] | None:
        """The node's connection row."""
        return await self.pool_.fetch_one("select * from node_connections where node_id = %(n)s", {"n": node})

    async def released(self, node: NodeId) -> bool:
        """Whether nobody owns the node's tunnel, by the row: a frontend lets go first and says so then."""
        row = await self.row(node)
        return row is not None and row["owner_instance_id"] == ""


def monitor_of(nodes: Nodes, ownership: Ownership, *, clock: Any = reactor) -> HealthMonitor:
    """A health monitor whose departures nobody hears."""
    departures = Departures({name: lambda departure: None for name in SUBSCRIBERS})
    return HealthMonitor(nodes, ownership, departures, clock=clock, grace=GRACE)


def echo(stream: MuxStream, says: bytes = b"") -> None:
    """The worker's end of one stream: says ok, then sends back what comes, ``says`` before it."""

    async def serve() -> None:
        stream.accept()
        await read_frame(stream, clock=reactor, timeout=5)
        write_frame(stream, b"ok")
        stream.write(says)
        stream.start(_Echo())

    Deferred.fromCoroutine(serve()).addErrback(lambda failure: None)


class _Echo(Recorder):
    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


def _body(value: Any) -> Any:
    return FileBodyProducer(BytesIO(json.dumps(value).encode()))
