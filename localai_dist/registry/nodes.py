"""Nodes: registration under a bound identity, approval, heartbeat, status."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from twisted.logger import Logger

from localai_dist.ids import NodeId, NodeNames
from localai_dist.reach import Outcome, may_demote
from localai_dist.registry.acting import acts_on
from localai_dist.registry.budget import budget_bytes, capped
from localai_dist.registry.errors import NotApproved, NotDraining, NotPending, UnknownNode
from localai_dist.registry.identity import Claim, StoredIdentity, TokenCheck, check, judge, restarted
from localai_dist.registry.labels import labels_of
from localai_dist.registry.newcomer import Approval, Holder
from localai_dist.registry.records import Node, Readings, Registration, node_of
from localai_dist.store.connection import Row
from localai_dist.store.errors import StoreUnavailable
from localai_dist.store.pool import Pool
from localai_dist.store.statements import load_statements
from localai_dist.store.transaction import Transaction
from localai_dist.wire.credentials import digest, mint_token

SQL = load_statements("nodes.sql")


@dataclass(frozen=True, slots=True)
class RegisterResult:
    """
    What a registration came to.

    Attributes:
        token: the node token to keep: shown once, stored only as a hash.
        parked: the name belongs to somebody else; this token waits for approval and admits nothing.
        dropped: the replica rows of the node were dropped, because its worker restarted.
    """

    node: Node
    token: str | None = field(repr=False)
    parked: bool
    dropped: bool = False


class Nodes:
    """
    The registered nodes.

    Every method raises ``StoreUnavailable`` when the database can't answer: then nothing is known, and whoever asked
    must not act.

    Args:
        mint: a fresh random token.
        names: told the name of each node that is read.
    """

    _log = Logger()

    def __init__(
        self,
        pool: Pool,
        *,
        mint: Callable[[], str] = lambda: mint_token(secrets.token_bytes(32)),
        names: NodeNames | None = None,
    ) -> None:
        self._pool = pool
        self._mint = mint
        self._names = names or NodeNames()

    async def register(
        self, registration: Registration, *, auto_approve: bool, presented_token: str | None, loose: bool = False
    ) -> RegisterResult:
        """
        Record a worker under its name.

        A right node token is kept, not rotated, so that a lost answer never costs an identity.

        Args:
            auto_approve: approve the node without an admin; never hands a known name to a newcomer.
            presented_token: the node token it sent, if any.
            loose: believe whoever registers a name, and give it a new token (stock workers).

        Raises:
            InvalidQuantity: a VRAM budget that can't be read.
        """

        async def work(transaction: Transaction) -> tuple[str, str, Claim, bool]:
            return await self._register(transaction, registration, auto_approve, presented_token, loose)

        node_id, token, claim, dropped = await self._pool.transaction(work)
        node = await self.get(NodeId(node_id))
        if node is None:
            raise StoreUnavailable(f"node {registration.name} was removed while it registered")
        if claim is Claim.NEWCOMER:
            self._log.warn(
                "a second worker registered as {name}, from {newcomer}; it waits, and the one from {holder} stays",
                name=node.name,
                newcomer=registration.seen_from or "an address not known",
                holder=node.registered_from or "an address not known",
            )
        return RegisterResult(node, token, claim in (Claim.NEWCOMER, Claim.WAITING), dropped)

    async def _register(
        self, transaction: Transaction, registration: Registration, approve: bool, presented: str | None, loose: bool
    ) -> tuple[str, str, Claim, bool]:
        token = self._mint()
        row = await transaction.fetch_one(SQL["identity"], {"name": registration.name})
        if row is None:
            created = await transaction.fetch_one(SQL["create"], _values(registration, {}, approve, token))
            if created is not None:
                await _merge_labels(transaction, created["id"], labels_of(registration))
                return created["id"], token, Claim.NEW, False
            # Somebody created the name between the two statements: from here on it is a known one.
            row = await transaction.fetch_one(SQL["identity"], {"name": registration.name})
            if row is None:
                raise StoreUnavailable(f"node {registration.name} was removed while it registered")
        stored = StoredIdentity(row["node_token_hash"], row["parked_token_hash"])
        claim = judge(stored, presented, loose=loose)
        if claim is Claim.NEWCOMER:
            parked = {"parked_token_hash": digest(token), "parked_from": registration.seen_from}
            await transaction.execute(SQL["park"], {"id": row["id"], **parked})
            return row["id"], token, claim, False
        if claim is Claim.WAITING:
            return row["id"], presented or "", claim, False
        if claim is Claim.OWN:
            token = presented or ""
        gone = restarted(row["boot_id"], registration.boot_id)
        values = _values(registration, row, approve, token)
        await transaction.execute(SQL["refresh"], {**values, "id": row["id"], "restarted": gone})
        await _merge_labels(transaction, row["id"], labels_of(registration))
        if gone:
            await self._drop_replicas(transaction, row["id"])
        return row["id"], token, claim, gone

    async def authenticate(self, node_id: NodeId, token: str | None) -> TokenCheck:
        """Whether ``token`` may open the tunnel of this node."""
        row = await self._pool.fetch_one(SQL["tokens"], {"id": node_id})
        if row is None:
            return TokenCheck.UNKNOWN_NODE
        self._names.learn(node_id, row["name"])
        stored = StoredIdentity(row["node_token_hash"], row["parked_token_hash"])
        return check(stored, token, approved=row["approved"])

    async def check_token(self, node_id: NodeId, token: str | None) -> TokenCheck:
        """
        Whether ``token`` is this node's own, approved or not: a pending node may beat and say good-bye.

        A parked newcomer's token is ``WRONG`` here: what it reports would be about somebody else's node.
        """
        row = await self._pool.fetch_one(SQL["tokens"], {"id": node_id})
        if row is None:
            return TokenCheck.UNKNOWN_NODE
        return check(StoredIdentity(row["node_token_hash"], ""), token, approved=True)

    async def still_theirs(self, credentials: Mapping[NodeId, str], *, loose: bool = False) -> set[NodeId]:
        """
        Those nodes that are there, approved, and whose token is still the one of this digest.

        Args:
            credentials: the digest of the token each one's tunnel came with.
            loose: tokens change with each registration (stock workers), so the digest says nothing.
        """
        values = {"nodes": list(credentials), "digests": list(credentials.values()), "loose": loose}
        return {NodeId(row["id"]) for row in await self._pool.fetch(SQL["still_theirs"], values)}

    async def approve(self, node_id: NodeId) -> Approval:
        """
        Approve a pending node, or hand the name over to the newcomer that waits under it; tells which it was.

        A node that was never approved comes first, then its newcomer at a second call. After a hand-over the old
        token admits nobody any more, and what the old worker had loaded is nobody's to ask for.

        Raises:
            UnknownNode, NotPending
        """

        async def work(transaction: Transaction) -> Row | None:
            row = await transaction.fetch_one(SQL["approve"], {"id": node_id})
            if row is not None and row["replaced"]:
                await self._drop_replicas(transaction, node_id)
            return row

        row = await self._pool.transaction(work)
        node = await self._known(node_id)
        if row is None:
            raise NotPending(node.name)
        before = Holder(row["status"], row["registered_from"], row["last_heartbeat"])
        return Approval(node, before if row["replaced"] else None)

    async def heartbeat(self, node_id: NodeId, readings: Readings) -> bool | None:
        """Record a sign of life: whether some frontend owns the node's tunnel, None when no node has that id."""
        values = {
            "id": node_id,
            "available_vram": readings.available_vram,
            "total_vram": readings.total_vram,
            "available_ram": readings.available_ram,
            "total_disk": readings.total_disk,
            "available_disk": readings.available_disk,
            "gpu_vendor": readings.gpu_vendor,
        }
        row = await self._pool.fetch_one(SQL["heartbeat"], values)
        return None if row is None else bool(row["tunnel_held"])

    @acts_on("asked", "nodes.drain")
    async def drain(self, node_id: NodeId) -> Node:
        """
        Give an approved node no new work.

        Raises:
            UnknownNode, NotApproved
        """
        if await self._pool.fetch_one(SQL["drain"], {"id": node_id}) is None:
            raise NotApproved((await self._known(node_id)).name)
        return await self._known(node_id)

    async def resume(self, node_id: NodeId) -> Node:
        """
        Give a drained node work again; a node that is healthy already stays so.

        Raises:
            UnknownNode, NotApproved, NotDraining
        """
        changed = await self._pool.fetch_one(SQL["resume"], {"id": node_id})
        node = await self._known(node_id)
        if changed is None and not node.approved:
            raise NotApproved(node.name)
        if changed is None and node.status != "healthy":
            raise NotDraining(node.name, node.status)
        return node

    @acts_on("worker_gone", "nodes.leave")
    async def deregister(self, node_id: NodeId) -> bool:
        """The worker leaves on purpose: offline until it registers again, its replicas gone; False when unknown."""

        async def work(transaction: Transaction) -> bool:
            if await transaction.fetch_one(SQL["leave"], {"id": node_id}) is None:
                return False
            await self._drop_replicas(transaction, node_id)
            return True

        return await self._pool.transaction(work)

    @acts_on("worker_gone", "nodes.drop_replicas")
    async def _drop_replicas(self, transaction: Transaction, node_id: str) -> None:
        await transaction.execute(SQL["drop_replicas"], {"id": node_id})

    @acts_on("asked", "nodes.remove")
    async def remove(self, node_id: NodeId) -> bool:
        """An admin removes the node and everything recorded about it; False when unknown."""
        return await self._pool.fetch_one(SQL["remove"], {"id": node_id}) is not None

    @acts_on("stale_heartbeat", "nodes.mark_stale_offline")
    async def mark_stale_offline(self, stale_after: float) -> list[NodeId]:
        """Set nodes that were silent for ``stale_after`` seconds offline, and name them; changes no replica row."""
        rows = await self._pool.fetch(SQL["mark_stale_offline"], {"stale_after": stale_after})
        return [NodeId(row["id"]) for row in rows]

    @acts_on("may_demote", "nodes.mark_unhealthy")
    async def mark_unhealthy(self, node_id: NodeId, outcome: Outcome) -> bool:
        """Take a healthy node out of placement if ``outcome`` permits it; whether it changed."""
        if not may_demote(outcome):
            return False
        return await self._pool.fetch_one(SQL["mark_unhealthy"], {"id": node_id}) is not None

    async def mark_healthy(self, node_id: NodeId, *, fresh_within: float) -> bool:
        """
        Take an unhealthy node into placement again; whether it changed. The caller saw that its route is there.

        Args:
            fresh_within: its last heartbeat must be younger (s).
        """
        values = {"id": node_id, "fresh_within": fresh_within}
        return await self._pool.fetch_one(SQL["mark_healthy"], values) is not None

    async def all(self) -> list[Node]:
        """Every node, by name."""
        return [self._node(row) for row in await self._pool.fetch(SQL["all"])]

    async def get(self, node_id: NodeId) -> Node | None:
        """One node, or None."""
        row = await self._pool.fetch_one(SQL["get"], {"id": node_id})
        return None if row is None else self._node(row)

    async def by_name(self, name: str) -> Node | None:
        """The node of that name, or None."""
        row = await self._pool.fetch_one(SQL["by_name"], {"name": name})
        return None if row is None else self._node(row)

    async def labels(self, node_id: NodeId) -> dict[str, str]:
        """
        The node's labels.

        Raises:
            UnknownNode
        """
        return dict((await self._known(node_id)).labels)

    @acts_on("asked", "nodes.clear_labels")
    async def put_labels(self, node_id: NodeId, labels: Mapping[str, str]) -> dict[str, str]:
        """
        Replace the node's labels (those it gives itself come back when it registers).

        Raises:
            UnknownNode
        """
        await self._known(node_id)

        async def work(transaction: Transaction) -> None:
            await transaction.execute(SQL["clear_labels"], {"id": node_id})
            await _merge_labels(transaction, node_id, labels)

        await self._pool.transaction(work)
        return await self.labels(node_id)

    async def patch_labels(self, node_id: NodeId, labels: Mapping[str, str]) -> dict[str, str]:
        """
        Set these labels, keep the others.

        Raises:
            UnknownNode
        """
        await self._known(node_id)
        await self._pool.execute(SQL["merge_labels"], _label_values(node_id, labels))
        return await self.labels(node_id)

    @acts_on("asked", "nodes.delete_label")
    async def delete_label(self, node_id: NodeId, key: str) -> bool:
        """Drop one label; whether it was there."""
        return await self._pool.execute(SQL["delete_label"], {"id": node_id, "key": key}) > 0

    def _node(self, row: Mapping[str, Any]) -> Node:
        node = node_of(row)
        self._names.learn(node.id, node.name)
        return node

    async def _known(self, node_id: NodeId) -> Node:
        node = await self.get(node_id)
        if node is None:
            raise UnknownNode(node_id)
        return node


async def _merge_labels(transaction: Transaction, node_id: str, labels: Mapping[str, str]) -> None:
    await transaction.execute(SQL["merge_labels"], _label_values(node_id, labels))


def _label_values(node_id: str, labels: Mapping[str, str]) -> dict[str, str]:
    return {"id": node_id, "labels": json.dumps(dict(labels))}


def _values(registration: Registration, stored: Mapping[str, Any], approve: bool, token: str) -> dict[str, Any]:
    """Parameters of ``create`` and ``refresh``; an admin's VRAM budget wins over the worker's."""
    by_hand = stored.get("vram_budget_manually_set", False)
    budget = stored["vram_budget"] if by_hand else registration.vram_budget
    allowed = budget_bytes(budget, registration.total_vram)
    available = registration.total_vram if registration.available_vram is None else registration.available_vram
    return {
        "name": registration.name,
        "node_type": registration.node_type,
        "approve": approve,
        "token_hash": registration.token_hash,
        "node_token_hash": digest(token),
        "boot_id": registration.boot_id,
        "total_vram": registration.total_vram,
        "available_vram": capped(available, allowed),
        "total_ram": registration.total_ram,
        "available_ram": registration.available_ram,
        "total_disk": registration.total_disk,
        "available_disk": registration.available_disk,
        "gpu_vendor": registration.gpu_vendor,
        "gpu_compute_capability": registration.gpu_compute_capability,
        "capability": registration.capability,
        "max_replicas_per_model": max(1, registration.max_replicas_per_model),
        "vram_budget": budget,
        "seen_from": registration.seen_from,
        "vram_budget_bytes": allowed,
    }
