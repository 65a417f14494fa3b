"""
What a cancelled load leaves: nothing. Its process is stopped, its files go, its row goes, its waiters are told.

The row with the mark is the truth; whoever runs the job sees the mark at the latest with its next heartbeat. A worker
that can't be reached keeps its partial file until it removes it by itself.

Source: LOAD-17.
"""

from __future__ import annotations

from twisted.logger import Logger

from localai_dist.ids import NodeId, ProcessKey
from localai_dist.loads.errors import UnloadFailed
from localai_dist.loads.rows import Claim
from localai_dist.loads.stop import stop_exactly
from localai_dist.loads.tools import Tools
from localai_dist.reach import Unreached
from localai_dist.store.errors import StoreUnavailable
from localai_dist.wire.verbs import MODEL_DELETE, ModelDeleteRequest

WITHIN = 5.0
"""How long each question to the worker may take (s): a worker that is away does not hold the row up."""

_log = Logger()


async def clear_away(tools: Tools, claim: Claim, node: NodeId, replica_index: int) -> None:
    """Stop the process of a cancelled attempt, remove its files, end its row; raises ``StoreUnavailable``."""
    if node:
        await stop_process(tools, claim, node, replica_index)
        await remove_files(tools, claim.key, node)
    await tools.table.close_cancelled(claim)


async def stop_process(tools: Tools, claim: Claim, node: NodeId, replica_index: int, address: str = "") -> None:
    """End the process a load was given; one that survives, or a worker that is away, is logged."""
    try:
        for replica in await tools.fleet.replicas.of_model(claim.key):
            if (replica.node_id, replica.replica_index) == (node, replica_index):
                return  # the slot serves an older configuration: that process is none of this load's
        await stop_exactly(
            tools.verbs,
            node,
            claim.key,
            replica_index,
            address,
            force=True,
            attempt=claim.attempt,
            timeout=WITHIN,
            name=tools.called(node),
        )
    except (Unreached, UnloadFailed, StoreUnavailable) as error:
        key = ProcessKey(claim.key, replica_index)
        text = "the process of {key} on node {node} may still run: {error}"
        _log.warn(text, key=str(key), node=tools.called(node), error=error)


async def remove_files(tools: Tools, model: str, node: NodeId, *, unfinished_only: bool = False) -> None:
    """Remove a model's files from a node, or only those that are not whole, unless a replica there uses them."""
    try:
        if any(replica.node_id == node for replica in await tools.fleet.replicas.of_model(model)):
            return
        request = ModelDeleteRequest(model, unfinished_only)
        reply = await tools.verbs.call(node, MODEL_DELETE, request, timeout=WITHIN)
        trouble = "" if reply.success else reply.error
    except (Unreached, StoreUnavailable) as error:
        trouble = str(error)
    if trouble:
        text = "files of {model} stay on node {node}: {trouble}"
        _log.warn(text, model=model, node=tools.called(node), trouble=trouble)
