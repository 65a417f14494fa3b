"""Ending exactly one backend process of one replica, and saying so only when it is really gone."""

from __future__ import annotations

from localai_dist.ids import NodeId, ProcessKey
from localai_dist.loads.errors import UnloadFailed
from localai_dist.loads.tools import VerbsLike
from localai_dist.wire.verbs import MODEL_STOP, ModelStopReply, ModelStopRequest


async def stop_exactly(
    verbs: VerbsLike,
    node: NodeId,
    model: str,
    replica_index: int,
    address: str,
    *,
    force: bool = False,
    revision: str = "",
    attempt: int = 0,
    timeout: float | None = None,
    name: str = "",
) -> ModelStopReply:
    """
    The process of this replica is gone when this returns, whether it ended now or was absent already.

    Args:
        address: the process must have it; empty matches any.
        force: don't ask it to give its memory back first.
        attempt: the load job's fence.
        timeout: seconds; None is the verb's own budget.
        name: what people call the node.

    Raises:
        UnloadFailed: the worker says that it still runs, or that another process has its place.
        Unreached: the worker could not be asked; nothing is known.
    """
    key = ProcessKey(model, replica_index)
    request = ModelStopRequest(
        model_name=model,
        process_key=str(key),
        expected_address=address,
        force=force,
        config_revision=revision,
        attempt=attempt,
    )
    reply = await verbs.call(node, MODEL_STOP, request, timeout=timeout)
    if reply.terminated or (not reply.matched and not reply.error):
        return reply
    raise UnloadFailed(f"{key} on node {name or node} is not gone: {reply.error or 'the worker gave no reason'}")
