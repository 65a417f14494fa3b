"""The WebSocket carrier over real loopback sockets."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from twisted.internet import reactor as untyped_reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint, clientFromString, connectProtocol
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import LogEvent, LogLevel, globalLogPublisher
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase
from twisted.web.resource import Resource
from twisted.web.server import Site

from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import SessionDead
from localai_dist.net.errors import DialFailed, DialRefused
from localai_dist.net.request import StreamingSite, json_error
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.stream import MuxStream
from localai_dist.net.websocket import accept, dial, require_masker
from localai_dist.net.websocket_carrier import MESSAGE_MAX
from localai_dist.testing.child import child_environment, twistd
from localai_dist.testing.memory import Recorder
from localai_dist.testing.streams import Source
from localai_dist.units import MiB
from tests.net.frames import frame
from tests.support.refusing import refusing_port

reactor: Any = untyped_reactor
CONFIG = SessionConfig()


class Connect(Resource):
    """Accepts sessions, or refuses with ``status``; a JSON sibling lives beside it."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[MuxSession] = []
        self.streams: list[MuxStream] = []
        self.status = 101
        self.got: Deferred[MuxSession] = Deferred()
        self.on_stream: Callable[[MuxStream], None] = self.streams.append

    def render_GET(self, request: Any) -> Any:
        if request.path == b"/json":
            return b"{}"
        if self.status != 101:
            return json_error(request, self.status, "forbidden", "not you", "permission_error", retry_after=7)
        return accept(
            request,
            client=False,
            config=CONFIG,
            clock=reactor,
            on_session=self.accepted,
            on_stream=lambda stream: self.on_stream(stream),
        )

    def accepted(self, session: MuxSession) -> None:
        self.sessions.append(session)
        self.got.callback(session)


class WebSocketCase(TestCase):
    timeout = 60

    async def setUp(self) -> None:
        self.root = Connect()
        self.port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(self.site())
        self.url = f"ws://127.0.0.1:{self.port.getHost().port}/api/cluster/connect?id=n1"

    def site(self) -> Site:
        return StreamingSite(self.root, max_body=1 * MiB, reactor=reactor)

    async def tearDown(self) -> None:
        for session in self.root.sessions:
            session.close()
            await session.when_closed()
        await self.port.stopListening()
        # Let the closing handshakes end, which a trial test would else report as open sockets.
        while any(type(end).__name__ in ("Server", "Client") for end in [*reactor.getReaders(), *reactor.getWriters()]):
            await pause(0.01)

    async def dial(self, **kwargs: Any) -> MuxSession:
        return await dial(
            reactor, self.url, headers={"Authorization": "Bearer t"}, client=True, config=CONFIG, **kwargs
        )


def pause(seconds: float) -> Deferred[None]:
    done: Deferred[None] = Deferred()
    reactor.callLater(seconds, done.callback, None)
    return done


class Finished(Recorder):
    """A recorder with a Deferred for its end."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Deferred[Failure] = Deferred()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        super().connectionLost(reason)
        self.done.callback(None)


class Sink(Finished):
    """Counts and keeps nothing."""

    count = 0

    def dataReceived(self, data: bytes) -> None:
        self.count += len(data)


class DialTests(WebSocketCase):
    async def test_streams_both_ways(self) -> None:
        """A session dialled through an ordinary site carries streams both ways, 20 MiB each (MUX-12)."""
        there = Finished()
        self.root.on_stream = lambda stream: stream.start(there)
        session = await self.dial()
        stream = await session.open(TrafficClass.BULK)
        here = Finished()
        stream.start(here)
        Source(stream, 20 * MiB, closing=True).begin()
        await there.done
        self.assertEqual(len(there.data), 20 * MiB)
        server = await self.root.got
        arrived: Deferred[MuxStream] = Deferred()
        session.on_stream = arrived.callback
        back = await server.open()
        back.start(Finished())
        far = Finished()
        Source(back, 20 * MiB, closing=True).begin()
        (await arrived).start(far)
        await far.done
        self.assertEqual(len(far.data), 20 * MiB)
        while session.stream_count or server.stream_count:
            await pause(0.01)
        self.assertIsNotNone(session.rtt)

    async def test_small_frames_are_sent_at_once(self) -> None:
        """Both ends of a tunnel have Nagle's algorithm off, else a short request stands still for 40 ms (MUX-20)."""
        session = await self.dial()
        await self.root.got
        ends = [it.socket for it in reactor.getReaders() if type(it).__name__ in ("Server", "Client")]
        self.assertEqual(len(ends), 2)
        for end in ends:
            self.assertTrue(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        self.assertTrue(session.is_open)

    async def test_rate_for_the_processor(self) -> None:
        """128 MiB each way cost both ends less than a second of one processor per 150 MB, in short turns (BR-050)."""
        session = await self.dial()
        server = await self.root.got
        gc.collect()
        gc.freeze()  # to look through what other tests have left would be one long turn
        self.addCleanup(gc.unfreeze)
        longest, last = [0.0], [time.process_time()]

        def tick() -> None:
            now = time.process_time()
            longest.append(now - last[0])
            last[0] = now
            self.ticking = reactor.callLater(0.005, tick)

        tick()
        for opener, accepter in ((session, self.root), (server, session)):
            arrived: Deferred[MuxStream] = Deferred()
            accepter.on_stream = arrived.callback
            stream = await opener.open(TrafficClass.BULK)
            stream.start(Finished())
            began = time.process_time()
            Source(stream, 128 * MiB, closing=True).begin()
            sink = Sink()
            (await arrived).start(sink)
            await sink.done
            self.assertEqual(sink.count, 128 * MiB)
            self.assertGreater(128 * MiB / (time.process_time() - began), 150e6)
        self.ticking.cancel()
        self.assertLess(sorted(longest)[int(0.99 * len(longest))], 0.1)

    async def test_close_code_reaches_the_peer(self) -> None:
        """A closed session ends the other one, which knows the close code (MUX-12)."""
        session = await self.dial()
        server = await self.root.got
        session.close()
        reason = await server.when_closed()
        self.assertTrue(reason.check(SessionDead))
        self.assertIn("1000", reason.getErrorMessage())

    async def test_refused(self) -> None:
        """An HTTP answer instead of the upgrade comes with status and headers, and names the address."""
        self.root.status = 403
        told: list[LogEvent] = []
        globalLogPublisher.addObserver(told.append)
        self.addCleanup(globalLogPublisher.removeObserver, told.append)
        with self.assertRaises(DialRefused) as caught:
            await self.dial()
        self.assertEqual(caught.exception.status, 403)
        self.assertEqual([event["log_format"] for event in told if event["log_level"] >= LogLevel.warn], [])
        self.assertEqual(caught.exception.headers["retry-after"], "7")
        self.assertIn(str(self.port.getHost().port), str(caught.exception))

    async def test_nobody_listens(self) -> None:
        """A dial nobody answers names address and cause."""
        with refusing_port() as number, self.assertRaises(DialFailed) as caught:
            await dial(reactor, f"http://127.0.0.1:{number}/", headers={}, client=True, config=CONFIG)
        self.assertIn(f"127.0.0.1:{number}", str(caught.exception))
        self.assertIn("refused", str(caught.exception))

    async def test_silent_listener(self) -> None:
        """A listener that never answers is given up in time; so is a cancelled dial."""
        silent = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(Protocol))
        url = f"ws://127.0.0.1:{silent.getHost().port}/"
        with self.assertRaises(DialFailed):
            await dial(reactor, url, headers={}, client=True, config=CONFIG, timeout=0.2)
        # Cancelled while the name is looked up, while the connection is made, while the answer is awaited.
        for turns in (0, 1, 2, 20):
            dialling = Deferred.fromCoroutine(dial(reactor, url, headers={}, client=True, config=CONFIG))
            for _ in range(turns):
                await pause(0)
            dialling.cancel()
            with self.assertRaises(CancelledError):
                await dialling
        await silent.stopListening()

    async def test_what_speaks_no_http(self) -> None:
        """A listener that speaks something else is a failed dial, not a refusal."""

        class Ssh(Protocol):
            def connectionMade(self) -> None:
                self.transport.write(b"SSH-2.0-x\r\n\r\n")

        other = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(Ssh))
        with self.assertRaises(DialFailed):
            await dial(
                reactor, f"ws://127.0.0.1:{other.getHost().port}/", headers={}, client=True, config=CONFIG, timeout=5
            )
        await other.stopListening()

    async def test_bad_url(self) -> None:
        """An address that is none says what is wanted."""
        for url in ("ftp://host", "ws://", "host:1", "ws://[::1", "ws://host:0"):
            with self.assertRaises(DialFailed):
                await dial(reactor, url, headers={}, client=True, config=CONFIG)


class Raw(Protocol):
    """A hand-made WebSocket client."""

    def __init__(self) -> None:
        self.data = b""
        self.lost: Deferred[None] = Deferred()
        self.upgraded: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.data += data
        if b"\r\n\r\n" in self.data and not self.upgraded.called:
            self.upgraded.callback(None)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self.lost.callback(None)


class RawPeerTests(WebSocketCase):
    """Peers that speak WebSocket but not as we do (MUX-12)."""

    async def connect(self) -> Raw:
        endpoint = clientFromString(reactor, f"tcp:127.0.0.1:{self.port.getHost().port}")
        raw: Raw = await connectProtocol(endpoint, Raw())
        raw.transport.write(
            b"GET /api/cluster/connect HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        await raw.upgraded
        self.assertIn(b"101", raw.data.split(b"\r\n")[0])
        raw.data = raw.data.partition(b"\r\n\r\n")[2]
        return raw

    async def test_text_message(self) -> None:
        """A text message ends the session with an error naming "binary" (MUX-12)."""
        raw = await self.connect()
        server = await self.root.got
        raw.transport.write(frame(0x81, b"hello"))
        reason = await server.when_closed()
        self.assertIn("binary", reason.getErrorMessage())
        while (1003).to_bytes(2, "big") not in raw.data:
            await pause(0.01)
        raw.transport.abortConnection()
        await raw.lost

    async def test_message_too_long(self) -> None:
        """A message above 1 MiB + 4 KiB is refused by its header with close 1009 (MUX-12)."""
        raw = await self.connect()
        server = await self.root.got
        raw.transport.write(frame(0x82, b"", announce=MESSAGE_MAX + 1))
        while (1009).to_bytes(2, "big") not in raw.data:
            await pause(0.01)
        raw.transport.abortConnection()
        await raw.lost
        self.assertTrue((await server.when_closed()).check(SessionDead))

    async def test_odd_messages(self) -> None:
        """Empty messages, and a frame header split over messages, are fine (MUX-12)."""
        raw = await self.connect()
        server = await self.root.got
        ping = bytes.fromhex("0002000100000000000000ff")
        raw.transport.write(frame(0x82, b"") + frame(0x82, ping[:5]) + frame(0x82, b"") + frame(0x82, ping[5:]))
        while bytes.fromhex("0002000200000000000000ff") not in raw.data:
            await pause(0.01)
        self.assertTrue(server.is_open)
        raw.transport.abortConnection()
        await raw.lost
        await server.when_closed()

    async def test_no_upgrade(self) -> None:
        """An ordinary GET is answered 400 in the envelope; other routes of the site go on."""
        endpoint = clientFromString(reactor, f"tcp:127.0.0.1:{self.port.getHost().port}")
        raw: Raw = await connectProtocol(endpoint, Raw())
        raw.transport.write(
            b"GET /x HTTP/1.1\r\nHost: x\r\n\r\nGET /json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        await raw.lost
        self.assertIn(b" 400 ", raw.data)
        self.assertIn(b"invalid_request", raw.data)
        self.assertIn(b" 200 ", raw.data)


class MaskerTests(TestCase):
    def test_present(self) -> None:
        """The native masker is there."""
        require_masker()

    def test_missing(self) -> None:
        """Without the native masker a daemon refuses to start, in one line that says how to get it (MUX-12, BR-050)."""
        for daemon in ("localai-frontend", "localai-worker", "localai-agent-worker"):
            folder = self.mktemp()
            os.makedirs(folder)
            env = {
                "AUTOBAHN_USE_NVX": "0",
                "LOCALAI_REGISTER_TO": "http://127.0.0.1:1",
                "LOCALAI_REGISTRATION_TOKEN": "x",
                "LOCALAI_AUTH_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/nothing",
                "LOCALAI_ADDRESS": "127.0.0.1:0",
                "LOCALAI_HTTP_ADDR": "127.0.0.1:0",
                "LOCALAI_API_KEY": "x",
                **{f"LOCALAI_{name}_PATH": f"{folder}/{name}" for name in ("DATA", "MODELS", "BACKENDS")},
            }
            ran = subprocess.run(
                twistd(daemon), env=child_environment(env), cwd=folder, capture_output=True, text=True, timeout=60
            )
            self.assertEqual(ran.returncode, 1, daemon)
            (line,) = ran.stderr.strip().splitlines()
            self.assertIn("pip install", line)
            self.assertIn("NVX", line)
