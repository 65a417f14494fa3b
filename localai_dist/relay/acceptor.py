"""
The frontend's door for its peers: ``GET /api/cluster/peer``.

Two credentials, both required: the deployment's registration token says "one of us", the peer token says "that one".
The id alone proves nothing, and a refused dial never displaces the real peer's link.

Source: wire contract §2.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from localai_dist.errors import InvalidName
from localai_dist.ids import InstanceId, parse_instance_id
from localai_dist.net.head import header, query
from localai_dist.net.session import MuxSession, SessionConfig, SessionEnd
from localai_dist.net.stream import MuxStream
from localai_dist.store.errors import StoreError
from localai_dist.tunnel import door
from localai_dist.tunnel.acceptor import Refusal, other_release
from localai_dist.wire.credentials import PEER_TOKEN, matches, same_secret


class PeerHashes(Protocol):
    """What is needed of the registry's instances."""

    def peer_token_hash(self, instance: InstanceId) -> Awaitable[str | None]:
        """
        The digest ``instance`` published of its peer token.

        Raises:
            StoreUnavailable: the database did not answer.
        """


NOT_ONE_OF_US: Final = Refusal(401, "invalid_registration_token", "missing or invalid Authorization header")
NO_ID: Final = Refusal(400, "invalid_request", "the query argument id (the dialling frontend's instance id) is missing")
NOT_THAT_ONE: Final = Refusal(
    401,
    "peer_identity_not_proven",
    "the peer token is not the one this instance published: every frontend has to run a release that proves its "
    "identity, so upgrade all frontends first, then the workers",
)
LOOKUP_FAILED: Final = Refusal(500, "registry_unavailable", "the registry did not answer; dial again", 1)


class PeerResource(Resource):
    """
    Admits other frontends and serves the streams they open.

    Args:
        instances: who knows the published digests.
        registration_token: the deployment's shared secret; empty admits nobody.
        on_stream: what serves a peer's stream, ``RelayService.serve``.
        config: the session's numbers, the same as the dialling end's.
        clock: for the session's timers.
    """

    isLeaf = True
    log = Logger()

    def __init__(
        self,
        *,
        instances: PeerHashes,
        registration_token: str,
        on_stream: Callable[[MuxStream], None],
        config: SessionConfig,
        clock: IReactorTime,
    ) -> None:
        super().__init__()
        self._instances = instances
        self._registration_token = registration_token
        self._on_stream = on_stream
        self._config = config
        self._clock = clock
        self._links: dict[InstanceId, MuxSession] = {}

    def render_GET(self, request: Any) -> int:
        """Decide, then upgrade."""
        if not same_secret(door.bearer_of(request), self._registration_token):
            return self._refuse(request, NOT_ONE_OF_US)
        claimed = query(request, "id")
        if not claimed:
            return self._refuse(request, NO_ID)
        gone: list[object] = []
        request.notifyFinish().addErrback(gone.append)
        deciding = Deferred.fromCoroutine(self._decide(claimed, header(request, PEER_TOKEN)))
        deciding.addCallback(self._answer, request, claimed, gone)
        deciding.addErrback(self._broken, request, gone)
        return NOT_DONE_YET

    def close(self) -> None:
        """End every link a peer opened."""
        for session in list(self._links.values()):
            session.close()

    async def _decide(self, claimed: str, token: str | None) -> Refusal | None:
        try:
            peer = parse_instance_id(claimed)
        except InvalidName:
            return NOT_THAT_ONE
        try:
            published = await self._instances.peer_token_hash(peer)
        except StoreError as error:
            self.log.warn("could not look up peer {peer}: {error}", peer=peer, error=error)
            return LOOKUP_FAILED
        return None if matches(token, published) else NOT_THAT_ONE

    def _answer(self, refusal: Refusal | None, request: Any, peer: str, gone: list[object]) -> None:
        if gone:
            return
        refusal = refusal or other_release(request)
        if refusal is not None:
            self._refuse(request, refusal, peer)
            return
        door.upgrade(
            request,
            config=self._config,
            clock=self._clock,
            on_session=lambda session: self._admitted(InstanceId(peer), session),
            on_stream=self._on_stream,
        )

    def _admitted(self, peer: InstanceId, session: MuxSession) -> None:
        previous, self._links[peer] = self._links.get(peer), session
        session.when_closed().addCallback(self._ended, peer, session)
        self.log.info("peer {peer} opened its link", peer=peer)
        if previous is not None:
            previous.close()

    def _ended(self, reason: SessionEnd, peer: InstanceId, session: MuxSession) -> None:
        if self._links.get(peer) is session:
            del self._links[peer]
            self.log.info("peer {peer} lost its link: {reason}", peer=peer, reason=reason.getErrorMessage())

    def _refuse(self, request: Any, refusal: Refusal, peer: str = "") -> int:
        self.log.warn(
            "link of peer {peer!r} refused: {status} {code}: {text}",
            peer=peer,
            status=refusal.status,
            code=refusal.code,
            text=refusal.text,
        )
        return door.refuse(request, refusal.status, refusal.code, refusal.text, retry_after=refusal.retry_after)

    def _broken(self, failure: Failure, request: Any, gone: list[object]) -> None:
        self.log.failure("the peer door failed", failure)
        if not gone and not request.startedWriting:
            self._refuse(request, LOOKUP_FAILED)
