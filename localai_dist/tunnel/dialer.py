"""
The worker's side of its tunnel: a service that keeps one open, whichever frontend admits it.

Source: wire contract §1, design §5.15 and §7.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from twisted.application.service import Service
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from localai_dist import __version__
from localai_dist.backoff import Backoff
from localai_dist.ids import NodeId, approval_of
from localai_dist.mux.errors import SessionDead
from localai_dist.net import websocket
from localai_dist.net.errors import DialRefused, NetError
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.stream import MuxStream
from localai_dist.tunnel.link import Core, NoCredential, make_link
from localai_dist.tunnel.urls import Rotation, connect_url
from localai_dist.wire.credentials import AUTHORIZATION, VERSION, authorization
from localai_dist.wire.releases import UPGRADE_ORDER

DIAL_TIMEOUT: Final = 10.0
"""Seconds for TCP, TLS and the WebSocket handshake together. Source: wire contract §1."""
CLOSE_TIMEOUT: Final = 5.0
"""Seconds a session may take to flush and close when the worker stops; then it is cut."""

REFUSALS: Final[dict[int, str]] = {
    401: "the frontend {url} does not know this node or its token; the worker registers anew",
    403: "the frontend {url} has this node waiting for approval: run '{approval}' there",
    404: "nothing at {url} opens tunnels: is it a localai-dist frontend, and is its base path right?",
    426: "the frontend {url} runs release {release}, this worker {ours}; they don't fit: {order}",
    503: "the frontend {url} takes no tunnels now (starting or draining)",
}
"""Status of a refused dial -> what the log says; each is retried all the same."""
FOREIGN: Final = (
    "{status} from something at {url} that is no localai-dist frontend: a proxy or gateway that does not let "
    "WebSockets to /api/cluster/connect pass?"
)
"""The log's text when the refusal carries no release: it is not one of ours."""


Dial: TypeAlias = Callable[..., Awaitable[MuxSession]]
"""``net.websocket.dial``, or a test's."""


@dataclass(frozen=True, slots=True)
class TunnelState:
    """
    What ``/readyz`` says of the tunnel.

    Attributes:
        connected: whether a tunnel is open.
        since: since when, on the service's clock (s), or None before the first change.
        reason: "connected", or why not.
        losses: how many tunnels were lost so far; one that retired for a newer one was not.
        refused: the HTTP status that the frontend asked last answered instead of a tunnel; None when it did not
            answer, when something else did, and while a tunnel is open.
    """

    connected: bool = False
    since: float | None = None
    reason: str = "not started"
    losses: int = 0
    refused: int | None = None


class TunnelClient(Service):
    """
    Keeps one tunnel open to any of the frontends.

    Args:
        reactor: dials and times.
        name: the node's, by which an operator knows it.
        urls: the frontends, one or several; the last one that worked is tried first.
        node_id: asked on each dial; None while the node is not registered.
        token: the node's own token, asked on each dial; None likewise.
        on_stream: what serves a stream a frontend opened.
        chance: a random number from 0 to 1 for each wait.
        backoff: how long to wait after a failed round or a lost tunnel.
        config: the session's numbers.
        on_unauthorised: called after a 401, so that the worker registers anew.
        dial: ``net.websocket.dial`` unless a test says otherwise.
    """

    log = Logger()

    def __init__(
        self,
        *,
        reactor: Any,
        name: str,
        urls: Sequence[str],
        node_id: Callable[[], NodeId | None],
        token: Callable[[], str | None],
        on_stream: Callable[[MuxStream], None],
        chance: Callable[[], float],
        backoff: Backoff = Backoff(),
        config: SessionConfig = SessionConfig(),
        on_unauthorised: Callable[[], None] | None = None,
        dial: Dial = websocket.dial,
        tls_trust: Any = None,
    ) -> None:
        self._reactor = reactor
        self._name = name
        self._node_id = node_id
        self._token = token
        self._on_stream = on_stream
        self._config = config
        self._on_unauthorised = on_unauthorised
        self._dial = dial
        self._tls_trust = tls_trust
        self._told: dict[str, tuple[object, ...]] = {}
        self._state = TunnelState()
        self._last: tuple[str, int | None] = ("", None)
        self._doubted: MuxSession | None = None
        clock: IReactorTime = reactor
        self._core = Core(clock, Rotation(urls), backoff, chance, self._dial_one, self._changed)
        self._link = make_link(self._core)

    @property
    def state(self) -> TunnelState:
        """Whether a tunnel is open, since when, and why not."""
        return self._state

    @property
    def connected(self) -> bool:
        """Whether a tunnel is open."""
        return self._state.connected

    def startService(self) -> None:
        """Start to dial; never fails on a frontend."""
        super().startService()
        self._link.start()

    def stopService(self) -> Deferred[None]:
        """Close every tunnel; fires when all have ended, after at most ``CLOSE_TIMEOUT`` each."""
        super().stopService()
        sessions = [*self._core.retiring, *([self._core.current] if self._core.current is not None else [])]
        self._link.stop()
        return Deferred.fromCoroutine(self._all_ended(sessions))

    def retry_now(self) -> None:
        """Cut a wait short: the node has just been registered, or got another token."""
        self._link.retry()

    def registry_says(self, held: bool) -> None:
        """
        What each heartbeat learns: whether some frontend owns this node's tunnel.

        An open tunnel that twice in a row nobody owns ends at a frontend that has lost the database and was taken for
        dead. The next one is opened as after a go-away, so that nothing running is cut, and the old one goes on while
        nobody else admits this node. Once is not enough: the first beat after a dial may be before its claim.

        Source: docs/decisions/0008-frontend-without-database.md.
        """
        current = self._core.current
        doubted, self._doubted = self._doubted, None if held else current
        if self._doubted is not None and self._doubted is doubted:
            self._core.leave(self._link, doubted, "no frontend the registry knows holds this tunnel")

    async def _dial_one(self, url: str) -> MuxSession:
        node, token = self._node_id(), self._token()
        if not node or not token:
            self._last = ("", None)
            raise NoCredential("no credential yet: the node is not registered")
        try:
            session = await self._dial(
                self._reactor,
                connect_url(url, node),
                headers={AUTHORIZATION: authorization(token), VERSION: __version__},
                client=True,
                config=self._config,
                on_stream=self._on_stream,
                timeout=DIAL_TIMEOUT,
                tls_trust=self._tls_trust,
            )
        except NetError as error:
            self._report(url, error)
            raise
        self._told.pop(url, None)
        self._last = ("", None)
        return session

    def _report(self, url: str, error: NetError) -> None:
        """One warning per frontend and cause, not one per try; a cause that came back after another is told again."""
        status = error.status if isinstance(error, DialRefused) else None
        release = error.headers.get(VERSION.lower(), "") if isinstance(error, DialRefused) else ""
        text = "{url}: {error}" if status is None else FOREIGN
        if status is not None and (release or status == 404):
            text = REFUSALS.get(status, "could not open the tunnel at {url}: {error}")
        cause = (text, status, release, str(error))
        known, self._told[url] = self._told.get(url) == cause, cause
        say = self.log.debug if known else self.log.warn
        facts = {"url": url, "error": str(error), "status": status, "release": release}
        facts |= {"ours": __version__, "order": UPGRADE_ORDER, "approval": approval_of(self._name)}
        say(text, **facts)
        self._last = (text.format_map(facts), None if text is FOREIGN else status)
        if status == 401 and self._on_unauthorised is not None:
            self._on_unauthorised()

    def _changed(self, reason: str) -> None:
        connected, before = self._core.current is not None, self._state
        if connected:
            self._opened(before)
        since = before.since if connected is before.connected else self._reactor.seconds()
        losses = before.losses + (before.connected and not connected)
        # A failed round ends with a refusal that was told just now, in better words than the dial's own.
        told, refused = ("", None) if connected else self._last
        self._state = TunnelState(connected, since, told or reason, losses, refused)

    def _opened(self, before: TunnelState) -> None:
        """One line per tunnel; after a loss it says how long there was none."""
        url = self._core.rotation.order()[0]
        if before.losses and not before.connected and before.since is not None:
            away = self._reactor.seconds() - before.since
            text = "tunnel open again at {url} after {away:.1f} s without, {losses} lost so far"
            self.log.info(text, url=url, away=away, losses=before.losses)
        else:
            self.log.info("tunnel open at {url}", url=url)

    async def _all_ended(self, sessions: Sequence[MuxSession]) -> None:
        cut = self._reactor.callLater(CLOSE_TIMEOUT, self._cut, sessions)
        await DeferredList([session.when_closed() for session in sessions])
        if cut.active():
            cut.cancel()

    def _cut(self, sessions: Sequence[MuxSession]) -> None:
        for session in sessions:
            if session.is_open:
                session.abort(SessionDead("the worker stops"))
