"""Where a model goes."""

from dataclasses import replace

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import NodeId
from localai_dist.reach import NoRoute, Reconnecting
from localai_dist.scheduler.facts import NodeFacts, ReplicaFacts, Tie
from localai_dist.scheduler.placement import Need, NoPlace, Placement, choose, warm
from localai_dist.units import GiB

A, B = NodeId("a"), NodeId("b")
NEED = Need("tiny", "r1", payload=1000)
BOTH = {A: Tie.CONNECTED, B: Tie.CONNECTED}


def node(id_: NodeId = A, **facts: object) -> NodeFacts:
    return replace(NodeFacts(id_, f"worker-{id_}"), **facts)  # type: ignore[arg-type]


def replica(at: NodeId = A, model: str = "tiny", revision: str = "r1", **facts: object) -> ReplicaFacts:
    return replace(ReplicaFacts(at, model, revision=revision), **facts)  # type: ignore[arg-type]


class WarmTests(SynchronousTestCase):
    def test_the_least_busy_then_the_longest_unused(self) -> None:
        """
        A request goes to the replica with the fewest requests, then to the one that rested longest.
        """
        busy, idle = replica(A, in_flight=2), replica(B, in_flight=1)
        self.assertEqual(warm([busy, idle], BOTH, NEED), idle)
        old, new = replica(A, last_used=1.0), replica(B, last_used=2.0)
        self.assertEqual(warm([new, old], BOTH, NEED), old)

    def test_connected_before_reconnecting(self) -> None:
        """
        A replica whose node is reconnecting is used only when no other is reachable.
        """
        near, far = replica(A, in_flight=9), replica(B)
        ties = {A: Tie.CONNECTED, B: Tie.RECONNECTING}
        self.assertEqual(warm([near, far], ties, NEED), near)
        self.assertEqual(warm([far], ties, NEED), far)

    def test_never_on_a_departed_node(self) -> None:
        """
        Replicas on departed nodes and on nodes that never dialled are not used.
        """
        for ties in ({A: Tie.DEPARTED}, {A: Tie.NEVER_DIALLED}, {}):
            self.assertIsNone(warm([replica(A)], ties, NEED))

    def test_only_this_model_loaded_in_this_revision(self) -> None:
        """
        Another model, another revision or a replica that is not loaded serves nothing.
        """
        others = [replica(model="x"), replica(revision="r0"), replica(state="unloading")]
        self.assertIsNone(warm(others, BOTH, NEED))


class ChooseTests(SynchronousTestCase):
    def refusal(
        self,
        nodes: list[NodeFacts],
        selector: dict[str, str] | None = None,
        replicas: list[ReplicaFacts] | None = None,
        ties: dict[NodeId, Tie] | None = None,
        need: Need = NEED,
    ) -> NoPlace:
        found = choose(nodes, selector or {}, replicas or [], BOTH if ties is None else ties, need)
        assert isinstance(found, NoPlace), found
        return found

    def test_a_node_that_left_is_not_waited_for(self) -> None:
        """
        A worker that was stopped on purpose is no reason to wait; one that lost its tunnel, or has our bytes, is.
        """
        ties = {A: Tie.RECONNECTING, B: Tie.RECONNECTING}
        gone = [node(A, left=True, status="offline"), node(B, left=True, status="offline")]
        refusal = self.refusal(gone, ties=ties)
        self.assertIsNone(refusal.outcome)
        self.assertIn("stopped on purpose: worker-a, worker-b", refusal.reason)
        self.assertEqual(self.refusal([gone[0], node(B)], ties=ties).outcome, Reconnecting("worker-b"))
        resumed = self.refusal(gone, ties=ties, need=replace(NEED, prefer=A))
        self.assertEqual(resumed.outcome, Reconnecting("worker-a"))

    def test_the_selector_of_the_scheduling_row_decides(self) -> None:
        """
        A model pinned by labels goes to the node that has all of them (WALK-5).
        """
        nodes = [node(A, labels={"disk": "ssd"}), node(B, labels={"disk": "ssd", "zone": "2"})]
        self.assertEqual(choose(nodes, {"disk": "ssd", "zone": "2"}, [], BOTH, NEED), Placement(B, "worker-b", 0))
        self.assertIn("zone=3", self.refusal(nodes, {"zone": "3"}).reason)

    def test_only_approved_backend_nodes(self) -> None:
        """
        Nodes that wait for approval and agent workers get no models.
        """
        self.refusal([node(A, approved=False), node(B, node_type="agent")])

    def test_neither_draining_nor_sick_nodes(self) -> None:
        """
        Draining, unhealthy and offline nodes get no models, and the refusal says why.
        """
        self.assertIn("draining", self.refusal([node(status="draining")]).reason)
        for status in ("unhealthy", "offline", "pending"):
            self.assertIn(f"worker-a {status}", self.refusal([node(status=status)]).reason)

    def test_a_missing_tunnel_is_named_as_its_condition(self) -> None:
        """
        When only the tunnels are missing, the condition nearest to passing by itself is told (WALK-16).
        """
        nodes = [node(A), node(B)]
        reconnecting = self.refusal(nodes, ties={A: Tie.DEPARTED, B: Tie.RECONNECTING})
        self.assertEqual(reconnecting.outcome, Reconnecting("worker-b"))
        departed = self.refusal(nodes, ties={A: Tie.DEPARTED})
        self.assertEqual(departed.outcome, NoRoute("worker-a", departed=True))
        never = self.refusal(nodes, ties={})
        self.assertEqual(never.outcome, NoRoute("worker-a", departed=False))

    def test_an_offline_node_without_a_tunnel_still_tells_the_condition(self) -> None:
        """
        A killed worker that is offline by now reads "no route", not "offline" (WALK-16).
        """
        refusal = self.refusal([node(status="offline")], ties={A: Tie.DEPARTED})
        self.assertEqual(refusal.outcome, NoRoute("worker-a", departed=True))

    def test_disk_headroom(self) -> None:
        """
        A node without room is not chosen, and the refusal names need and free (LOAD-15).
        """
        need = replace(NEED, payload=100 * GiB)
        self.assertEqual(need.room(A), 105 * GiB)
        full = node(A, total_disk=200 * GiB, available_disk=104 * GiB)
        roomy = node(B, total_disk=200 * GiB, available_disk=105 * GiB)
        self.assertEqual(choose([full, roomy], {}, [], BOTH, need), Placement(B, "worker-b", 0))
        reason = self.refusal([full], need=need).reason
        self.assertIn("105.0 GiB", reason)
        self.assertIn("104.0 GiB free", reason)

    def test_margins(self) -> None:
        """
        Small models need a margin of 1 GiB, unknown ones 2 GiB; a node that reports no disk is not excluded.
        """
        self.assertEqual(Need("m", "r", payload=0).room(A), 1 * GiB)
        self.assertEqual(Need("m", "r").room(A), 2 * GiB)
        self.assertIsInstance(choose([node(total_disk=0)], {}, [], BOTH, NEED), Placement)
        self.refusal([node(total_disk=GiB, available_disk=0)])

    def test_the_idlest_node(self) -> None:
        """
        An empty node before a used one, then the fewest requests, then the fewest replicas, then the most VRAM.
        """
        nodes = [node(A), node(B)]
        held = replica(A, model="x")
        self.assertEqual(choose(nodes, {}, [held], BOTH, NEED), Placement(B, "worker-b", 0))
        busy = [replica(A, model="x", in_flight=3), replica(B, model="x"), replica(B, model="y")]
        self.assertEqual(choose(nodes, {}, busy, BOTH, NEED), Placement(B, "worker-b", 0))
        rich = [node(A, available_vram=1), node(B, available_vram=2)]
        self.assertEqual(choose(rich, {}, [], BOTH, NEED), Placement(B, "worker-b", 0))

    def test_a_resumed_load_stays_where_its_bytes_are(self) -> None:
        """
        A load that is taken over goes on at the node that has its files, although another is idler (LOAD-6).
        """
        need = replace(NEED, prefer=A)
        found = choose([node(A), node(B)], {}, [replica(A, model="x", in_flight=5)], BOTH, need)
        self.assertEqual(found, Placement(A, "worker-a", 0))

    def test_the_lowest_free_slot(self) -> None:
        """
        A second replica on one node takes the lowest free index; a full node is not chosen.
        """
        two = node(slots=2)
        self.assertEqual(choose([two], {}, [replica(index=0)], BOTH, NEED), Placement(A, "worker-a", 1))
        self.assertEqual(choose([two], {}, [replica(index=1)], BOTH, NEED), Placement(A, "worker-a", 0))
        self.assertIn("slot", self.refusal([node()], replicas=[replica(state="unloading")]).reason)

    def test_an_older_revision_gives_its_slot_up(self) -> None:
        """
        A changed configuration replaces the replica of the old one.
        """
        old = replica(revision="r0", address="127.0.0.1:20000")
        self.assertEqual(choose([node()], {}, [old], BOTH, NEED), Placement(A, "worker-a", 0, replaces=old))
