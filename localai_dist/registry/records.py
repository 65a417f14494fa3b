"""What the registry hands out and takes in, as values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, TypeVar

from localai_dist.errors import UserMistake
from localai_dist.ids import NodeId

T = TypeVar("T")

NODE_TYPES = ("backend", "agent")
REPLICA_STATES = ("staging", "loading", "loaded", "unloading", "idle")
ROUTE_POLICIES = ("", "round_robin", "prefix_cache")


class BadRegistration(UserMistake):
    """A registration that can't be accepted; the text names the field."""


class BadScheduling(UserMistake):
    """A scheduling wish that contradicts itself; the text names the field."""


@dataclass(frozen=True, slots=True)
class Registration:
    """
    What a worker says of itself when it registers. Sizes are bytes.

    Attributes:
        total_disk: of the models folder's filesystem; 0 = unknown.
        boot_id: one uuid for each worker process; '' from workers that don't send it.
        token_hash: digest of the registration token it came with.
        seen_from: the address it came from, as the frontend saw it; for people only.
    """

    name: str
    node_type: str = "backend"
    total_vram: int = 0
    available_vram: int | None = None
    total_ram: int = 0
    available_ram: int = 0
    total_disk: int = 0
    available_disk: int = 0
    gpu_vendor: str = ""
    gpu_compute_capability: str = ""
    capability: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    max_replicas_per_model: int = 1
    vram_budget: str = ""
    boot_id: str = ""
    token_hash: str = ""
    seen_from: str = ""

    def __post_init__(self) -> None:
        """
        Check what the database could not store.

        Raises:
            BadRegistration: naming the field.
        """
        if not self.name or len(self.name) > 255 or not self.name.isprintable():
            raise BadRegistration("name: want 1 to 255 printable characters")
        if self.node_type not in NODE_TYPES:
            raise BadRegistration(f"node_type: want one of {', '.join(NODE_TYPES)}")
        for limited, longest in (("gpu_vendor", 64), ("gpu_compute_capability", 32), ("capability", 64)):
            _short(limited, getattr(self, limited), longest)
        _short("boot_id", self.boot_id, 64)
        _short("vram_budget", self.vram_budget, 32)
        _short("seen_from", self.seen_from, 255)
        for name in ("total_vram", "total_ram", "available_ram", "total_disk", "available_disk"):
            _size(name, getattr(self, name))
        _size("available_vram", self.available_vram or 0)
        if not 0 <= self.max_replicas_per_model <= 10_000:
            raise BadRegistration("max_replicas_per_model: want 0 to 10000")
        for key, value in self.labels.items():
            _short("labels", key, 255)
            if not key or "\0" in value:
                raise BadRegistration("labels: want non-empty keys and text values")


@dataclass(frozen=True, slots=True)
class Readings:
    """What a heartbeat measured; None keeps the last value. Sizes are bytes."""

    available_vram: int | None = None
    total_vram: int | None = None
    available_ram: int | None = None
    total_disk: int | None = None
    available_disk: int | None = None
    gpu_vendor: str | None = None

    def __post_init__(self) -> None:
        """
        Check what the database could not store.

        Raises:
            BadRegistration: naming the field.
        """
        for name in ("available_vram", "total_vram", "available_ram", "total_disk", "available_disk"):
            _size(name, getattr(self, name) or 0)
        _short("gpu_vendor", self.gpu_vendor or "", 64)


@dataclass(frozen=True, slots=True)
class Node:
    """
    A node as the registry knows it. Sizes are bytes; times carry a time zone.

    Attributes:
        newcomer_waiting: somebody else registered this name and waits for approval under a parked token.
        left_at: when its worker said good-bye, if it did and did not come back.
        model_count: replicas loaded on it; in_flight_count: requests running on them.
    """

    id: NodeId
    name: str
    node_type: str
    status: str
    approved: bool
    newcomer_waiting: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    http_address: str = ""
    total_vram: int = 0
    available_vram: int = 0
    reserved_vram: int = 0
    total_ram: int = 0
    available_ram: int = 0
    total_disk: int = 0
    available_disk: int = 0
    gpu_vendor: str = ""
    gpu_compute_capability: str = ""
    capability: str = ""
    max_replicas_per_model: int = 1
    max_replicas_per_model_manually_set: bool = False
    vram_budget: str = ""
    vram_budget_bytes: int = 0
    vram_budget_manually_set: bool = False
    boot_id: str = ""
    left_at: datetime | None = None
    last_heartbeat: datetime | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None
    model_count: int = 0
    in_flight_count: int = 0
    registered_from: str = ""
    newcomer_from: str = ""
    newcomer_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """
    One copy of a model on a node.

    Attributes:
        address: loopback ``host:port`` on that node; means nothing without ``node_id``.
        node_name: what people call the node; empty in a row that was just written.
        backend_token: what that backend process wants to see. A secret: never logged, kept out of ``repr``.
        in_flight: requests running on it.
    """

    node_id: NodeId
    model_name: str
    replica_index: int = 0
    address: str = ""
    backend_token: str = field(default="", repr=False)
    state: str = "loaded"
    in_flight: int = 0
    last_used: datetime | None = None
    backend_type: str = ""
    config_revision: str = ""
    loading_by: str = ""
    effective_options_hash: str = ""
    cleanup_error: str = ""
    cleanup_attempts: int = 0
    cleanup_next_retry_at: datetime | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None
    id: str = ""
    node_name: str = field(default="", compare=False)

    @property
    def node_called(self) -> str:
        """The node, for people."""
        return self.node_name or self.node_id


@dataclass(frozen=True, slots=True)
class SchedulingRow:
    """
    What an admin wants of a model.

    Attributes:
        node_selector: labels a node must have, all of them; empty = any node.
        max_replicas: 0 = no limit.
        spread_all: one copy on every matching node; excludes min and max.
    """

    model_name: str
    node_selector: Mapping[str, str] = field(default_factory=dict)
    min_replicas: int = 0
    max_replicas: int = 0
    spread_all: bool = False
    route_policy: str = ""
    balance_abs_threshold: int = 0
    balance_rel_threshold: float = 0.0
    min_prefix_match: float = 0.0
    unsatisfiable_until: datetime | None = None
    unsatisfiable_ticks: int = 0
    created_at: datetime | None = None
    updated_at: datetime | None = None
    id: str = ""

    def __post_init__(self) -> None:
        """
        Check the rules of surface §1.3.

        Raises:
            BadScheduling: naming the field.
        """
        if not self.model_name or len(self.model_name) > 255:
            raise BadScheduling("model_name: want 1 to 255 characters")
        if self.min_replicas < 0 or self.max_replicas < 0:
            raise BadScheduling("min_replicas, max_replicas: want 0 or more")
        if 0 < self.max_replicas < self.min_replicas:
            raise BadScheduling("min_replicas: want no more than max_replicas")
        if self.spread_all and (self.min_replicas or self.max_replicas):
            raise BadScheduling("spread_all: excludes min_replicas and max_replicas")
        if self.route_policy not in ROUTE_POLICIES:
            raise BadScheduling("route_policy: want round_robin, prefix_cache or nothing")
        if self.balance_abs_threshold < 0 or not (self.balance_rel_threshold == 0 or self.balance_rel_threshold >= 1):
            raise BadScheduling("balance_abs_threshold: want 0 or more; balance_rel_threshold: want 0, or 1 or more")
        if not 0 <= self.min_prefix_match <= 1:
            raise BadScheduling("min_prefix_match: want 0 to 1")


def node_of(row: Mapping[str, Any]) -> Node:
    """The node in a row of the view ``node_facts``."""
    return _pick(Node, row)


def replica_of(row: Mapping[str, Any]) -> Replica:
    """The replica in a row of ``node_models``."""
    return _pick(Replica, row)


def scheduling_of(row: Mapping[str, Any]) -> SchedulingRow:
    """The wish in a row of ``model_scheduling_configs``."""
    selector = json.loads(row["node_selector"]) if row["node_selector"] else {}
    return _pick(SchedulingRow, {**row, "node_selector": selector})


def _pick(kind: type[T], row: Mapping[str, Any]) -> T:
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in row.items() if key in names})


def _short(name: str, value: str, longest: int) -> None:
    if len(value) > longest or "\0" in value:
        raise BadRegistration(f"{name}: want at most {longest} characters")


def _size(name: str, value: int) -> None:
    if not 0 <= value < 2**63:
        raise BadRegistration(f"{name}: want 0 to 2^63-1")
