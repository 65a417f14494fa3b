"""The door for tunnels, on real sockets of this machine."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase
from twisted.web.client import Agent, readBody
from twisted.web.http_headers import Headers

from localai_dist import __version__
from localai_dist.ids import InstanceId, NodeId
from localai_dist.mux.errors import StreamReset
from localai_dist.net import websocket
from localai_dist.net.errors import DialRefused
from localai_dist.net.handshake import read_frame, write_frame
from localai_dist.net.request import StreamingSite
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.stream import MuxStream
from localai_dist.store.errors import StatementFailed, StoreUnavailable
from localai_dist.tunnel.acceptor import ConnectResource
from localai_dist.tunnel.dialer import TunnelClient
from localai_dist.tunnel.held import HeldTunnels
from localai_dist.wire.credentials import digest
from tests.tunnel.doubles import Rows
from tests.tunnel.sockets import Check, Nodes, cluster_root, no_connection_left, reactor, until

HERE = InstanceId("here")


class DoorCase(TestCase):
    """A frontend's door on a free port."""

    def setUp(self) -> None:
        self.nodes = Nodes()
        self.rows = Rows()
        self.accepting = True
        self.told: list[NodeId] = []
        self.held = HeldTunnels(self.rows, HERE, clock=reactor)
        self.sessions: list[MuxSession] = []
        self.base = self.listen(self.nodes)

    def listen(self, nodes: Nodes | None) -> str:
        """A frontend; its URL."""
        door = ConnectResource(
            nodes=nodes,
            held=self.held,
            config=SessionConfig(),
            clock=reactor,
            accepting=lambda: self.accepting,
            on_held=self.told.append,
        )
        root = cluster_root(connect=door)
        port = reactor.listenTCP(0, StreamingSite(root, max_body=1024, reactor=reactor), interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        return f"http://127.0.0.1:{port.getHost().port}"

    async def tearDown(self) -> None:
        """Close what is open, and wait until every end saw it."""
        for session in [*self.sessions, *self.held.sessions().values()]:
            session.close()
        await until(lambda: not self.held.sessions(), "no tunnel is held")
        await no_connection_left()

    async def dial(self, query: str = "?id=n-1", *, base: str = "", **headers: str) -> MuxSession:
        """Dial as a worker would."""
        url = f"{base or self.base}/api/cluster/connect{query}"
        session = await websocket.dial(
            reactor,
            url,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
            client=True,
            config=SessionConfig(),
        )
        self.sessions.append(session)
        return session

    async def assert_refused(self, status: int, query: str = "?id=n-1", *, base: str = "", **headers: str) -> None:
        """The dial is answered with that status and no upgrade."""
        try:
            await self.dial(query, base=base, **headers)
        except DialRefused as refused:
            self.assertEqual(refused.status, status)
            self.assertEqual(refused.headers["x-localai-dist-version"], __version__)
            if status == 401:
                self.assertIn("www-authenticate", refused.headers)
        else:
            self.fail("it was admitted")


class ConnectResourceTests(DoorCase):
    """Each row of the table, in its order."""

    async def test_refusals_in_order(self) -> None:
        """Every refusal comes before the upgrade, with its status, the earlier row first (WALK-9, CLUS-6)."""
        bare = self.listen(None)
        await self.assert_refused(401, "", base=bare)
        await self.assert_refused(401, "", base=bare, Authorization="Basic x")
        await self.assert_refused(401, "", base=bare, Authorization="Bearer ")
        await self.assert_refused(503, "", base=bare, Authorization="Bearer t")
        self.accepting = False
        await self.assert_refused(503, "", Authorization="Bearer t")
        self.accepting = True
        await self.assert_refused(400, "", Authorization="Bearer t")
        await self.assert_refused(400, "?id=", Authorization="Bearer t")
        self.assertEqual(self.nodes.asked, [])
        await self.assert_refused(401, "?id=a%20b", Authorization="Bearer t")
        self.assertEqual(self.nodes.asked, [])
        for error in (StoreUnavailable("away"), StatementFailed("odd", "42P01")):
            self.nodes.error = error
            await self.assert_refused(500, Authorization="Bearer t")
        self.nodes.error = None
        for check, status in [
            (Check.UNKNOWN_NODE, 401),
            (Check.NO_TOKEN, 401),
            (Check.WRONG, 401),
            (Check.PENDING, 403),
        ]:
            self.nodes.check = check
            await self.assert_refused(status, Authorization="Bearer t", Origin="http://evil.example")
        self.assertEqual(set(self.nodes.asked), {("n-1", "t")})
        self.nodes.check = Check.OK
        other = {"Authorization": "Bearer t", "Origin": "http://evil.example", "X_LocalAI_Dist_Version": "7.0.0"}
        await self.assert_refused(426, **other)
        await self.assert_refused(403, Authorization="Bearer t", Origin="http://evil.example")
        self.assertEqual((self.held.sessions(), self.rows.rows), ({}, {}))

    async def test_a_header_that_is_there_twice(self) -> None:
        """Two credentials are a wrong one and two origins a foreign one, in whatever order the good one comes: so no
        proxy on the way can have checked the other line (CLUS-6)."""
        for first, second in (("Bearer t", "Bearer x"), ("Bearer x", "Bearer t"), ("Bearer t", "Bearer t")):
            self.nodes.check = Check.WRONG
            await self.assert_refused(401, Authorization=first, authorization=second)
            self.assertEqual(self.nodes.asked.pop(), ("n-1", f"{first}, {second}".removeprefix("Bearer ")))
        self.nodes.check = Check.OK
        for first, second in (("http://evil.example", self.base), (self.base, "http://evil.example")):
            await self.assert_refused(403, Authorization="Bearer t", Origin=first, origin=second)
        self.assertEqual(self.held.sessions(), {})

    async def test_an_origin_that_is_no_address(self) -> None:
        """An Origin that can't be read is a foreign one, not a fault of ours."""
        for origin in ("http://[::1", "http://[x]", "null", "http://a]b", "http://\u2100.example", "://"):
            await self.assert_refused(403, Authorization="Bearer t", Origin=origin)
        self.assertEqual(self.held.sessions(), {})

    async def test_another_release_is_told_both_and_the_order(self) -> None:
        """An incompatible worker gets 426 that names both releases and what to upgrade first; it may dial again and
        nothing was claimed. A worker that names no release, and one of this very line, are admitted (CLUS-28)."""
        headers = {"Authorization": ["Bearer t"], "X-LocalAI-Dist-Version": ["7.0.0"]}
        url = f"{self.base}/api/cluster/connect?id=n-1".encode()
        response: Any = await Agent(reactor).request(b"GET", url, Headers(headers))
        answer = json.loads(await readBody(response))["error"]
        self.assertEqual((response.code, answer["code"]), (426, "incompatible_release"))
        for words in (__version__, "7.0.0", "upgrade all frontends first, then the workers"):
            self.assertIn(words, answer["message"])
        self.assertEqual((self.held.sessions(), self.rows.rows), ({}, {}))
        await self.dial("?id=n-1", Authorization="Bearer t", X_LocalAI_Dist_Version=__version__)
        await self.dial("?id=stock", Authorization="Bearer t")
        await until(lambda: len(self.held.sessions()) == 2, "both are held")

    async def test_refusal_is_the_json_envelope(self) -> None:
        """A person with curl reads why (WALK-17)."""
        response: Any = await Agent(reactor).request(b"GET", f"{self.base}/api/cluster/connect".encode())
        answer = json.loads(await readBody(response))
        self.assertEqual((response.code, answer["error"]["code"]), (401, "invalid_node_token"))

    async def test_no_upgrade_is_400(self) -> None:
        """An admitted request that is no WebSocket upgrade is told so."""
        headers = Headers({"Authorization": ["Bearer t"]})
        url = f"{self.base}/api/cluster/connect?id=n-1".encode()
        response: Any = await Agent(reactor).request(b"GET", url, headers)
        self.assertEqual(
            (response.code, json.loads(await readBody(response))["error"]["code"]), (400, "invalid_request")
        )

    async def test_admitted_claimed_and_held_until_lost(self) -> None:
        """An admitted tunnel is claimed, carries streams to the worker, and is released when it is lost (WALK-9)."""
        served: list[MuxStream] = []
        session = await self.dial(Authorization="bearer t")
        session.on_stream = served.append
        await until(lambda: self.held.get(NodeId("n-1")) is not None, "the tunnel is held")
        self.assertEqual(self.rows.rows, {"n-1": (HERE, 1)})
        self.assertEqual((self.told, list(self.held.credentials().values())), ([NodeId("n-1")], [digest("t")]))
        tunnel = self.held.get(NodeId("n-1"))
        assert tunnel is not None
        stream = await tunnel.open()
        self.assertEqual(stream.id % 2, 0)
        write_frame(stream, b"http ")
        await until(lambda: bool(served), "the worker got the stream")
        self.assertEqual(await read_frame(served[0], clock=reactor, timeout=5), b"http ")
        session.abort(Exception("pulled"))
        await until(lambda: not self.rows.rows, "the claim is released")
        self.assertIsNone(self.held.get(NodeId("n-1")))

    async def test_a_worker_opens_no_streams(self) -> None:
        """Only the frontend opens streams: a worker's is reset."""
        session = await self.dial(Authorization="Bearer t")
        stream = await session.open()
        with self.assertRaises(StreamReset):
            await read_frame(stream, clock=reactor, timeout=5)

    async def test_a_failed_claim_closes_the_session(self) -> None:
        """A tunnel that can't be claimed is closed: the worker dials again."""
        self.rows.down = True
        session = await self.dial(Authorization="Bearer t")
        await session.when_closed()
        self.rows.down = False
        self.assertEqual(self.held.sessions(), {})
        await self.held.release_all()

    async def test_a_newer_tunnel_displaces_the_older(self) -> None:
        """A second dial of the same node wins; the older tunnel is closed and its end releases nothing."""
        older = await self.dial(Authorization="Bearer t")
        await until(lambda: len(self.rows.rows) == 1, "the first is claimed")
        await self.dial(Authorization="Bearer t")
        await older.when_closed()
        await until(lambda: self.held.get(NodeId("n-1")) is not None, "the second is held")
        self.assertEqual((self.rows.rows, self.rows.released), ({"n-1": (HERE, 2)}, []))

    async def test_a_worker_that_leaves_during_the_lookup(self) -> None:
        """A dial that is given up while the registry is asked leaves nothing."""
        self.nodes.hang = Deferred()
        dialling = Deferred.fromCoroutine(self.dial(Authorization="Bearer t"))
        dialling.addErrback(lambda failure: None)
        await until(lambda: bool(self.nodes.asked), "the registry is asked")
        dialling.cancel()
        await no_connection_left()
        self.nodes.hang.callback(None)
        self.nodes.hang = None
        self.assertEqual((self.held.sessions(), self.rows.rows), ({}, {}))
        await self.dial("?id=n-2", Authorization="Bearer t")  # the door still works, and only this one is held
        await until(lambda: bool(self.held.sessions()), "the other tunnel is held")
        self.assertEqual(self.rows.rows, {"n-2": (HERE, 1)})

    async def test_a_frontend_that_begins_to_drain_during_the_lookup(self) -> None:
        """A tunnel is not admitted in the moment the frontend began to drain."""
        self.nodes.hang = Deferred()
        refused = Deferred.fromCoroutine(self.assert_refused(503, Authorization="Bearer t"))
        await until(lambda: bool(self.nodes.asked), "the registry is asked")
        self.accepting = False
        self.nodes.hang.callback(None)
        await refused

    async def test_an_unforeseen_error_is_500_and_logged(self) -> None:
        """A defect is told as 500, never as 401."""
        self.nodes.error = ZeroDivisionError("oops")
        await self.assert_refused(500, Authorization="Bearer t")
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)


class TogetherTests(DoorCase):
    """The worker's client and the frontend's door."""

    async def test_a_worker_connects_is_sent_on_and_comes_back(self) -> None:
        """A worker is admitted, told to go, opens its next tunnel before the old one ends, and is ready all along."""
        streams: list[MuxStream] = []
        other = self.listen(self.nodes)
        client = TunnelClient(
            name="box",
            reactor=reactor,
            urls=[self.base, other],
            node_id=lambda: NodeId("n-1"),
            token=lambda: "t",
            on_stream=streams.append,
            chance=lambda: 0.0,
        )
        client.startService()
        await until(lambda: self.held.get(NodeId("n-1")) is not None, "the tunnel is held")
        first = self.held.get(NodeId("n-1"))
        assert first is not None
        self.held.go_away(0.0)
        await until(lambda: self.held.get(NodeId("n-1")) not in (None, first), "the next tunnel is held")
        # Both doors lead to one frontend here, which closes the older tunnel as it gets the newer: the worker may hear
        # of that before it hears that it is in.
        following = self.held.get(NodeId("n-1"))
        assert following is not None
        await following.open()
        await until(lambda: bool(streams), "the worker serves a stream of the next tunnel")
        self.assertTrue(client.connected)
        self.assertEqual([epoch for _, epoch in self.rows.rows.values()], [2])
        await client.stopService()
        await until(lambda: not self.rows.rows, "the claim is released")
        self.assertFalse(client.connected)
