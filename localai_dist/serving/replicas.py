"""Which of several loaded replicas to try first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime

from localai_dist.ids import NodeId
from localai_dist.serving.seams import ReplicaLike

_NEVER = datetime.min.replace(tzinfo=UTC)


def key_of(replica: ReplicaLike) -> tuple[NodeId, int]:
    """What tells two replicas of one model apart."""
    return replica.node_id, replica.replica_index


def in_order(
    loaded: Sequence[ReplicaLike], connected: Mapping[NodeId, bool], tried: Collection[tuple[NodeId, int]]
) -> list[ReplicaLike]:
    """
    The replicas still worth trying, best first: a connected node, then fewest calls running, then longest unused.

    Args:
        connected: whether each node's tunnel is up; a node that is not in it counts as connected.
        tried: the replicas that already failed in this request.

    Source: design §2 (a replica that is not reachable is not chosen while another one is), internals §2a.3.
    """
    left = [replica for replica in loaded if key_of(replica) not in tried]
    return sorted(
        left,
        key=lambda replica: (
            not connected.get(replica.node_id, True),
            replica.in_flight,
            _aware(replica.last_used),
            key_of(replica),
        ),
    )


def _aware(moment: datetime | None) -> datetime:
    if moment is None:
        return _NEVER
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
