"""
The frontend's door for tunnels: ``GET /api/cluster/connect``.

Every refusal is an ordinary HTTP answer, given before the upgrade and in one fixed order; a failed database lookup is
500 and never 401, because a worker must not throw its identity away over it. The registration token opens nothing here.

Source: wire contract §1.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from localai_dist.errors import InvalidName, LocalAIDistError
from localai_dist.ids import NodeId, parse_node_id
from localai_dist.mux.errors import SessionDead
from localai_dist.net.head import query
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.store.errors import StoreError
from localai_dist.tunnel import door
from localai_dist.tunnel.held import HeldTunnels
from localai_dist.wire.credentials import digest


class NodeDoor(Protocol):
    """What is needed of the registry's nodes."""

    def authenticate(self, node: NodeId, token: str) -> Awaitable[Enum]:
        """
        Whether ``token`` is ``node``'s own: a member named UNKNOWN_NODE, NO_TOKEN, WRONG, PENDING or OK.

        Raises:
            StoreUnavailable: the database did not answer.
        """


@dataclass(frozen=True, slots=True)
class Refusal:
    """One answer of the door that is not an upgrade."""

    status: int
    code: str
    text: str
    retry_after: int | None = None


NO_TOKEN: Final = Refusal(401, "invalid_node_token", "present the node's own token as Authorization: Bearer")
CLOSED: Final = Refusal(503, "not_accepting_tunnels", "this frontend takes no tunnels now (starting or draining)", 1)
NO_ID: Final = Refusal(400, "invalid_request", "the query argument id (the node's id) is missing")
WRONG_TOKEN: Final = Refusal(401, "invalid_node_token", "unknown node, or not its token: register the worker again")
LOOKUP_FAILED: Final = Refusal(500, "registry_unavailable", "the registry did not answer; dial again", 1)
PENDING: Final = Refusal(403, "node_pending", "the node waits for approval: localai-dist nodes approve NAME")
FOREIGN_ORIGIN: Final = Refusal(403, "foreign_origin", "a page of another site may not open a tunnel")


def other_release(request: Any) -> Refusal | None:
    """The refusal of a release that does not fit, or None."""
    trouble = door.other_release(request)
    return None if trouble is None else Refusal(426, "incompatible_release", trouble)


class ConnectResource(Resource):
    """
    Admits workers, claims their ownership and holds their tunnels.

    Args:
        nodes: who knows the nodes' tokens; None when this process has no registry.
        held: where an admitted session goes.
        config: the session's numbers, the same on both ends.
        clock: for the session's timers.
        accepting: False while the frontend starts or drains.
        on_held: told of each node whose tunnel is claimed and held.
    """

    isLeaf = True
    log = Logger()

    def __init__(
        self,
        *,
        nodes: NodeDoor | None,
        held: HeldTunnels,
        config: SessionConfig,
        clock: IReactorTime,
        accepting: Callable[[], bool] = lambda: True,
        on_held: Callable[[NodeId], None] = lambda node: None,
    ) -> None:
        super().__init__()
        self._nodes = nodes
        self._held = held
        self._config = config
        self._clock = clock
        self._accepting = accepting
        self._on_held = on_held

    def render_GET(self, request: Any) -> int:
        """Decide, then upgrade; see the module's docstring for the order."""
        token = door.bearer_of(request)
        if token is None:
            return self._refuse(request, NO_TOKEN)
        if self._nodes is None or not self._accepting():
            return self._refuse(request, CLOSED)
        claimed = query(request, "id")
        if not claimed:
            return self._refuse(request, NO_ID)
        gone: list[object] = []
        request.notifyFinish().addErrback(gone.append)
        deciding = Deferred.fromCoroutine(self._decide(self._nodes, claimed, token))
        deciding.addCallback(self._answer, request, claimed, digest(token), gone)
        deciding.addErrback(self._broken, request, gone)
        return NOT_DONE_YET

    async def _decide(self, nodes: NodeDoor, claimed: str, token: str) -> Refusal | None:
        try:
            node = parse_node_id(claimed)
        except InvalidName:
            return WRONG_TOKEN
        try:
            check = await nodes.authenticate(node, token)
        except StoreError as error:
            name = self._held.names(node)
            self.log.warn("could not look up node {node} for its tunnel: {error}", node=name, error=error)
            return LOOKUP_FAILED
        if check.name == "OK":
            return None
        return PENDING if check.name == "PENDING" else WRONG_TOKEN

    def _answer(self, refusal: Refusal | None, request: Any, node: str, credential: str, gone: list[object]) -> None:
        if gone:
            return
        if refusal is None:
            refusal = other_release(request)
        if refusal is None and not door.same_origin(request):
            refusal = FOREIGN_ORIGIN
        if refusal is None and not self._accepting():  # the frontend began to drain during the lookup
            refusal = CLOSED
        if refusal is not None:
            self._refuse(request, refusal, node)
            return
        door.upgrade(
            request,
            config=self._config,
            clock=self._clock,
            on_session=lambda session: self._admitted(NodeId(node), session, credential),
        )

    def _admitted(self, node: NodeId, session: MuxSession, credential: str) -> None:
        holding = Deferred.fromCoroutine(self._hold(node, session, credential))
        holding.addErrback(lambda failure: self._not_held(failure, node, session))

    async def _hold(self, node: NodeId, session: MuxSession, credential: str) -> None:
        try:
            attachment = await self._held.attach(node, session, credential=credential)
        except LocalAIDistError as error:
            name = self._held.names(node)
            self.log.warn("could not claim the tunnel of node {node}: {error}", node=name, error=error)
            session.close()
            return
        name = self._held.names.with_id(node)
        self.log.info("node {node} opened its tunnel", node=name)
        self._on_held(node)
        reason = await session.when_closed()
        self.log.info("node {node} lost its tunnel: {reason}", node=name, reason=reason.getErrorMessage())
        await self._held.detach(attachment)

    def _not_held(self, failure: Failure, node: NodeId, session: MuxSession) -> None:
        self.log.failure("holding the tunnel of node {node} failed", failure, node=self._held.names(node))
        if session.is_open:
            session.abort(SessionDead("its ownership could not be kept"))

    def _refuse(self, request: Any, refusal: Refusal, node: str = "") -> int:
        name = self._held.names(node)
        self.log.info(
            "tunnel of node {node!r} refused: {status} {code}{called}",
            node=node,
            status=refusal.status,
            code=refusal.code,
            called="" if name == node else f" (it is called {name})",
        )
        return door.refuse(request, refusal.status, refusal.code, refusal.text, retry_after=refusal.retry_after)

    def _broken(self, failure: Failure, request: Any, gone: list[object]) -> None:
        self.log.failure("the tunnel door failed", failure)
        if not gone and not request.startedWriting:
            self._refuse(request, LOOKUP_FAILED)
