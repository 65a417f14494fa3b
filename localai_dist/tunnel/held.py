"""
The tunnels this frontend holds.

``attach`` claims the node in the registry first and stores the session only then, so that nobody finds a session here
whose ownership is not this instance's. A later tunnel of the same node wins; the older session is closed after the
swap. ``detach`` names the attachment it ends, so a late ending of an older tunnel touches nothing of a newer one.

A claim or release the database did not answer leaves a row that may name this frontend wrongly; it is set right as
soon as the database answers again (``reconcile``), or the node would look connected for ever.

Source: wire contract §7, local tunnel registry.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.errors import LocalAIDistError
from localai_dist.ids import Epoch, InstanceId, NodeId, NodeNames
from localai_dist.mux.errors import SessionDead
from localai_dist.net.session import MuxSession
from localai_dist.store.errors import FencedOut, StoreError

T = TypeVar("T")

RELEASE_TIMEOUT: Final = 5.0
"""Seconds one release may take. Source: wire contract §7."""
RECONCILE_AFTER: Final = 5.0
"""Seconds until rows left behind by an unanswered claim or release are looked at."""


class ReleaseLate(LocalAIDistError):
    """The database did not answer a release in time; whether it was done is not known."""


class OwnershipLike(Protocol):
    """What is needed of the registry's fenced ownership; each raises ``StoreError`` without the database."""

    def claim(self, node: NodeId, instance: InstanceId) -> Awaitable[Epoch]:
        """Make ``instance`` the owner, unconditionally; the new epoch."""

    def adopt(self, nodes: Sequence[NodeId], instance: InstanceId) -> Awaitable[Mapping[NodeId, Epoch]]:
        """Make ``instance`` the owner of those among ``nodes`` that nobody owns."""

    def reclaim(self, node: NodeId, instance: InstanceId, epoch: Epoch) -> Awaitable[Epoch]:
        """As ``claim``, unless somebody claimed the node since ``epoch``: raises ``FencedOut``."""

    def release(self, node: NodeId, instance: InstanceId, epoch: Epoch) -> Awaitable[None]:
        """End exactly that ownership; raises ``FencedOut`` if it is no longer the row's."""

    def held_by(self, instance: InstanceId) -> Awaitable[Mapping[NodeId, Epoch]]:
        """The nodes whose row names ``instance``."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Names one attach; ``serial`` differs each time, also for the same node."""

    node: NodeId
    serial: int


@dataclass(slots=True)
class _Held:
    attachment: Attachment
    session: MuxSession
    epoch: Epoch
    credential: str


class HeldTunnels:
    """
    Node -> session, with the claim that goes with each.

    Args:
        ownership: the registry's fenced ownership.
        instance: this frontend's id.
        clock: bounds releases and times their repetition.
        names: what people call the nodes, for the log.
    """

    log = Logger()

    def __init__(
        self,
        ownership: OwnershipLike,
        instance: InstanceId,
        *,
        clock: IReactorTime,
        names: NodeNames | None = None,
    ) -> None:
        self.names: Final = names or NodeNames()
        self._ownership = ownership
        self.instance: Final = instance
        self._clock = clock
        self._held: dict[NodeId, _Held] = {}
        self._gates: dict[NodeId, DeferredLock] = {}
        self._serials = itertools.count(1)
        self._reconciling: IDelayedCall | None = None
        self._going_away: list[IDelayedCall] = []
        self._stopped = False

    def get(self, node: NodeId) -> MuxSession | None:
        """The open session of ``node``'s tunnel if it ends here; asks nobody."""
        held = self._held.get(node)
        return held.session if held is not None and held.session.is_open else None

    def sessions(self) -> dict[NodeId, MuxSession]:
        """Every held tunnel, a copy."""
        return {node: held.session for node, held in self._held.items()}

    def credentials(self) -> dict[Attachment, str]:
        """The digest of the token each open tunnel came with."""
        return {held.attachment: held.credential for held in self._held.values() if held.session.is_open}

    async def attach(self, node: NodeId, session: MuxSession, *, credential: str = "") -> Attachment:
        """
        Claim ``node`` and hold ``session`` as its tunnel.

        Not to be cancelled: whether the claim was made would not be known.

        Args:
            credential: the digest of the token it was admitted by.

        Raises:
            StoreError: the claim failed; nothing changed here and the caller closes the session.
            SessionDead: the session ended while the claim was made; the claim is released again.
        """
        async with self._gate(node):
            try:
                epoch = await self._ownership.claim(node, self.instance)
            except StoreError:
                self._reconcile_later()
                raise
            if not session.is_open or self._stopped:
                await self._release(node, epoch)
                raise SessionDead(f"the tunnel of node {self.names(node)} ended while it was being claimed")
            attachment = Attachment(node, next(self._serials))
            previous, self._held[node] = self._held.get(node), _Held(attachment, session, epoch, credential)
        if previous is not None:
            self.log.info("node {node} opened a newer tunnel, closing the older one", node=self.names(node))
            previous.session.close()
        return attachment

    async def detach(self, attachment: Attachment) -> None:
        """Stop holding what ``attachment`` names and release its claim; nothing if a newer one took its place."""
        held = self._held.get(attachment.node)
        if held is None or held.attachment != attachment:
            return
        del self._held[attachment.node]
        async with self._gate(attachment.node):
            await self._release(attachment.node, held.epoch)

    async def reclaim(self) -> None:
        """
        Claim anew every tunnel that is still held: this instance was swept while it was silent.

        The claim's epoch moves, the attachment does not. A node that somebody else claimed meanwhile has moved: what
        is left of its tunnel here is closed. (The original claims it all the same, and a frontend that was frozen
        takes a tunnel away from its new owner.)

        Raises:
            StoreError: the database did not answer; the rest was not claimed.
        """
        for node in list(self._held):
            async with self._gate(node):
                await self._reclaim_one(node)

    async def adopt_lost(self) -> None:
        """
        Own again what is held here though its row says that nobody owns it; called at each beat.

        A second tunnel of a node may come to another frontend and end there while this one lives: its end is then the
        last thing the registry knows, and the node would count as lost, later as departed.

        Raises:
            StoreError: the database did not answer; the next beat asks again.
        """
        # A tunnel on its way out opens no stream: owning it again would help nobody.
        held = {
            node: it.attachment
            for node, it in self._held.items()
            if it.session.is_open and not it.session.is_going_away
        }
        adopted = await self._ownership.adopt(list(held), self.instance)
        for node, epoch in adopted.items():
            now = self._held.get(node)
            if now is not None and now.attachment == held[node] and now.session.is_open:
                self.log.info(
                    "node {node} counted as lost while its tunnel is here; it is ours again", node=self.names(node)
                )
                now.epoch = epoch
            else:  # it ended, or was replaced, while the database was asked
                await self._release(node, epoch)

    async def reconcile(self) -> None:
        """Release every row that names this frontend though it holds no such tunnel; tried again until it worked."""
        try:
            rows = await self._ownership.held_by(self.instance)
            for node, epoch in rows.items():
                async with self._gate(node):  # an attach that has claimed and not stored yet is waited for
                    if node not in self._held:
                        self.log.info("releasing node {node}, which has no tunnel here", node=self.names(node))
                        await self._release(node, epoch)
        except StoreError as error:
            self.log.warn("could not look for tunnels left behind: {error}", error=str(error))
            self._reconcile_later()

    async def release_all(self) -> None:
        """Close every tunnel and release its claim; used once, when the frontend stops."""
        self._stopped = True
        for call in [*self._going_away, *([self._reconciling] if self._reconciling is not None else [])]:
            if call.active():
                call.cancel()
        for held in list(self._held.values()):
            held.session.close()
            await self.detach(held.attachment)

    def go_away(self, over: float) -> None:
        """
        Tell every held worker to open its next tunnel elsewhere, spread evenly over ``over`` seconds.

        Running streams go on. Source: design §7 (a draining frontend spreads its go-aways).
        """
        sessions = [held.session for held in self._held.values() if held.session.is_open]
        self._going_away = [
            self._clock.callLater(over * index / len(sessions), session.go_away)
            for index, session in enumerate(sessions)
        ]

    def end(self, attachment: Attachment) -> bool:
        """Close the tunnel that ``attachment`` names: its identity changed hands; False when it is held no more."""
        held = self._held.get(attachment.node)
        if held is None or held.attachment != attachment:
            return False
        held.session.close()
        return True

    async def _reclaim_one(self, node: NodeId) -> None:
        held = self._held.get(node)
        if held is None or not held.session.is_open:
            return
        # A detach meanwhile waits at the gate and reads the epoch only then.
        try:
            held.epoch = await self._ownership.reclaim(node, self.instance, held.epoch)
        except FencedOut:
            self.log.info(
                "node {node} has moved while this frontend was silent, closing what is left here", node=self.names(node)
            )
            held.session.close()

    async def _release(self, node: NodeId, epoch: Epoch) -> None:
        """Release within the timeout; without an answer the row is looked at later."""
        try:
            await within(self._ownership.release(node, self.instance, epoch), clock=self._clock)
        except FencedOut:
            self.log.debug("node {node} has a newer owner already", node=self.names(node))
        except (StoreError, ReleaseLate) as error:
            self.log.warn("could not release node {node} yet: {error}", node=self.names(node), error=str(error))
            self._reconcile_later()

    def _reconcile_later(self) -> None:
        if self._reconciling is None and not self._stopped:
            self._reconciling = self._clock.callLater(RECONCILE_AFTER, self._reconcile_now)

    def _reconcile_now(self) -> None:
        self._reconciling = None
        Deferred.fromCoroutine(self.reconcile()).addErrback(
            lambda failure: self.log.failure("looking for tunnels left behind failed", failure)
        )

    @asynccontextmanager
    async def _gate(self, node: NodeId) -> AsyncIterator[None]:
        """One claim or release of a node at a time; a gate exists only while somebody uses it."""
        gate = self._gates.setdefault(node, DeferredLock())
        await gate.acquire()
        try:
            yield
        finally:
            gate.release()
            if not gate.locked and self._gates.get(node) is gate:
                del self._gates[node]


def within(work: Awaitable[T], *, clock: IReactorTime, seconds: float = RELEASE_TIMEOUT) -> Deferred[T]:
    """
    Fires as ``work`` does, or fails with ``ReleaseLate`` after ``seconds``.

    The work is not cancelled: a statement that was sent can't be taken back, and what it does later is fenced.
    """
    answer: Deferred[T] = Deferred()
    timer = clock.callLater(seconds, answer.errback, ReleaseLate(f"no answer within {seconds:.0f} s"))

    def settled(result: T | Failure) -> None:
        if timer.active():
            timer.cancel()
            answer.callback(result)  # a Failure makes it an errback

    Deferred.fromCoroutine(_coroutine(work)).addBoth(settled)
    return answer


async def _coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable
