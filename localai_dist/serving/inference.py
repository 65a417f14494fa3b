"""
One request's way: choose a replica or have one loaded, reach it, call it, and decide after each failure.

The decisions are ``replicas.py`` and ``steps.py``; this module does what they say.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, assert_never

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from localai_dist.catalog.model import ModelConfig
from localai_dist.grpcclient.status import RpcError
from localai_dist.ids import NodeId
from localai_dist.reach import NotServed, Outcome, RegistryUnknown, Unreached, describe
from localai_dist.registry.errors import registry_or_unreached
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.scheduler.placement import NoPlace
from localai_dist.serving.deadline import pause
from localai_dist.serving.failures import failure_of
from localai_dist.serving.generation import Generation
from localai_dist.serving.lease import Lease, ReplicaVanished, take_lease
from localai_dist.serving.lent import Lent
from localai_dist.serving.replicas import in_order, key_of
from localai_dist.serving.seams import (
    ConnectBackend,
    LoadsLike,
    OwnershipLike,
    ReplicaLike,
    ReplicasLike,
    RequestFilesLike,
)
from localai_dist.serving.steps import Attempts, DropRow, GiveUp, TryAgain, TryOther, Wait, next_step
from localai_dist.staging.errors import NoSpace
from localai_dist.store.errors import StoreUnavailable
from localai_dist.units import MINUTE, SECOND

MAX_VANISHED = 3
"""How often one request may find that the replica it chose was removed just then, and choose (or load) again."""

T = TypeVar("T")
log = Logger()


@dataclass(frozen=True, slots=True)
class Waits:
    """
    How long a request waits for what.

    Attributes:
        route: for a way to a node that is reconnecting or whose owner can't be reached (s).
        load: for a cold load; None is without end (s).
        grace: the reconnect grace, to tell reconnecting from departed (s).

    Source: design §7.
    """

    route: float = 5 * SECOND
    load: float | None = MINUTE
    grace: float = 90 * SECOND


@dataclass(slots=True)
class _Search:
    """What one request knows while it looks for a replica that answers."""

    model: ModelConfig
    attempts: Attempts
    deadline: float | None
    tried: set[tuple[NodeId, int]] = field(default_factory=set)
    replica: ReplicaLike | None = None
    others: bool = False
    vanished: int = 0


class Inference:
    """
    Calls on models, wherever they are loaded.

    Every coroutine may raise ``Unreached`` (see ``reach``), ``RequestRefused``, and what ``Loads.ensure`` raises
    (a failed load, one still going on, no place for one). Cancelling one cancels the call on the backend.
    """

    def __init__(
        self,
        *,
        replicas: ReplicasLike,
        ownership: OwnershipLike,
        loads: LoadsLike,
        connect: ConnectBackend,
        files: RequestFilesLike,
        clock: IReactorTime,
        waits: Waits,
    ) -> None:
        self._replicas = replicas
        self._ownership = ownership
        self._loads = loads
        self._connect = connect
        self._files = files
        self._clock = clock
        self._waits = waits

    async def predict(
        self, model: ModelConfig, options: pb.PredictOptions, *, deadline: float | None = None
    ) -> pb.Reply:
        """
        The whole answer at once.

        Args:
            deadline: the client's own, an instant of the clock (s); it travels with the call, the caller enforces it.
        """
        reply, lease = await self._reach(model, lambda lease: lease.channel.predict(options), deadline)
        lease.release()
        return reply

    async def embed(
        self, model: ModelConfig, inputs: Sequence[pb.PredictOptions], *, deadline: float | None = None
    ) -> list[pb.EmbeddingResult]:
        """One result for each of ``inputs``, in order, all from one replica."""

        async def each(lease: Lease) -> list[pb.EmbeddingResult]:
            return [await lease.channel.embedding(options) for options in inputs]

        results, lease = await self._reach(model, each, deadline)
        lease.release()
        return results

    async def generate(
        self, model: ModelConfig, options: pb.PredictOptions, *, deadline: float | None = None
    ) -> Generation:
        """The answer as it is produced; returns when the first reply is here, and until then may try elsewhere."""

        async def begin(lease: Lease) -> Generation:
            stream = lease.channel.predict_stream(options)
            replies = aiter(stream)
            try:
                first = await _first_of(replies)
            except BaseException:
                stream.cancel()
                raise
            return Generation(lease, stream, replies, first)

        generation, _ = await self._reach(model, begin, deadline)
        return generation

    async def transcribe(
        self, model: ModelConfig, wish: pb.TranscriptRequest, recording: Path, *, deadline: float | None = None
    ) -> pb.TranscriptResult:
        """
        What is said in ``recording``, a file of this frontend.

        It is staged on the node that answers, on another one if need be, and taken back from all of them whatever
        happens.

        Raises:
            NoSpace: no node with a replica has room for it.
        """
        lent = Lent(self._files, recording, clock=self._clock, deadline=deadline)

        async def listen(lease: Lease) -> pb.TranscriptResult:
            asked = pb.TranscriptRequest()
            asked.CopyFrom(wish)
            asked.dst = await lent.on(lease.node)
            return await lease.channel.transcribe(asked)

        try:
            result, lease = await self._reach(model, listen, deadline)
        finally:
            lent.take_back()
        lease.release()
        return result

    async def _reach(
        self, model: ModelConfig, use: Callable[[Lease], Awaitable[T]], deadline: float | None
    ) -> tuple[T, Lease]:
        search = _Search(model, Attempts(self._clock.seconds() + self._waits.route), deadline)
        while True:
            try:
                return await self._attempt(search, use)
            except RpcError as error:
                failure = failure_of(error)
                if not isinstance(failure, Unreached):
                    raise failure from error
                await self._recover(search, failure)
            except ReplicaVanished as error:
                search.vanished += 1
                if search.vanished > MAX_VANISHED:
                    raise Unreached(NotServed(str(error))) from error
            except Unreached as error:
                await self._recover(search, error)
            except NoPlace as error:
                if error.outcome is None:
                    raise
                await self._recover(search, Unreached(error.outcome))
            except NoSpace:
                if search.replica is None or not search.others:
                    raise
                search.tried.add(key_of(search.replica))
            except StoreUnavailable as error:
                await self._recover(search, Unreached(RegistryUnknown(str(error))))

    async def _attempt(self, search: _Search, use: Callable[[Lease], Awaitable[T]]) -> tuple[T, Lease]:
        search.replica, search.others = None, False
        replica = await self._choose(search)
        search.replica = replica
        lease = await take_lease(self._replicas, self._connect, replica, deadline=search.deadline)
        try:
            return await use(lease), lease
        except BaseException:
            lease.release()
            raise

    async def _choose(self, search: _Search) -> ReplicaLike:
        model = search.model
        loaded = await self._replicas.loaded(model.name, model.revision)
        connected = await self._connected(loaded)
        candidates = in_order(loaded, connected, search.tried) or in_order(loaded, connected, ())
        if not candidates:
            return await self._loads.ensure(model, wait=self._waits.load)
        search.others = any(key_of(other) not in search.tried for other in candidates[1:])
        return candidates[0]

    async def _connected(self, loaded: Sequence[ReplicaLike]) -> Mapping[NodeId, bool]:
        """Asked only when there is a choice: a single node is simply tried."""
        nodes = list(dict.fromkeys(replica.node_id for replica in loaded))
        if len(nodes) < 2:
            return {}
        presence = await self._ownership.presence_many(nodes, self._waits.grace)
        return {node: known.state.value == "connected" for node, known in presence.items()}

    async def _recover(self, search: _Search, failure: Unreached) -> None:
        """Do the next step, or raise ``failure`` when there is none."""
        step = next_step(
            failure.outcome,
            search.attempts,
            now=self._clock.seconds(),
            has_row=search.replica is not None,
            others=search.others,
        )
        search.attempts = search.attempts.after(step)
        match step:
            case GiveUp():
                raise failure
            case DropRow():
                await self._drop(search, failure.outcome)
            case TryOther():
                if search.replica is not None:
                    search.tried.add(key_of(search.replica))
            case TryAgain():
                pass
            case Wait(seconds):
                await pause(self._clock, seconds)
                search.tried.clear()
            case _:
                assert_never(step)

    async def _drop(self, search: _Search, outcome: Outcome) -> None:
        replica = search.replica
        if replica is None:
            return
        log.info(
            "dropping the row of {model} #{index} on node {node}: {why}",
            model=replica.model_name,
            index=replica.replica_index,
            node=replica.node_called,
            why=describe(outcome),
        )
        with registry_or_unreached():
            await self._replicas.reap(replica, outcome)


async def _first_of(replies: AsyncIterator[pb.Reply]) -> pb.Reply | None:
    try:
        return await replies.__anext__()
    except StopAsyncIteration:
        return None
