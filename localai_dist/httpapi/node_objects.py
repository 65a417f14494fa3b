"""Nodes, replicas and scheduling rows as the API shows them (pure)."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from localai_dist.ids import NodeId
from localai_dist.registry.presence import NEVER_DIALLED, Presence
from localai_dist.registry.records import Node, Replica, SchedulingRow
from localai_dist.wire.verbs import BackendEntry

_NODE_FIELDS = (
    "id",
    "name",
    "node_type",
    "address",
    "http_address",
    "status",
    "total_vram",
    "available_vram",
    "reserved_vram",
    "total_ram",
    "available_ram",
    "total_disk",
    "available_disk",
    "gpu_vendor",
    "gpu_compute_capability",
    "max_replicas_per_model",
    "max_replicas_per_model_manually_set",
    "vram_budget_manually_set",
    "last_heartbeat",
    "created_at",
    "updated_at",
    "model_count",
    "in_flight_count",
    "approved",
    "newcomer_waiting",
    "left_at",
    "registered_from",
)
_NODE_OPTIONAL = ("capability", "vram_budget", "vram_budget_bytes", "newcomer_from", "newcomer_since")

_REPLICA_FIELDS = (
    "id",
    "node_id",
    "model_name",
    "replica_index",
    "address",
    "state",
    "in_flight",
    "last_used",
    "created_at",
    "updated_at",
)
_REPLICA_OPTIONAL = (
    "loading_by",
    "backend_type",
    "config_revision",
    "effective_options_hash",
    "cleanup_error",
    "cleanup_attempts",
    "cleanup_next_retry_at",
)

_SCHEDULING_FIELDS = (
    "id",
    "model_name",
    "min_replicas",
    "max_replicas",
    "spread_all",
    "route_policy",
    "balance_abs_threshold",
    "balance_rel_threshold",
    "min_prefix_match",
    "unsatisfiable_ticks",
    "created_at",
    "updated_at",
)


def node_object(node: Node, tunnel: Mapping[str, object], newcomer: str = "") -> dict[str, object]:
    """
    A node with its tunnel.

    Args:
        newcomer: who waits under its name and what approving does, in words; empty when nobody waits.

    Source: reference/surface.md §1.3, design §8 (``approved``, ``tunnel``).
    """
    shown = _shown(node, _NODE_FIELDS, _NODE_OPTIONAL)
    waiting = {"newcomer": newcomer} if newcomer else {}
    return {**shown, **waiting, "labels": dict(node.labels), "tunnel": dict(tunnel)}


def tunnel_object(presence: Presence) -> dict[str, object]:
    """Where a node's tunnel is."""
    return {
        "state": presence.state.value,
        "owner": presence.owner,
        "epoch": presence.epoch,
        "since": presence.connected_at if presence.owner is not None else presence.disconnected_at,
        "grace_ends_at": presence.grace_ends_at,
    }


def tunnel_objects(presences: Mapping[NodeId, Presence] | None, nodes: list[NodeId]) -> dict[NodeId, dict[str, object]]:
    """The tunnel of each node; None means that the registry could not say."""
    if presences is None:
        unknown = {"state": "registry_unavailable", "owner": None, "epoch": None, "since": None, "grace_ends_at": None}
        return {node: dict(unknown) for node in nodes}
    return {node: tunnel_object(presences.get(node, NEVER_DIALLED)) for node in nodes}


def replica_object(replica: Replica) -> dict[str, object]:
    """A replica, without its backend's token."""
    return _shown(replica, _REPLICA_FIELDS, _REPLICA_OPTIONAL)


def backend_object(entry: BackendEntry) -> dict[str, object]:
    """An installed backend; the two marks are always there."""
    return {"name": entry.name, "is_system": entry.is_system, "is_meta": entry.is_meta, **msgspec.to_builtins(entry)}


def scheduling_object(row: SchedulingRow) -> dict[str, object]:
    """A scheduling row; its selector is JSON in a string, as the original's is."""
    selector = json.dumps(dict(row.node_selector), sort_keys=True) if row.node_selector else ""
    return {**_shown(row, _SCHEDULING_FIELDS, ("unsatisfiable_until",)), "node_selector": selector}


def _shown(record: object, always: tuple[str, ...], if_set: tuple[str, ...]) -> dict[str, object]:
    shown = {name: getattr(record, name) for name in always}
    return {**shown, **{name: value for name in if_set if (value := getattr(record, name))}}
