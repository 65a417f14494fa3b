"""
Taking replicas off their nodes: Free, then the exact stop, then the row.

The row and with it the node's reservation change only after the process is really gone. A worker that can't be asked
costs nothing but the answer: its rows stay.

Source: internals §8 (an unload that could not free must say so), acceptance WALK-21.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twisted.logger import Logger

from localai_dist.ids import NodeId
from localai_dist.loads.errors import UnloadFailed
from localai_dist.loads.fleet import ReplicasLike
from localai_dist.loads.stop import stop_exactly
from localai_dist.loads.tools import VerbsLike
from localai_dist.reach import DeadlineExceeded, Unreached
from localai_dist.registry.records import Replica
from localai_dist.wire.verbs import MODEL_UNLOAD, MODELS_RUNNING, Empty, ModelUnloadRequest

_log = Logger()


@dataclass(frozen=True, slots=True)
class Unloaded:
    """
    One replica that is gone.

    Attributes:
        absent: its process was gone already.
        freed: it gave its memory back by itself before it was stopped.
    """

    node: NodeId
    replica_index: int
    absent: bool
    freed: bool


async def unload_replicas(verbs: VerbsLike, replicas: ReplicasLike, model: str, node: NodeId | None) -> list[Unloaded]:
    """
    Unload every replica of ``model`` (on ``node``); all are tried, then the first failure is raised.

    Raises:
        UnloadFailed: a process is not gone; its row stays.
        Unreached: a worker could not be asked; its row stays.
        StoreUnavailable: the database did not answer.
    """
    gone: list[Unloaded] = []
    failure: UnloadFailed | Unreached | None = None
    for replica in await replicas.of_model(model):
        if node is not None and replica.node_id != node:
            continue
        try:
            gone.append(await _unload_one(verbs, replica))
        except (UnloadFailed, Unreached) as error:
            _log.warn("{model} on node {node} stays: {error}", model=model, node=replica.node_called, error=error)
            failure = failure or error
            continue
        await replicas.remove(replica.node_id, model, replica.replica_index, replica.address)
    if failure is not None:
        raise failure
    return gone


async def stop_strays(
    verbs: VerbsLike, model: str, node: NodeId, called: Callable[[NodeId], str] = str
) -> list[Unloaded]:
    """
    Stop every process of ``model`` that the worker itself says it runs: for a node where no row tells of one.

    Raises:
        UnloadFailed: the worker can't say what it runs, or a process is not gone.
        Unreached: the worker could not be asked.
    """
    reply = await verbs.call(node, MODELS_RUNNING, Empty())
    if reply.error:
        raise UnloadFailed(f"node {called(node)} can't say what it runs: {reply.error}")
    gone: list[Unloaded] = []
    failure: UnloadFailed | None = None
    for one in reply.models:
        if one.model_id != model:
            continue
        try:
            done = await stop_exactly(verbs, node, model, one.replica_index, one.address, force=True, name=called(node))
        except UnloadFailed as error:
            failure = failure or error
            continue
        gone.append(Unloaded(node, one.replica_index, absent=not done.matched, freed=done.freed))
    if failure is not None:
        raise failure
    return gone


async def _unload_one(verbs: VerbsLike, replica: Replica) -> Unloaded:
    trouble = await _free(verbs, replica)
    try:
        reply = await stop_exactly(
            verbs,
            replica.node_id,
            replica.model_name,
            replica.replica_index,
            replica.address,
            force=bool(trouble),
            revision=replica.config_revision,
            name=replica.node_called,
        )
    except UnloadFailed as error:
        raise UnloadFailed(f"{error}; before that, Free failed: {trouble}" if trouble else str(error)) from error
    return Unloaded(replica.node_id, replica.replica_index, absent=not reply.matched, freed=reply.freed or not trouble)


async def _free(verbs: VerbsLike, replica: Replica) -> str:
    """Ask the backend to give its memory back; why it did not, or nothing. The stop that follows ends it either way."""
    request = ModelUnloadRequest(model_name=replica.model_name, address=replica.address)
    try:
        reply = await verbs.call(replica.node_id, MODEL_UNLOAD, request)
    except Unreached as error:
        if not isinstance(error.outcome, DeadlineExceeded):
            raise
        return str(error)
    return "" if reply.success else reply.error or "no reason given"
