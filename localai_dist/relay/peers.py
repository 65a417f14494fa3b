"""
Links to other frontends: one session per peer, dialled when first needed.

Many opens at once share one dial. A link that can't open a stream is closed and dialled once more. Nothing is pruned;
the session's keepalive ends what is dead. A reset of one stream never costs the link.

Source: wire contract §2.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist import __version__
from localai_dist.errors import LocalAIDistError
from localai_dist.ids import InstanceId
from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import MuxError, TooManyStreams
from localai_dist.net import websocket
from localai_dist.net.errors import DialRefused, NetError
from localai_dist.net.session import MuxSession, SessionConfig, SessionEnd
from localai_dist.net.stream import MuxStream
from localai_dist.reach import PeerUnreachable, Unreached
from localai_dist.wire.credentials import AUTHORIZATION, PEER_TOKEN, VERSION, authorization
from localai_dist.wire.releases import UPGRADE_ORDER

PEER_PATH: Final = "/api/cluster/peer"
DIAL_TIMEOUT: Final = 10.0
"""Seconds for TCP and the WebSocket handshake together. Source: wire contract §2."""


class PoolClosed(LocalAIDistError):
    """The pool was closed: this frontend stops. Neither a route nor a peer is to blame."""


Dial: TypeAlias = Callable[..., Awaitable[MuxSession]]
"""``net.websocket.dial``, or a test's."""


class _Link:
    """A session to one peer at one address, or the dial for it and those who wait for it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.session: MuxSession | None = None
        self.failure: Failure | None = None
        self.dialling: Deferred[MuxSession] | None = None
        self.waiters: list[Deferred[MuxSession]] = []

    def wait(self) -> Deferred[MuxSession]:
        """The session once it is there; cancelling forgets this waiter only."""
        if self.session is not None:
            return succeed(self.session)
        if self.failure is not None:
            return fail(self.failure)
        waiter: Deferred[MuxSession] = Deferred(self.waiters.remove)
        self.waiters.append(waiter)
        return waiter

    def up(self, session: MuxSession) -> None:
        """Give every waiter the session."""
        self.dialling, self.session = None, session
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.callback(session)

    def failed(self, failure: Failure) -> None:
        """Tell every waiter why there is none."""
        self.dialling, self.failure = None, failure
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.errback(failure)

    def close(self) -> None:
        """End the session or the dial."""
        if self.dialling is not None:
            self.dialling.cancel()
        if self.session is not None:
            self.session.close()


class PeerPool:
    """
    Sessions to other frontends.

    Args:
        reactor: dials and times.
        instance: this frontend's id.
        registration_token: the shared secret of the deployment.
        secret: this process's own peer secret, whose digest is in its ``instances`` row.
        config: the session's numbers; the accepting end has to use the same.
    """

    log = Logger()

    def __init__(
        self,
        *,
        reactor: Any,
        instance: InstanceId,
        registration_token: str,
        secret: str,
        config: SessionConfig = SessionConfig(),
        dial: Dial = websocket.dial,
    ) -> None:
        self._reactor = reactor
        self._instance = instance
        self._registration_token = registration_token
        self._secret = secret
        self._config = config
        self._dial = dial
        self._links: dict[InstanceId, _Link] = {}
        self._closed = False
        self.on_link_lost: Callable[[InstanceId], None] | None = None

    async def open(self, peer: InstanceId, address: str, traffic: TrafficClass) -> MuxStream:
        """
        A stream to ``peer``, which was last known at ``address`` (``host:port``).

        Cancelling it gives up this stream; a dial that others wait for goes on.

        Raises:
            Unreached: ``PeerUnreachable``.
            PoolClosed: ``close`` was called.
        """
        known = self._current(peer, address)
        try:
            return await self._open_once(peer, address, traffic)
        except (MuxError, NetError) as error:
            if known is None or isinstance(error, TooManyStreams):
                raise _unreachable(peer, address, error) from error
            self.log.info("the link to {peer} is stale ({error}), dialling anew", peer=peer, error=error)
        self._drop(peer, known)
        try:
            return await self._open_once(peer, address, traffic)
        except (MuxError, NetError) as error:
            raise _unreachable(peer, address, error) from error

    def close(self) -> None:
        """End every link, once; every later open raises ``PoolClosed``."""
        self._closed = True
        links, self._links = self._links, {}
        for link in links.values():
            link.close()

    async def _open_once(self, peer: InstanceId, address: str, traffic: TrafficClass) -> MuxStream:
        if self._closed:
            raise PoolClosed("this frontend stops")
        link = self._links.get(peer) or self._dialled(peer, address)
        session = await link.wait()
        return await session.open(traffic)

    def _current(self, peer: InstanceId, address: str) -> _Link | None:
        """The link to ``peer`` that is up, unless the peer restarted elsewhere under the same id."""
        link = self._links.get(peer)
        if link is not None and link.address != address:
            self._drop(peer, link)
            return None
        return link if link is not None and link.session is not None else None

    def _drop(self, peer: InstanceId, link: _Link) -> None:
        if self._links.get(peer) is link:
            del self._links[peer]
            link.close()

    def _dialled(self, peer: InstanceId, address: str) -> _Link:
        link = self._links[peer] = _Link(address)
        url = f"ws://{address}{PEER_PATH}?id={self._instance}"
        headers = {
            AUTHORIZATION: authorization(self._registration_token),
            PEER_TOKEN: self._secret,
            VERSION: __version__,
        }
        link.dialling = Deferred.fromCoroutine(self._dial_link(url, headers))
        link.dialling.addCallbacks(self._up, self._failed, callbackArgs=(peer, link), errbackArgs=(peer, link))
        return link

    async def _dial_link(self, url: str, headers: dict[str, str]) -> MuxSession:
        return await self._dial(
            self._reactor, url, headers=headers, client=True, config=self._config, timeout=DIAL_TIMEOUT
        )

    def _up(self, session: MuxSession, peer: InstanceId, link: _Link) -> None:
        self.log.info("link to {peer} at {address} is up", peer=peer, address=link.address)
        session.when_closed().addCallback(self._lost, peer, link)
        link.up(session)

    def _failed(self, failure: Failure, peer: InstanceId, link: _Link) -> None:
        if self._links.get(peer) is link:
            del self._links[peer]
        if failure.check(CancelledError) is not None:
            failure = Failure(PoolClosed("this frontend stops"))
        if not link.waiters:
            self.log.info("dialling {peer} failed: {error}", peer=peer, error=failure.getErrorMessage())
        link.failed(failure)

    def _lost(self, reason: SessionEnd, peer: InstanceId, link: _Link) -> None:
        self.log.info("link to {peer} ended: {reason}", peer=peer, reason=reason.getErrorMessage())
        if self._links.get(peer) is link:
            del self._links[peer]
        if self.on_link_lost is not None:
            self.on_link_lost(peer)


def _unreachable(peer: InstanceId, address: str, error: Exception) -> Unreached:
    """Condition 3, with the refusal of our identity told apart from all the rest."""
    rejected = isinstance(error, DialRefused) and error.status in (401, 403)
    text = str(error)
    if isinstance(error, DialRefused) and error.status == 426:
        there = error.headers.get(VERSION.lower(), "another one")
        text = f"it runs release {there}, this frontend {__version__}; they don't fit: {UPGRADE_ORDER}"
    return Unreached(PeerUnreachable(peer, text, rejected, address))
