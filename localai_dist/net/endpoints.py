"""A stream behind an ordinary endpoint, so that whoever connects can't tell it from TCP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectError
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint
from zope.interface import implementer

from localai_dist.net.stream import MuxStream


@implementer(IStreamClientEndpoint)
class StreamEndpoint:
    """
    Connects a factory's protocol to the stream that ``opener`` gives.

    ``opener`` is called once per connect; whatever it raises is the connect's error, unchanged.
    """

    def __init__(self, opener: Callable[[], Awaitable[MuxStream]]) -> None:
        self._opener = opener

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Open a stream and start the factory's protocol on it; cancelling cancels the open."""
        return Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        stream = await self._opener()
        protocol = factory.buildProtocol(stream.getPeer())
        if protocol is None:
            stream.abortConnection()
            raise ConnectError(string="the factory built no protocol")
        stream.start(protocol)
        return protocol
