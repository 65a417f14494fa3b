"""What placement looks at: nodes, replicas and tunnels, reduced to what decides. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from localai_dist.ids import NodeId


class Tie(Enum):
    """How a node hangs on the cluster: the four values of presence (design §2)."""

    NEVER_DIALLED = "never_dialled"
    CONNECTED = "connected"
    RECONNECTING = "reconnecting"
    DEPARTED = "departed"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """
    One registered node.

    Attributes:
        node_type: backend or agent; only backends take models.
        status: healthy, pending, unhealthy, offline or draining.
        total_disk: bytes of the models folder's file system; 0 = not reported.
        available_disk: free bytes of it; 0 beside a total is a full disk.
        available_vram: free bytes.
        slots: replicas of one model it may hold.
        left: its worker said good-bye and did not come back.
    """

    id: NodeId
    name: str
    status: str = "healthy"
    approved: bool = True
    node_type: str = "backend"
    labels: Mapping[str, str] = field(default_factory=dict)
    total_disk: int = 0
    available_disk: int = 0
    available_vram: int = 0
    slots: int = 1
    left: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """
    One replica row.

    Attributes:
        last_used: seconds on any one clock; the smaller, the longer unused.
    """

    node: NodeId
    model: str
    index: int = 0
    state: str = "loaded"
    revision: str = ""
    in_flight: int = 0
    last_used: float = 0.0
    address: str = ""
