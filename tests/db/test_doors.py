"""The doors of a frontend on real sockets, with the real registry behind them."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from localai_dist import __version__, reach
from localai_dist.ids import InstanceId, NodeId
from localai_dist.mux.classes import TrafficClass
from localai_dist.net.handshake import read_frame, write_frame
from localai_dist.reach import Unreached
from localai_dist.registry.presence import PresenceState
from localai_dist.relay.peers import PeerPool
from localai_dist.wire.credentials import VERSION, digest
from tests.db.case import until
from tests.db.frontends import CONFIG, GRACE, REGISTRATION, Frontend, FrontendsCase
from tests.tunnel.sockets import reactor

EVIL = "http://evil.example"


class TunnelDoorTests(FrontendsCase):
    """``/api/cluster/connect``."""

    async def test_every_row_of_the_table_in_order(self) -> None:
        """Each condition of the table has its status, in the table's order, before any upgrade (CLUS-6)."""
        await self.begin()
        answer = await self.register(self.a)
        node, token = NodeId(answer["id"]), answer["tunnel_token"]
        other: dict[str, Any] = {"X_LocalAI_Dist_Version": "9.9.9", "Origin": EVIL}
        # Every dial breaks the later rules as well, so that the order is what decides.
        await self.refused(401, self.dial(self.a, "", None, query="", **other))
        await self.refused(401, self.dial(self.a, "", None, query="", Authorization="Bearer ", **other))
        await self.refused(401, self.dial(self.a, node, None, Authorization="Basic " + token, **other))
        self.a.accepting = False
        await self.refused(503, self.dial(self.a, "", "wrong", query="", **other))
        self.a.accepting = True
        await self.refused(400, self.dial(self.a, "", "wrong", query="", **other))
        await self.refused(400, self.dial(self.a, "", "wrong", query="?id=", **other))
        unknown = await self.refused(401, self.dial(self.a, "nobody", "wrong", **other))
        await self.pool_.execute("update backend_nodes set node_token_hash = ''")
        without = await self.refused(401, self.dial(self.a, node, "wrong", **other))
        await self.pool_.execute("update backend_nodes set node_token_hash = %(h)s", {"h": digest(token)})
        wrong = await self.refused(401, self.dial(self.a, node, "wrong", **other))
        self.assertEqual(len({str(unknown).replace("nobody", node), str(without), str(wrong)}), 1)  # no enumeration
        await self.refused(401, self.dial(self.a, node, REGISTRATION, **other))  # the shared token opens nothing here
        await self.refused(403, self.dial(self.a, node, token, **other))
        await self.a.nodes.approve(node)
        await self.refused(426, self.dial(self.a, node, token, **other))
        status, answer = await self.http(self.a, "GET", f"/api/cluster/connect?id={node}", key=token, **other)
        self.assertEqual(status, 426)
        for word in ("9.9.9", __version__, "upgrade all frontends first"):
            self.assertIn(word, answer["error"]["message"])
        await self.refused(403, self.dial(self.a, node, token, Origin=EVIL))
        self.assertIsNone(await self.row(node))
        self.assertEqual(self.a.held.sessions(), {})
        await self.dial(self.a, node, None, Authorization="bearer " + token, Origin=self.a.url)  # and now it opens
        await self.held(self.a, node)

    async def test_a_database_failure_is_never_401(self) -> None:
        """A lookup that fails is 500, for a right, a wrong and an unknown identity, so nobody forgets his (CLUS-6)."""
        await self.begin()
        node, token = await self.approved(self.a)
        await self.b.pool.stop()
        for who, what in ((node, token), (node, "wrong"), ("nobody", "wrong")):
            refusal = await self.refused(500, self.dial(self.b, who, what))
            self.assertEqual(refusal.headers["retry-after"], "1")
        await self.b.pool.start()
        await self.dial(self.b, node, token)
        await self.held(self.b, node)

    async def test_draining_unhealthy_and_offline_nodes_are_admitted(self) -> None:
        """Only approval decides on a right identity, never the node's status (CLUS-6)."""
        await self.begin()
        node, token = await self.approved(self.a)
        for status in ("draining", "unhealthy", "offline"):
            await self.pool_.execute("update backend_nodes set status = %(s)s", {"s": status})
            session = await self.dial(self.a, node, token)
            await self.held(self.a, node)
            session.abort(Exception("next"))
            await until(lambda: not self.a.held.sessions(), "it is released")

    async def test_a_credential_rotated_elsewhere_counts_on_the_next_dial(self) -> None:
        """What one frontend rotates is in force at the other at once; nothing is remembered there (CLUS-6)."""
        await self.begin(loose=True)
        node, first = await self.approved(self.a)
        await self.dial(self.b, node, first)
        await self.held(self.b, node)
        second = (await self.register(self.a))["tunnel_token"]
        self.assertNotEqual(first, second)
        await self.refused(401, self.dial(self.b, node, first))
        await self.dial(self.b, node, second)


class PeerDoorTests(FrontendsCase):
    """``/api/cluster/peer``."""

    async def test_both_credentials_or_nothing(self) -> None:
        """The shared token proves no identity, an identity proves no membership; only both open a link (CLUS-7)."""
        await self.begin()
        await self.a.instances.register(InstanceId("blank"), None, "1", "")
        dials: list[tuple[int, str | None, str, str | None]] = [
            (401, None, "", None),
            (401, "b", "", self.b.secret),
            (401, "b", "not-it", self.b.secret),
            (400, None, REGISTRATION, self.b.secret),
            (401, "b", REGISTRATION, None),  # the shared token alone
            (401, "b", REGISTRATION, ""),
            (401, "a", REGISTRATION, self.b.secret),  # another one's id with the own secret
            (401, "blank", REGISTRATION, ""),
            (401, "blank", REGISTRATION, self.b.secret),
            (401, "nobody", REGISTRATION, self.b.secret),
        ]
        for status, id, bearer, secret in dials:
            refusal = await self.refused(status, self.dial_peer(self.a, id, bearer=bearer, secret=secret))
            self.assertIn(VERSION.lower(), refusal.headers)
        status, answer = await self.http(self.a, "GET", "/api/cluster/peer?id=b")  # the shared token alone
        self.assertEqual((status, answer["error"]["code"]), (401, "peer_identity_not_proven"))
        for word in ("identity", "upgrade all frontends first", "then the workers"):
            self.assertIn(word, answer["error"]["message"])
        await self.a.pool.stop()
        await self.refused(500, self.dial_peer(self.a, "b", bearer=REGISTRATION, secret=self.b.secret))
        await self.a.pool.start()
        link = await self.dial_peer(self.a, "b", bearer=REGISTRATION, secret=self.b.secret)
        await self.answers(link)

    async def test_a_refused_dial_displaces_nobody(self) -> None:
        """Whoever fails to prove to be ``b`` leaves the real link of ``b`` open and working (CLUS-7)."""
        await self.begin()
        link = await self.dial_peer(self.a, "b", bearer=REGISTRATION, secret=self.b.secret)
        for secret in (None, "", "guess", self.a.secret):
            await self.refused(401, self.dial_peer(self.a, "b", bearer=REGISTRATION, secret=secret))
            await self.answers(link)

    async def test_an_empty_configured_token_admits_nobody(self) -> None:
        """A frontend without a registration token takes no peer, whatever is presented (CLUS-7)."""
        await self.begin()
        bare = await self.frontend("bare", token="")
        for bearer in ("", REGISTRATION):
            await self.refused(401, self.dial_peer(bare, "b", bearer=bearer, secret=self.b.secret))
        status, _ = await self.http(bare, "POST", "/api/node/register", {"name": "x"})
        self.assertEqual(status, 401)

    async def test_a_frontend_with_another_secret_is_rejected(self) -> None:
        """To its own requests a frontend whose identity is refused says "rejected", on which nobody acts (CLUS-7)."""
        await self.begin()
        impostor = PeerPool(
            reactor=reactor, instance=InstanceId("b"), registration_token=REGISTRATION, secret="stolen", config=CONFIG
        )
        error = await self.assert_raises(
            Unreached, impostor.open(self.a.instance, self.a.address, TrafficClass.INFERENCE)
        )
        assert isinstance(error.outcome, reach.PeerUnreachable)
        self.assertTrue(error.outcome.rejected)
        self.assertIn("upgraded", reach.describe(error.outcome))
        self.assertFalse(reach.may_reap(error.outcome) or reach.may_demote(error.outcome))
        impostor.close()

    async def answers(self, link: Any) -> None:
        """The link carries a stream, and its far end answers as a relay does."""
        stream = await link.open()
        write_frame(stream, b"some-node - i")
        self.assertIn(b"relay-not-owner", await read_frame(stream, clock=reactor, timeout=5))
        stream.abortConnection()


class NodeIdentityTests(FrontendsCase):
    """``/api/node/…``."""

    ROUTES: tuple[tuple[str, str, Any], ...] = (
        ("POST", "/heartbeat", {"available_vram": 1}),
        ("POST", "/drain", {}),
        ("POST", "/resume", {}),
        ("POST", "/deregister", {}),
        ("DELETE", "", None),
        ("GET", "/models", None),
    )

    async def test_another_nodes_credential_is_403_and_none_is_401(self) -> None:
        """Each route of a node refuses a stranger and changes nothing (CLUS-8)."""
        await self.begin()
        node, token = await self.approved(self.a)
        _, stranger = await self.approved(self.a, "gpu-2")
        await self.a.replicas.put(node, "m", 0, "127.0.0.1:20000", "s", "llama-cpp", "loaded", "r")
        before = await self.everything()
        for method, route, body in self.ROUTES:
            for presented, status in (("", 401), (stranger, 403), ("guess", 403), (REGISTRATION, 403)):
                got, _ = await self.http(self.b, method, f"/api/node/{node}{route}", body, node_token=presented)
                self.assertEqual(got, status, f"{method} {route} with {presented!r}")
        self.assertEqual(await self.everything(), before)
        for method, route, body in self.ROUTES[:3]:
            got, _ = await self.http(self.b, method, f"/api/node/{node}{route}", body, node_token=token)
            self.assertEqual(got, 200, route)

    async def test_a_newcomer_under_a_known_name_touches_nothing(self) -> None:
        """A known name without its token waits with a parked hash; the real node goes on as it was (CLUS-8)."""
        await self.begin()
        node, token = await self.approved(self.a)
        await self.a.replicas.put(node, "m", 0, "127.0.0.1:20000", "s", "llama-cpp", "loaded", "r")
        tunnel = await self.dial(self.a, node, token)
        await self.held(self.a, node)
        before, connection = await self.everything(), await self.row(node)
        newcomer = await self.register(self.b, boot_id="other", total_vram=10**12, labels={"evil": "yes"})
        self.assertEqual((newcomer["status"], newcomer["id"]), ("pending", node))
        self.assertIn("exists already (healthy, registered from 127.0.0.1, last heard of", newcomer["message"])
        for secret in (token, newcomer["tunnel_token"], digest(token)):
            self.assertNotIn(secret, newcomer["message"])
        await self.refused(403, self.dial(self.b, node, newcomer["tunnel_token"]))
        for route in ("heartbeat", "drain", "deregister"):
            parked = newcomer["tunnel_token"]
            got, _ = await self.http(self.b, "POST", f"/api/node/{node}/{route}", {}, node_token=parked)
            self.assertEqual(got, 403, route)
        after = await self.everything()
        self.assertEqual([row["parked_token_hash"] for row in after[0]], [digest(newcomer["tunnel_token"])])
        for rows in (before, after):
            for row in rows[0]:
                del row["parked_token_hash"], row["parked_at"], row["parked_from"]
        self.assertEqual(after, before)
        self.assertEqual(await self.row(node), connection)
        self.assertTrue(tunnel.is_open)
        await self.works(self.a, node)
        await self.dial(self.b, node, token)  # and its next dial still works
        await self.held(self.b, node)

    async def test_approving_the_newcomer_swaps_the_identity(self) -> None:
        """Approved, the newcomer is the node: its dial opens, and the old token is refused everywhere (CLUS-8)."""
        await self.begin()
        node, old = await self.approved(self.a)
        await self.dial(self.a, node, old)
        await self.held(self.a, node)
        new = (await self.register(self.b, boot_id="other"))["tunnel_token"]
        status, _ = await self.admin(self.a, "POST", f"/api/nodes/{node}/approve")
        self.assertEqual(status, 200)
        await self.refused(401, self.dial(self.b, node, old))
        await self.dial(self.b, node, new)
        await self.held(self.b, node)
        route = await self.a.ownership.route(node, grace=GRACE)
        self.assertEqual((route.presence.state, route.owner), (PresenceState.CONNECTED, self.b.instance))
        got, _ = await self.http(self.a, "POST", f"/api/node/{node}/heartbeat", {}, node_token=old)
        self.assertEqual(got, 403)

    async def test_pending_ends_by_approval_alone(self) -> None:
        """Drain, resume, heartbeats, good-bye and a restarted worker leave a pending node pending (CLUS-8)."""
        await self.begin()
        answer = await self.register(self.a)
        node, token = NodeId(answer["id"]), answer["tunnel_token"]

        async def pending(after: str) -> None:
            found = await self.a.nodes.get(node)
            assert found is not None
            self.assertEqual((found.status, found.approved), ("pending", False), after)
            await self.refused(403, self.dial(self.b, node, token))

        for route in ("heartbeat", "drain", "resume", "deregister", "heartbeat"):
            await self.http(self.a, "POST", f"/api/node/{node}/{route}", {}, node_token=token)
            await pending(route)
        for route in ("drain", "resume"):
            await self.admin(self.b, "POST", f"/api/nodes/{node}/{route}")
            await pending(f"an operator's {route}")
        for boot in ("boot", "another", ""):
            again = await self.register(self.b, token=token, boot_id=boot)
            self.assertEqual((again["tunnel_token"], again["status"]), (token, "pending"))
            await pending(f"a restart with boot id {boot!r}")
        await self.admin(self.a, "POST", f"/api/nodes/{node}/approve")
        await self.dial(self.b, node, token)
        await self.held(self.b, node)

    async def test_the_same_boot_id_drops_no_row(self) -> None:
        """A worker that only registers again keeps its replicas; one that restarted does not (CLUS-8)."""
        await self.begin()
        node, token = await self.approved(self.a)
        for boot, kept in (("boot", 1), ("another", 0), ("another", 1), ("", 0)):
            await self.a.replicas.put(node, "m", 0, "127.0.0.1:20000", "s", "llama-cpp", "loaded", "r")
            await self.register(self.b, token=token, boot_id=boot)
            self.assertEqual(len(await self.a.replicas.for_node(node)), kept, boot)

    async def everything(self) -> tuple[list[dict[str, Any]], ...]:
        """Rows of nodes, labels and replicas."""
        tables = [
            await self.pool_.fetch(f"select * from {table} order by 1, 2")
            for table in ("backend_nodes", "node_labels", "node_models")
        ]
        return tuple([dict(row) for row in table] for table in tables)


class RedialTests(FrontendsCase):
    """A worker that comes back before its old tunnel is known to be dead."""

    async def test_a_redial_over_a_silent_old_socket(self) -> None:
        """
        A worker that redials while its old socket is open and silent is admitted at once, here or elsewhere, under
        another epoch; the late end of the old one touches nothing (CLUS-2, BR-011).
        """
        await self.begin()
        node, token = await self.approved(self.a)
        first = await self.dial(self.a, node, token)
        old = await self.held(self.a, node)
        row = await self.row(node)
        assert row is not None
        await self.dial(self.a, node, token)  # the same frontend: the old one is still open
        await until(lambda: self.a.held.get(node) not in (None, old), "the new session is held")
        again = await self.row(node)
        assert again is not None
        self.assertNotEqual(again["epoch"], row["epoch"])
        first.abort(Exception("late"))
        silent = await self.held(self.a, node)
        third = await self.dial(self.b, node, token)  # the other frontend: the one at the first stays, silent
        await self.held(self.b, node)
        moved = await self.row(node)
        assert moved is not None
        self.assertEqual(moved["owner_instance_id"], "b")
        silent.abort(Exception("keepalive"))
        await until(lambda: not self.a.held.sessions(), "the first frontend let go")
        self.assertEqual(await self.row(node), moved)  # its clean-up was fenced
        self.assertTrue(third.is_open)
        await self.works(self.a, node)
        await self.works(self.b, node)

    async def test_a_hundred_flip_flops(self) -> None:
        """After 100 redials between two frontends there is one owner, one row, and requests work from both (CLUS-2)."""
        await self.begin()
        node, token = await self.approved(self.a)
        sides: list[Frontend] = [self.a, self.b]
        epochs: set[int] = set()
        previous = None
        for turn in range(100):
            at = sides[turn % 2]
            session = await self.dial(at, node, token)
            await self.held(at, node)
            row = await self.row(node)
            assert row is not None
            self.assertEqual(row["owner_instance_id"], at.instance)
            epochs.add(row["epoch"])
            if previous is not None:
                previous.abort(Exception("left late"))
            previous = session
        self.assertEqual(len(epochs), 100)
        await until(lambda: not self.a.held.sessions(), "the first frontend let go")
        row = await self.row(node)
        assert row is not None
        self.assertEqual((row["owner_instance_id"], row["disconnected_at"]), ("b", None))
        self.assertEqual(await self.b.ownership.held_by(self.b.instance), {node: row["epoch"]})
        await self.works(self.a, node)
        await self.works(self.b, node)


class RelayTests(FrontendsCase):
    """Between two real frontends."""

    async def test_one_hop_only_although_another_frontend_holds_the_tunnel(self) -> None:
        """A frontend that is asked for a tunnel held elsewhere refuses and ends the stream; no second hop (CLUS-9)."""
        await self.begin()
        c = await self.frontend("c")
        node, token = await self.approved(self.a)
        await self.dial(self.b, node, token)
        await self.held(self.b, node)
        stream = await c.peers.open(self.a.instance, self.a.address, TrafficClass.INFERENCE)
        write_frame(stream, f"{node} - i".encode())
        self.assertIn(b"relay-not-owner", await read_frame(stream, clock=reactor, timeout=5))
        await until(lambda: not stream.is_live or stream.session.stream_count == 0, "the stream ended")
        self.assertEqual(self.a.peers._links, {})  # it did not so much as dial the owner
        await self.works(c, node)  # who asks the owner itself is served

    async def test_sixteen_at_once_are_one_dial(self) -> None:
        """Sixteen requests at the same moment open one link to the owner (CLUS-9)."""
        await self.begin()
        node, token = await self.approved(self.a)
        await self.dial(self.b, node, token)
        await self.held(self.b, node)
        await gatherResults([Deferred.fromCoroutine(self.works(self.a, node)) for _ in range(16)])
        self.assertEqual(len(self.b.peer_door._links), 1)
        self.assertEqual(len(self.a.peers._links), 1)

    async def test_a_peer_that_restarted_elsewhere_under_its_id(self) -> None:
        """A frontend that came back on another port with another secret is found again by its id (CLUS-9)."""
        await self.begin()
        node, token = await self.approved(self.a)
        await self.dial(self.b, node, token)
        await self.held(self.b, node)
        await self.works(self.a, node)
        await self.b.close()
        self.b = await self.frontend("b")
        await self.dial(self.b, node, token)
        await self.held(self.b, node)
        await self.works(self.a, node)

    async def test_one_stream_cut_costs_nothing_else(self) -> None:
        """A relayed stream that is cut leaves the link and the other streams on it alone (CLUS-9)."""
        await self.begin()
        node, token = await self.approved(self.a)
        await self.dial(self.b, node, token)
        await self.held(self.b, node)
        await self.works(self.a, node)
        (link,) = self.a.peers._links.values()
        for _ in range(20):
            await self.works(self.a, node)  # each ends with a reset
        self.assertEqual(list(self.a.peers._links.values()), [link])

    async def test_the_first_call_after_an_outage(self) -> None:
        """
        A call that failed while the tunnel was away costs the next one nothing: it works at once when the owner's row
        is back, wherever that is, and reaches that worker, not another one at the same backend address (BR-026).
        """
        await self.begin()
        (one, token), (two, other) = await self.approved(self.a), await self.approved(self.a, "gpu-2")
        await self.dial(self.b, two, other, says=b"two:")
        await self.held(self.b, two)
        for turn in range(6):
            at = (self.a, self.b)[turn % 2]
            tunnel = await self.dial(at, one, token, says=b"one:")
            await self.held(at, one)
            for frontend in (self.a, self.b):
                await self.works(frontend, one, within=2.0, says=b"one:")
                await self.works(frontend, two, within=2.0, says=b"two:")
            tunnel.abort(Exception("the outage"))
            await until(lambda at=at: at.held.get(one) is None, "it is noticed")  # type: ignore[misc]
            for frontend in (self.a, self.b):
                error = await self.assert_raises(Unreached, self.works(frontend, one, within=2.0))
                self.assertIsInstance(error.outcome, reach.Reconnecting | reach.PeerUnreachable)

    async def test_every_condition_by_name(self) -> None:
        """Never dialled, reconnecting, departed and an owner out of reach are told apart over the real registry."""
        await self.begin()
        node, token = await self.approved(self.a)
        self.assertEqual(await self.outcome(node), reach.NoRoute(node, departed=False))
        session = await self.dial(self.b, node, token)
        await self.held(self.b, node)
        await self.b.stop_listening()
        self.assertIsInstance(await self.outcome(node), reach.PeerUnreachable)
        session.abort(Exception("pulled"))
        await until(lambda: self.released(node), "the row says that it is released")
        self.assertIsInstance(await self.outcome(node), reach.Reconnecting)
        await self.pool_.execute("update node_connections set disconnected_at = now() - interval '91 s'")
        self.assertEqual(await self.outcome(node), reach.NoRoute(node, departed=True))
        await self.a.pool.stop()
        self.assertIsInstance(await self.outcome(node), reach.RegistryUnknown)
        await self.a.pool.start()

    async def outcome(self, node: NodeId) -> reach.Outcome:
        """Why ``a`` does not reach the node."""
        error = await self.assert_raises(Unreached, self.works(self.a, node))
        outcome: reach.Outcome = error.outcome
        return outcome
