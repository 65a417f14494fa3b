"""
Ends tunnels whose identity changed hands or whose node was removed, wherever they are held.

The registry decides: each open tunnel came with a token, and is ended when that token is no longer its node's. Word
from another frontend only says when to look; a look once a minute and right after each attach makes up for what was
not heard.

Source: design §5 item 13.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, TypeAlias

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from localai_dist.ids import NodeId
from localai_dist.store.errors import StoreError
from localai_dist.tunnel.held import HeldTunnels

INTERVAL: Final = 60.0
"""Seconds between two looks at every held tunnel."""

AGAIN: Final = 5.0
"""Seconds until a look that the database did not answer is repeated."""

StillTheirs: TypeAlias = Callable[[Mapping[NodeId, str]], Awaitable[Collection[NodeId]]]
"""Those of these nodes whose token still has this digest; raises ``StoreError``."""


class IdentityWatch:
    """
    Looks after the identities of held tunnels.

    Args:
        held: the tunnels.
        still_theirs: asks the registry.
        clock: times the looks.
    """

    log = Logger()

    def __init__(
        self, held: HeldTunnels, still_theirs: StillTheirs, *, clock: IReactorTime, interval: float = INTERVAL
    ) -> None:
        self._held = held
        self._still_theirs = still_theirs
        self._clock = clock
        self._every = interval
        self._loop = LoopingCall(lambda: Deferred.fromCoroutine(self.check()))
        self._loop.clock = clock
        self._again: IDelayedCall | None = None
        self._stopped = False

    def start(self) -> None:
        """Begin to look at every tunnel now and then."""
        done = self._loop.start(self._every, now=False)
        done.addErrback(lambda failure: self.log.failure("the watch over identities stopped", failure))

    def stop(self) -> None:
        """Look no more."""
        self._stopped = True
        if self._loop.running:
            self._loop.stop()
        if self._again is not None and self._again.active():
            self._again.cancel()

    def check_soon(self, node: NodeId | None = None) -> None:
        """Look at one node's tunnel, or at all, without being waited for."""
        nodes = None if node is None else {node}
        Deferred.fromCoroutine(self.check(nodes)).addErrback(
            lambda failure: self.log.failure("looking at identities failed", failure)
        )

    async def check(self, nodes: Collection[NodeId] | None = None) -> None:
        """
        End the held tunnels (of ``nodes``, or all) whose identity is no longer theirs.

        Without an answer of the database nothing is ended, and all are looked at soon.
        """
        held = {
            attachment: credential
            for attachment, credential in self._held.credentials().items()
            if nodes is None or attachment.node in nodes
        }
        if not held or self._stopped:
            return
        try:
            theirs = await self._still_theirs({attachment.node: digest for attachment, digest in held.items()})
        except StoreError as error:
            self.log.info("identities of tunnels were not looked at: {error}", error=str(error))
            self._look_again()
            return
        for attachment in held:
            # A newer tunnel that was attached meanwhile has another attachment and is not touched.
            if attachment.node not in theirs and self._held.end(attachment):
                self.log.warn(
                    "ended the tunnel of node {node}: it was removed, or its name belongs to somebody else",
                    node=self._held.names.with_id(attachment.node),
                )

    def _look_again(self) -> None:
        if not self._stopped and (self._again is None or not self._again.active()):
            self._again = self._clock.callLater(AGAIN, self.check_soon)
