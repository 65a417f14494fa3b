"""What nodes say of themselves, and what operators ask of them."""

from __future__ import annotations

from dataclasses import replace

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.loads.errors import LoadCancelled, UnloadFailed
from localai_dist.loads.status import LoadStatus
from localai_dist.reach import Reconnecting, Unreached, VerbNotServed
from localai_dist.registry.errors import NotApproved
from localai_dist.registry.presence import PresenceState
from localai_dist.registry.records import Readings, Registration
from localai_dist.store.errors import StoreUnavailable
from localai_dist.wire.credentials import digest
from localai_dist.wire.verbs import BackendEntry, ListReply
from tests.httpapi.doubles import KEY, NODE, OTHER, REGISTRATION, FakePresence, FakeVerbs, World, make_node

BACKEND = {"name": "llama-cpp", "is_system": False, "is_meta": False, "version": "1"}


class RegisterTests(SynchronousTestCase):
    def test_register(self) -> None:
        """
        A worker registers with the registration token, waits for approval, and gets a node token to keep (WALK-9).
        """
        world = World()
        body = {"name": "box", "total_vram": 8, "labels": {"a": "b"}, "boot_id": "b1", "address": "10.0.0.1:1", "x": 1}
        got = world.node("POST", "/api/node/register", {**body, "token": REGISTRATION}, token="mine")
        self.assertEqual(got.status, 201)
        self.assertEqual(
            got.json,
            {
                "id": NODE,
                "name": "box",
                "node_type": "backend",
                "status": "pending",
                "created_at": "2026-01-02T03:04:05Z",
                "tunnel_token": "fresh-token",
            },
        )
        registration = Registration(
            "box",
            total_vram=8,
            labels={"a": "b"},
            boot_id="b1",
            token_hash=digest(REGISTRATION),
            seen_from="192.168.1.1",
        )
        self.assertEqual(world.api.nodes.said, [("register", registration, False, "mine", False)])  # type: ignore[attr-defined]

    def test_newcomer_under_a_known_name(self) -> None:
        """
        A newcomer under a known name is told that it is pending, whatever the node's own status is (WALK-9).
        """
        world = World(auto_approve=True)
        world.api.nodes.parked = True  # type: ignore[attr-defined]
        told = world.node("POST", "/api/node/register", {"name": "box"}).json
        self.assertEqual(told["status"], "pending")
        self.assertIn("a node named box exists already", told["message"])
        self.assertIn("'localai-dist nodes approve box' replaces it", told["message"])
        self.assertNotIn(told["tunnel_token"], told["message"])

    def test_where_it_came_from(self) -> None:
        """
        The address of a registration is the connection's, with what its proxies say before it, bounded and readable.
        """
        for claimed, seen in (
            (None, "192.168.1.1"),
            ("10.0.0.7, 10.9.9.9", "10.0.0.7 by way of 192.168.1.1"),
            ("a" * 999, "a" * 64 + " by way of 192.168.1.1"),
            ("\xe9", "192.168.1.1"),
            ("", "192.168.1.1"),
        ):
            world = World()
            proxy = {} if claimed is None else {"x_forwarded_for": claimed}
            got = world.send("POST", "/api/node/register", {"name": "box"}, key=REGISTRATION, **proxy)
            self.assertEqual(got.status, 201)
            self.assertEqual(world.api.nodes.said[0][1].seen_from, seen)  # type: ignore[attr-defined]

    def test_token(self) -> None:
        """
        A wrong, missing or empty registration token registers nobody, in header and body; an empty configured one
        admits nobody (WALK-9).
        """
        world = World()
        for key in (None, "", "wrong", "the-key"):
            got = world.send("POST", "/api/node/register", {"name": "box"}, key=key)
            self.assertEqual((got.status, got.headers["www-authenticate"]), (401, "Bearer"))
        self.assertEqual(world.node("POST", "/api/node/register", {"name": "box", "token": "wrong"}).status, 401)
        self.assertEqual(world.api.nodes.said, [])  # type: ignore[attr-defined]
        world = World(registration_token="")
        for key in (None, "", "anything"):
            self.assertEqual(world.send("POST", "/api/node/register", {"name": "box"}, key=key).status, 401)

    def test_two_credentials(self) -> None:
        """
        Two credentials in one request are a wrong one, whichever comes first: a key, a registration token, a node's.
        """
        world = World()
        box = {"name": "box"}
        for first, second in ((REGISTRATION, "x"), ("x", REGISTRATION)):
            got = world.send("POST", "/api/node/register", box, key=first, Authorization=f"Bearer {second}")
            self.assertEqual(got.status, 401)
        for first, second in ((KEY, "x"), ("x", KEY)):
            self.assertEqual(world.send("GET", "/v1/models", key=first, Authorization=f"Bearer {second}").status, 401)
            twice = {"x_api_key": first, "X_API_Key": second}
            self.assertEqual(world.send("GET", "/v1/models", key=None, **twice).status, 401)
        path = f"/api/node/{NODE}/heartbeat"
        for first, second in (("token-box", "token-other"), ("token-other", "token-box")):
            twice = {"X_LocalAI_Node_Token": first, "x_localai_node_token": second}
            self.assertEqual(world.send("POST", path, {}, key=REGISTRATION, **twice).status, 403)
        self.assertEqual(world.api.nodes.said, [])  # type: ignore[attr-defined]
        self.assertEqual(world.node("POST", path, {}, token="token-box").status, 200)

    def test_what_can_not_be(self) -> None:
        """
        A registration with a field of a wrong type or range is a 400 that names it (WALK-17).
        """
        for field, wrong in (
            ("name", ""),
            ("name", "x" * 256),
            ("name", 7),
            ("node_type", "robot"),
            ("total_vram", -1),
            ("total_disk", 2**63),
            ("max_replicas_per_model", -1),
            ("labels", ["a"]),
            ("boot_id", "x" * 65),
        ):
            got = World().node("POST", "/api/node/register", {"name": "box", field: wrong})
            self.assertEqual((got.status, got.error["param"]), (400, field), got.error)

    def test_names_that_are_routes(self) -> None:
        """A node can't be called what the operators' routes have after /api/nodes/: it could not be asked for."""
        for name in ("scheduling", "models"):
            world = World()
            got = world.node("POST", "/api/node/register", {"name": name})
            self.assertEqual((got.status, got.error["param"]), (400, "name"), got.error)
            self.assertIn(f"'{name}' can't be a node's name", got.error["message"])
            self.assertEqual(world.api.nodes.said, [])  # type: ignore[attr-defined]
            self.assertEqual(World().node("POST", "/api/node/register", {"name": f"{name}-1"}).status, 201)


class NodeTokenTests(SynchronousTestCase):
    def test_a_node_is_itself(self) -> None:
        """
        Every call of a node carries its own token: missing 401, another node's 403, unknown node 404 (WALK-9).
        """
        world = World()
        for method, path in (
            ("POST", "heartbeat"),
            ("POST", "drain"),
            ("POST", "resume"),
            ("POST", "deregister"),
            ("DELETE", ""),
            ("GET", "models"),
        ):
            whole = f"/api/node/{NODE}/{path}".rstrip("/")
            self.assertEqual(world.node(method, whole).status, 401)
            self.assertEqual(world.node(method, whole, token="").status, 401)
            self.assertEqual(world.node(method, whole, token="token-other").status, 403)
            self.assertEqual(world.send(method, whole, key="the-key").status, 401)
            self.assertEqual(world.node(method, whole.replace(NODE, "unknown"), token="token-box").status, 404)
            self.assertEqual(world.node(method, whole.replace(NODE, "a b".replace(" ", "%20")), token="t").status, 404)
            self.assertEqual(world.node(method, whole, token="token-box").status, 200)

    def test_loose_identity(self) -> None:
        """
        Stock workers send no token of their own: with loose identity they may; a wrong one is still wrong.
        """
        world = World(loose_identity=True)
        self.assertEqual(world.node("POST", f"/api/node/{NODE}/heartbeat").status, 200)
        self.assertEqual(world.node("POST", f"/api/node/{NODE}/heartbeat", token="wrong").status, 403)
        self.assertEqual(world.node("POST", "/api/node/unknown/heartbeat").status, 404)

    def test_heartbeat(self) -> None:
        """
        A heartbeat's readings are recorded; what is absent stays; a reading that can't be is refused. The answer says
        whether the registry knows of the node's tunnel.
        """
        world = World()
        path = f"/api/node/{NODE}/heartbeat"
        got = world.node("POST", path, {"available_ram": 5, "available_disk": 0}, token="token-box")
        self.assertEqual(got.json, {"message": "heartbeat received", "tunnel_held": True})
        self.assertEqual(
            world.api.nodes.said,  # type: ignore[attr-defined]
            [("heartbeat", NODE, Readings(available_ram=5, available_disk=0))],
        )
        got = world.node("POST", path, {"available_ram": "much"}, token="token-box")
        self.assertEqual((got.status, got.error["param"]), (400, "available_ram"))

    def test_own_models(self) -> None:
        """
        A node sees its own replicas, without the backends' tokens (WALK-23).
        """
        got = World().node("GET", f"/api/node/{NODE}/models", token="token-box")
        self.assertEqual([(one["model_name"], one["state"]) for one in got.json], [("tiny", "loaded")])
        self.assertNotIn("backend-secret", got.raw.decode())


class AdminTests(SynchronousTestCase):
    def test_every_admin_route_wants_a_key(self) -> None:
        """
        No admin route answers without a key, nor to the registration token.
        """
        world = World()
        for method, path in (
            ("GET", "/api/nodes"),
            ("GET", "/api/nodes/models"),
            ("GET", f"/api/nodes/{NODE}"),
            ("DELETE", f"/api/nodes/{NODE}"),
            ("POST", f"/api/nodes/{NODE}/approve"),
            ("PUT", f"/api/nodes/{NODE}/labels"),
            ("POST", "/api/nodes/scheduling"),
            ("POST", "/backend/load"),
            ("POST", "/backend/shutdown"),
            ("GET", "/api/operations"),
            ("POST", "/api/operations/staging:tiny/cancel"),
        ):
            self.assertEqual(world.send(method, path, key=None).status, 401)
            self.assertEqual(world.node(method, path).status, 401)

    def test_list(self) -> None:
        """
        The list has every node with its approval and its tunnel.
        """
        box, other = World().send("GET", "/api/nodes").json
        self.assertEqual((box["id"], box["name"], box["status"], box["approved"]), (NODE, "box", "healthy", True))
        self.assertEqual(
            box["tunnel"],
            {
                "state": "connected",
                "owner": "front-0",
                "epoch": 7,
                "since": "2026-01-02T03:04:05Z",
                "grace_ends_at": None,
            },
        )
        self.assertEqual(other["tunnel"]["state"], "never_dialled")
        for name in ("labels", "model_count", "in_flight_count", "last_heartbeat", "max_replicas_per_model"):
            self.assertIn(name, box)

    def test_presence_that_can_not_be_read(self) -> None:
        """
        While the registry can't say where tunnels are, the list says so; without any registry it is a 503.
        """
        world = World(ownership=FakePresence(StoreUnavailable("gone")))
        self.assertEqual(world.send("GET", "/api/nodes").json[0]["tunnel"]["state"], "registry_unavailable")
        world.api.nodes.trouble = StoreUnavailable("the database connection was lost")  # type: ignore[attr-defined]
        got = world.send("GET", "/api/nodes")
        self.assertEqual((got.status, got.error["code"]), (503, "registry_unavailable"))
        self.assertIn("retry-after", got.headers)

    def test_by_id_or_by_name(self) -> None:
        """
        A node is found by its id or its name; an unknown one is 404 everywhere.
        """
        world = World()
        self.assertEqual(world.send("GET", f"/api/nodes/{NODE}").json["name"], "box")
        self.assertEqual(world.send("GET", "/api/nodes/other").json["id"], OTHER)
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/drain"), ("POST", "/approve"), ("GET", "/labels")):
            got = world.send(method, f"/api/nodes/nobody{path}")
            self.assertEqual((got.status, got.error["code"]), (404, "not_found"))

    def test_text_the_registry_can_not_hold(self) -> None:
        """
        A NUL in a path is nothing that exists, in a body a 400 that names the field.
        """
        world = World()
        self.assertEqual(world.send("GET", "/api/nodes/a%00b").status, 404)
        self.assertEqual(world.send("DELETE", "/api/nodes/box/labels/%00").status, 404)
        for method, path, field in (
            ("POST", "/api/nodes/box/models/unload", "model_name"),
            ("POST", "/api/nodes/scheduling", "model_name"),
            ("POST", "/backend/shutdown", "model"),
        ):
            got = world.send(method, path, {field: "a\0b"})
            self.assertEqual((got.status, got.error["param"]), (400, field))

    def test_approve(self) -> None:
        """
        Approving ends a tunnel under the old identity; approving twice is a 400 (WALK-9).
        """
        world = World()
        world.api.nodes.rows[NODE] = make_node(status="pending", approved=False)  # type: ignore[attr-defined]
        got = world.send("POST", "/api/nodes/box/approve")
        self.assertEqual((got.status, got.json["message"], got.json["status"]), (200, "node approved", "healthy"))
        self.assertEqual(world.ended, [NODE])
        self.assertEqual(world.send("POST", "/api/nodes/box/approve").status, 400)
        self.assertEqual(world.ended, [NODE])

    def test_a_newcomer_is_seen_and_approved_knowingly(self) -> None:
        """
        Who waits under a node's name, and what approving does, is in the node's object; the approval's answer says whom
        it replaced (CLUS-8).
        """
        world = World()
        waiting = make_node(newcomer_waiting=True, registered_from="10.0.0.5", newcomer_from="10.0.0.7")
        world.api.nodes.rows[NODE] = waiting  # type: ignore[attr-defined]
        for shown in (world.send("GET", "/api/nodes/box").json, world.send("GET", "/api/nodes").json[0]):
            self.assertEqual((shown["registered_from"], shown["newcomer_from"]), ("10.0.0.5", "10.0.0.7"))
            self.assertIn("from 10.0.0.7; 'localai-dist nodes approve box' replaces it", shown["newcomer"])
        got = world.send("POST", "/api/nodes/box/approve").json
        self.assertEqual((got["message"], got["replaced"]), ("node approved", True))
        self.assertIn("it replaces the node of that name (healthy, registered from 10.0.0.5", got["notice"])
        self.assertNotIn("newcomer", world.send("GET", "/api/nodes/box").json)

    def test_drain_and_resume(self) -> None:
        """
        Draining and resuming say what they did; a node in the wrong state is a conflict.
        """
        world = World()
        self.assertEqual(world.send("POST", "/api/nodes/box/drain").json, {"message": "node set to draining"})
        self.assertEqual(world.send("POST", "/api/nodes/box/resume").json, {"message": "node resumed"})
        world.api.nodes.trouble = NotApproved(NODE)  # type: ignore[attr-defined]
        got = world.send("POST", "/api/nodes/box/drain")
        self.assertEqual((got.status, got.error["code"]), (409, "conflict"))

    def test_remove(self) -> None:
        """
        A removed node is gone, and its tunnel ends.
        """
        world = World()
        self.assertEqual(world.send("DELETE", "/api/nodes/box").json, {"message": "node deregistered"})
        self.assertEqual((world.ended, world.send("GET", "/api/nodes/box").status), ([NODE], 404))

    def test_labels(self) -> None:
        """
        Labels are read, replaced, merged and deleted (WALK-5).
        """
        world = World()
        path = "/api/nodes/box/labels"
        self.assertEqual(world.send("PUT", path, {"rack": "1", "gpu": "none"}).json, {"rack": "1", "gpu": "none"})
        self.assertEqual(world.send("PATCH", path, {"rack": "2"}).json, {"rack": "2", "gpu": "none"})
        got = world.send("DELETE", f"{path}/gpu")
        self.assertEqual((got.status, got.body), (204, b""))
        self.assertEqual(world.send("GET", path).json, {"rack": "2"})
        for wrong in ({"a": 1}, {"": "x"}, {"k" * 256: "x"}, ["a"], "x"):
            self.assertEqual(world.send("PUT", path, wrong).status, 400)

    def test_scheduling(self) -> None:
        """
        A model is pinned by a rule; the routing knobs keep their value when they are left out (WALK-5).
        """
        world = World()
        rule = {
            "model_name": "tiny",
            "node_selector": {"node.name": "box"},
            "min_replicas": 1,
            "route_policy": "round_robin",
        }
        got = world.send("POST", "/api/nodes/scheduling", rule).json
        self.assertEqual((got["node_selector"], got["min_replicas"]), ('{"node.name": "box"}', 1))
        got = world.send("POST", "/api/nodes/scheduling", {"model_name": "tiny", "max_replicas": 2}).json
        self.assertEqual((got["node_selector"], got["min_replicas"], got["route_policy"]), ("", 0, "round_robin"))
        self.assertEqual(world.send("GET", "/api/nodes/scheduling/tiny").json["max_replicas"], 2)
        self.assertEqual(len(world.send("GET", "/api/nodes/scheduling").json), 1)
        self.assertEqual(world.send("DELETE", "/api/nodes/scheduling/tiny").status, 204)
        self.assertEqual(world.send("GET", "/api/nodes/scheduling/tiny").status, 404)

    def test_scheduling_that_contradicts_itself(self) -> None:
        """
        A rule that can't hold is a 400 that names the field (WALK-17).
        """
        for rule, param in (
            ({}, "model_name"),
            ({"model_name": "x", "min_replicas": 3, "max_replicas": 2}, "min_replicas"),
            ({"model_name": "x", "spread_all": True, "min_replicas": 1}, "spread_all"),
            ({"model_name": "x", "route_policy": "luck"}, "route_policy"),
            ({"model_name": "x", "min_replicas": -1}, "min_replicas"),
            ({"model_name": "x", "min_prefix_match": 2}, "min_prefix_match"),
            ({"model_name": "x", "node_selector": {"a": 1}}, "node_selector[...]"),
        ):
            got = World().send("POST", "/api/nodes/scheduling", rule)
            self.assertEqual((got.status, got.error["param"]), (400, param), got.error)

    def test_models(self) -> None:
        """
        All loaded replicas, or every replica of one node; never a backend's token (WALK-23).
        """
        world = World()
        got = world.send("GET", "/api/nodes/models")
        self.assertEqual([one["model_name"] for one in got.json], ["tiny"])
        self.assertNotIn("backend-secret", got.raw.decode())
        self.assertEqual([one["state"] for one in world.send("GET", "/api/nodes/other/models").json], ["staging"])

    def test_a_model_of_a_departed_node_is_not_loaded(self) -> None:
        """
        A replica is listed while its node's tunnel may come back, and no more once the node departed (BR-015).
        """
        world = World()
        states = (PresenceState.CONNECTED, PresenceState.RECONNECTING, PresenceState.DEPARTED)
        listed = []
        for state in states:
            world.api.ownership.state = state  # type: ignore[attr-defined]
            listed.append(len(world.send("GET", "/api/nodes/models").json))
        self.assertEqual(listed, [1, 1, 0])

    def test_unload(self) -> None:
        """
        Unloading fails with the cause while the backend is not gone (WALK-21).
        """
        world = World()
        path = "/api/nodes/box/models/unload"
        self.assertEqual(world.send("POST", path, {"model_name": "tiny"}).json, {"message": "model unloaded"})
        self.assertEqual(world.loads.unloads, [("tiny", NODE)])
        world.loads.gone = []
        got = world.send("POST", path, {"model_name": "tiny"})
        self.assertEqual((got.status, got.error["message"]), (404, "the model 'tiny' is not loaded on node box"))
        world.loads.gone = UnloadFailed("the process survives SIGKILL")
        got = world.send("POST", path, {"model_name": "tiny"})
        self.assertEqual((got.status, got.error["message"]), (500, "the process survives SIGKILL"))
        world.loads.gone = Unreached(Reconnecting(NODE))
        self.assertEqual(world.send("POST", path, {"model_name": "tiny"}).error["code"], "worker_reconnecting")
        self.assertEqual(world.send("POST", path, {}).error["param"], "model_name")

    def test_backends(self) -> None:
        """
        Backends are listed as the worker says; an older worker, or an agent worker, is answered for what it is.
        """
        verbs = FakeVerbs(ListReply([BackendEntry("llama-cpp", version="1")]))
        world = World(verbs=verbs)
        self.assertEqual(world.send("GET", "/api/nodes/box/backends").json, [BACKEND])
        verbs.reply = ListReply(error="disk gone")
        self.assertEqual(world.send("GET", "/api/nodes/box/backends").error["message"], "disk gone")
        verbs.reply = Unreached(VerbNotServed("/v1/control/backend/list"))
        got = world.send("GET", "/api/nodes/box/backends")
        self.assertEqual((got.status, got.error["code"]), (501, "verb_not_served"))
        agent = replace(make_node(), node_type="agent")
        world.api.nodes.rows[NODE] = agent  # type: ignore[attr-defined]
        self.assertEqual(world.send("GET", "/api/nodes/box/backends").json, [])


class LoadTests(SynchronousTestCase):
    def test_load_and_shutdown(self) -> None:
        """
        A model is loaded and stopped by hand; what is loaded nowhere is 404.
        """
        world = World()
        got = world.send("POST", "/backend/load", {"model": "tiny"})
        told = {"message": "model loaded", "model": "tiny", "node": NODE, "node_name": "box"}
        self.assertEqual((got.status, got.json), (200, told))
        self.assertEqual(world.send("POST", "/v1/backend/load", {"model": "nope"}).status, 404)
        self.assertEqual(world.send("POST", "/backend/shutdown", {"model": "tiny"}).json, {"message": "model stopped"})
        world.loads.gone = []
        self.assertEqual(world.send("POST", "/backend/shutdown", {"model": "tiny"}).status, 404)

    def test_load_status(self) -> None:
        """
        A running load is told with its bytes; none is 404.
        """
        world = World()
        world.loads.running = [LoadStatus("tiny", "staging", "box", 50, 100, 1, 2)]
        got = world.send("GET", "/api/models/tiny/load-status")
        self.assertEqual((got.json["state"], got.json["progress"], got.json["total_files"]), ("staging", 50.0, 2))
        self.assertEqual(world.send("GET", "/api/models/words/load-status").status, 404)

    def test_operations(self) -> None:
        """
        Running loads are listed, the least far first, with node, file, bytes, rate and phase (LOAD-18).
        """
        world = World()
        world.loads.running = [
            replace(
                LoadStatus("b", "staging", "box", 50, 100, 1, 2, 2.0), phase="sending", rate=25.0, eta_range=(3, 9)
            ),
            LoadStatus("a", "failed", error="bad file"),
        ]
        first, second = world.send("GET", "/api/operations").json["operations"]
        self.assertEqual((first["id"], first["error"], first["progress"]), ("staging:a", "bad file", 0))
        self.assertEqual(
            (second["id"], second["phase"], second["nodeName"], second["progress"]), ("staging:b", "sending", "box", 50)
        )
        self.assertEqual((second["fileIndex"], second["totalFiles"], second["fileName"]), (1, 2, ""))
        self.assertEqual((second["currentBytes"], second["totalBytes"]), (50, 100))
        self.assertEqual((second["bytesPerSecond"], second["etaSeconds"], second["etaRange"]), (25, 2.0, [3, 9]))
        self.assertEqual([one["cancellable"] for one in (first, second)], [False, True])

    def test_cancel(self) -> None:
        """
        A running load is cancelled by its id; what does not run is 404 (LOAD-17).
        """
        world = World()
        world.loads.running = [LoadStatus("a/b", "staging")]
        got = world.send("POST", "/api/operations/staging:a%2Fb/cancel")
        self.assertEqual((got.status, got.json["success"]), (200, True))
        self.assertEqual(world.loads.cancelled, [("a/b", "cancelled by an operator")])
        for job in ("staging:nope", "a%2Fb", "install:x"):
            self.assertEqual(world.send("POST", f"/api/operations/{job}/cancel").status, 404)

    def test_a_cancelled_load_is_not_retried_by_the_client(self) -> None:
        """
        Whoever waited for a cancelled load is told so, and the official clients don't start it again (LOAD-17).
        """
        world = World()
        world.loads.result = LoadCancelled("the load of tiny was cancelled: cancelled by an operator")
        got = world.send("POST", "/backend/load", {"model": "tiny"})
        self.assertEqual((got.status, got.json["error"]["code"]), (500, "model_load_cancelled"))
        self.assertEqual(got.headers["x-should-retry"], "false")


class ProbeTests(SynchronousTestCase):
    def test_probes(self) -> None:
        """
        /healthz depends on nothing; /readyz follows the checks and the drain; neither wants a key.
        """
        world = World()

        def ready() -> tuple[int, str]:
            got = world.send("GET", "/readyz", key=None)
            return got.status, got.json["status"]

        self.assertEqual(ready(), (503, "starting"))
        world.readiness.note("database", True)
        self.assertEqual(ready(), (200, "ready"))
        world.readiness.note("database", False, "connection refused")
        self.assertEqual(ready(), (503, "degraded"))
        check = world.send("GET", "/readyz", key=None).json["checks"]["database"]
        self.assertEqual(
            (check["ok"], check["reason"], check["since"]), (False, "connection refused", "1970-01-12T13:46:40+00:00")
        )
        world.readiness.note("database", True)
        world.readiness.drain()
        self.assertEqual(ready(), (503, "draining"))
        self.assertEqual(world.send("GET", "/healthz", key=None).json, {"status": "ok"})

    def test_since(self) -> None:
        """
        A check's time is when it last turned, not when it was last looked at.
        """
        world = World()
        world.readiness.note("database", True)
        before = world.send("GET", "/readyz", key=None).json["checks"]["database"]["since"]
        world.clock.advance(5)
        world.readiness.note("database", True, "still fine")
        self.assertEqual(world.send("GET", "/readyz", key=None).json["checks"]["database"]["since"], before)

    def test_head(self) -> None:
        """
        HEAD is answered as GET without a body.
        """
        got = World().send("HEAD", "/healthz", key=None)
        self.assertEqual((got.status, got.body), (200, b""))

    def test_doors(self) -> None:
        """
        The tunnel's door takes its whole path, without any API key; a door this frontend lacks is 404.
        """
        world = World()
        got = world.send("GET", "/api/cluster/connect?id=x", key=None)
        self.assertEqual((got.status, got.body), (426, b"door of /api/cluster/connect"))
        self.assertEqual(world.send("GET", "/api/cluster/peer?id=x", key=None).status, 404)
