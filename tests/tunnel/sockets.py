"""What tests on real sockets of this machine share."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from twisted.internet import reactor as real_reactor
from twisted.internet import tcp
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IListeningPort
from twisted.internet.task import deferLater
from twisted.web import resource

from localai_dist.ids import NodeId
from localai_dist.net.request import StreamingSite
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.stream import MuxStream
from localai_dist.net.websocket import accept, dial

reactor: Any = real_reactor


class Check(Enum):
    """As the registry's."""

    UNKNOWN_NODE = 1
    NO_TOKEN = 2
    WRONG = 3
    PENDING = 4
    OK = 5


class Nodes:
    """Who may dial, and how long the registry takes to say so."""

    def __init__(self) -> None:
        self.check = Check.OK
        self.error: Exception | None = None
        self.asked: list[tuple[str, str]] = []
        self.hang: Deferred[None] | None = None

    async def authenticate(self, node: NodeId, token: str) -> Enum:
        """As told."""
        self.asked.append((node, token))
        if self.hang is not None:
            await self.hang
        if self.error is not None:
            raise self.error
        return self.check


async def until(fact: Callable[[], bool], what: str) -> None:
    """Wait for a fact, at most 5 s."""
    for _ in range(500):
        if fact():
            return
        await deferLater(reactor, 0.01, lambda: None)
    raise AssertionError(f"never came true: {what}")


async def no_connection_left() -> None:
    """Wait until every socket but the listening ones is closed; one that only flushes is read from no more."""
    await until(
        lambda: not any(isinstance(each, tcp.Connection) for each in [*reactor.getReaders(), *reactor.getWriters()]),
        "every socket is closed",
    )


class Door(resource.Resource):
    """Lets in whoever dials: the frontend's side of one tunnel."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.session: Deferred[MuxSession] = Deferred()

    def render_GET(self, request: Any) -> Any:
        """Upgrade."""
        return accept(request, client=False, config=SessionConfig(), clock=reactor, on_session=self.session.callback)


async def tunnel(on_stream: Callable[[MuxStream], None]) -> tuple[IListeningPort, MuxSession, MuxSession]:
    """
    A tunnel over real sockets: the frontend's listening port, its session, and the worker's.

    Args:
        on_stream: what serves the streams the frontend opens.
    """
    door = Door()
    listening = reactor.listenTCP(0, StreamingSite(door, max_body=1000, reactor=reactor), interface="127.0.0.1")
    url = f"http://127.0.0.1:{listening.getHost().port}/"
    far = await dial(reactor, url, headers={}, client=True, config=SessionConfig(), on_stream=on_stream)
    return listening, await door.session, far


def cluster_root(**doors: resource.Resource) -> resource.Resource:
    """A resource tree with these doors below ``/api/cluster/``."""
    root, api, cluster = resource.Resource(), resource.Resource(), resource.Resource()
    root.putChild(b"api", api)
    api.putChild(b"cluster", cluster)
    for name, door in doors.items():
        cluster.putChild(name.encode(), door)
    return root
