"""The same contract through a real tunnel: WebSocket, mux stream, splice, loopback TCP."""

from __future__ import annotations

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.task import deferLater

from localai_dist.grpcclient import BackendChannel, connect
from localai_dist.net.endpoints import StreamEndpoint
from localai_dist.net.session import MuxSession
from localai_dist.net.splice import splice_stream_to_endpoint
from localai_dist.net.stream import MuxStream
from tests.grpcclient import test_contract
from tests.support.refusing import refusing_port
from tests.tunnel.sockets import no_connection_left, tunnel


class TunnelContractTests(test_contract.ContractTests):
    async def setUp(self) -> None:
        self.frontend: MuxSession | None = None
        self.worker: MuxSession | None = None
        await super().setUp()

    async def connected(self) -> BackendChannel:
        """A channel through the tunnel, which is opened with the first."""
        if self.frontend is None:
            await self.open_tunnel()

        async def opener() -> MuxStream:
            assert self.frontend is not None
            return await self.frontend.open()

        return await connect(StreamEndpoint(opener), token="t0", clock=reactor)

    async def open_tunnel(self) -> None:
        """The worker dials, the frontend accepts."""
        self.listener, self.frontend, self.worker = await tunnel(self.serve_stream)

    def serve_stream(self, stream: MuxStream) -> None:
        """The worker's side of a stream: straight to the backend's port."""
        stream.accept()
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", self.port)
        joined = Deferred.fromCoroutine(splice_stream_to_endpoint(stream, endpoint))
        joined.addErrback(lambda _refused: stream.abortConnection())

    async def tearDown(self) -> None:
        await super().tearDown()
        assert self.frontend is not None and self.worker is not None
        await self.streams_over()
        ended = [self.frontend.when_closed(), self.worker.when_closed()]
        self.worker.close()
        for end in ended:
            await end
        await self.listener.stopListening()
        await no_connection_left()

    async def streams_over(self, seconds: float = 5.0) -> None:
        """Wait until no stream is left on either side: a closed channel leaks none."""
        assert self.frontend is not None and self.worker is not None
        end = reactor.seconds() + seconds
        while self.frontend.stream_count + self.worker.stream_count:
            self.assertLess(reactor.seconds(), end, "a stream is left")
            await deferLater(reactor, 0.01)

    async def test_nobody_listens(self) -> None:
        """
        A backend that is not there ends the stream, and the call is unavailable by nobody's word.
        """
        with refusing_port() as self.port:
            channel = await self.connected()
            self.assertFalse(await channel.health())
        self.assertFalse(channel.is_open)

    async def test_lost_tunnel(self) -> None:
        """
        When the tunnel is lost every running call fails at once, as unavailable by nobody's word.
        """
        stream = self.channel.predict_stream(test_contract.pb.PredictOptions(Prompt="wait", Tokens=5))
        for _ in range(3):
            await stream.__anext__()
        assert self.frontend is not None
        self.frontend.abort(ConnectionError("cut"))
        with self.assertRaises(test_contract.RpcError) as caught:
            await stream.__anext__()
        self.assertEqual(caught.exception.status, test_contract.StatusCode.UNAVAILABLE)
        self.assertIs(caught.exception.origin, test_contract.Origin.TRANSPORT)
        self.assertTrue(await self.fact(self.backend.cancelled))
