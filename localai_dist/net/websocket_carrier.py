"""
One open WebSocket as a carrier, for both ends.

Binary messages only; how the peer cuts frames into messages is invisible. Messages of ours are at most 256 KiB, the
peer's at most 1 MiB + 4 KiB (close 1009 above). All timers are ours; autobahn's own are switched off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from autobahn.twisted.websocket import WebSocketClientProtocol, WebSocketServerProtocol
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime, ISSLTransport
from twisted.python.failure import Failure
from txaio.tx import make_logger

from localai_dist.mux.pacing import LIMIT_MIN
from localai_dist.net.carrier import CarrierUser
from localai_dist.net.errors import DialRefused
from localai_dist.net.sockets import tune, widen
from localai_dist.net.websocket_frames import MESSAGE_MAX, FramedWire

CLOSE_WAIT: Final = 5.0
"""The peer has this long (s) to answer a close; then the connection is dropped."""

CLOSE_UNSUPPORTED: Final = 1003

AT_ONCE: Final = LIMIT_MIN
"""So much is offered to the kernel without waiting for the reactor. A session may always hand over as much, so nothing
was held back behind it that only ``carrier_drained`` would fetch."""

WEBSOCKET_OPTIONS: Final = {
    "maxFramePayloadSize": MESSAGE_MAX,
    "maxMessagePayloadSize": MESSAGE_MAX,
    "openHandshakeTimeout": 0,
    "closeHandshakeTimeout": 0,
    "autoPingInterval": 0,
    "failByDrop": False,
    "echoCloseCodeReason": True,
    "tcpNoDelay": True,
}


class WebSocketCarrier:
    """
    Carries a session over one open WebSocket.

    Attributes:
        pull: see ``Carrier``; False over TLS.
        queue_empty: nothing was written since the transport had sent all of its queue; False while that is not known.
        opened: fires once the upgrade is complete.
    """

    def __init__(self, wire: Any, clock: IReactorTime) -> None:
        self.pull = True
        self.queue_empty = False
        self.opened: Deferred[None] = Deferred()
        self._wire = wire
        self._clock = clock
        self._user: CarrierUser | None = None
        self._early: list[bytes] = []
        self._unsent: list[bytes] = []
        self._gone: Failure | None = None
        self._closing = False
        self._close_call: IDelayedCall | None = None

    # -- the WebSocket calls -----------------------------------------------------------------------------------------

    def wire_opened(self) -> None:
        """The upgrade is complete on this end."""
        tune(self._wire.transport)
        self.pull = not ISSLTransport.providedBy(self._wire.transport)
        if self.pull:
            widen(self._wire.transport)
        self.opened.callback(None)

    def payload_received(self, payload: bytes | memoryview) -> None:
        """A piece of a binary message, valid during the call only."""
        if self._closing:
            return
        if self._user is None:
            self._early.append(bytes(payload))
        elif payload:
            self._user.bytes_received(payload)

    def read_began(self) -> None:
        """What one read brought follows."""
        if self._user is not None:
            self._user.read_began()

    def read_ended(self) -> None:
        """That was all of it."""
        if self._user is not None:
            self._user.read_ended()

    def text_received(self) -> None:
        """A text message: the peer does not speak our protocol."""
        if not self._closing:
            self._lost(ConnectionLost("the peer sent a text message, want binary"))
            self._send_close(CLOSE_UNSUPPORTED, "want binary messages")

    def wire_closing(self) -> None:
        """A close frame was sent, for whatever reason: send nothing more, and don't wait for the peer for ever."""
        self._closing = True
        if self._close_call is None:
            self._close_call = self._clock.callLater(CLOSE_WAIT, self._wire.transport.abortConnection)

    def wire_closed(self, clean: bool, text: str) -> None:
        """The connection is gone; ``text`` has the peer's close code."""
        self._closing = True
        if self._close_call is not None and self._close_call.active():
            self._close_call.cancel()
        self._lost(ConnectionDone(text) if clean else ConnectionLost(text))

    def _lost(self, error: Exception) -> None:
        if self._gone is None:
            self._gone = Failure(error)
            if self._user is not None:
                self._user.carrier_lost(self._gone)

    # -- the session calls -------------------------------------------------------------------------------------------

    def start(self, user: CarrierUser) -> None:
        """Deliver to ``user`` from now on."""
        if self._gone is None:
            # HTTPChannel is still registered when the connection came through a Resource. We are asked at once, while
            # the answer to the upgrade may still be in the queue.
            self._wire.transport.unregisterProducer()
            self._wire.transport.registerProducer(self, not self.pull)
        self._user = user
        early, self._early = self._early, []
        for payload in early:
            user.bytes_received(payload)
        if self._gone is not None:
            user.carrier_lost(self._gone)
        elif self.pull:
            user.carrier_drained()

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send ``parts`` as one binary message, with the next ``flush``."""
        if not self._closing:
            self._unsent.append(self._wire.binary_frame(parts))

    def flush(self) -> bool:
        """
        Give the transport what was sent; whether all of it is with the kernel already.

        Little goes there at once when nothing stands before it: the reactor's way of asking for it, a turn later, costs
        a short request a tenth of its time. A write that fails is left to the reactor, which meets the failure again.
        """
        frames, self._unsent = self._unsent, []
        if not frames or self._closing:
            return False
        transport = self._wire.transport
        usable = transport.connected and not transport.disconnecting
        if self.queue_empty and usable and sum(map(len, frames)) <= AT_ONCE:
            data = b"".join(frames)
            sent = transport.writeSomeData(data)
            if sent == len(data):
                return True
            frames = [data[sent:] if isinstance(sent, int) else data]
        self.queue_empty = False
        for frame in frames:
            transport.write(frame)
        return False

    def close(self, code: int, text: str) -> None:
        """Send what was given, then the close frame; drop the connection if the peer does not follow."""
        self._user = None
        if not self._closing:
            self.flush()
            self._wire.transport.unregisterProducer()
            self._send_close(code, text)

    def abort(self) -> None:
        """Drop the connection now."""
        self._user = None
        self._closing = True
        self._wire.transport.abortConnection()

    def peer_address(self) -> IAddress:
        """The far address."""
        address: IAddress = self._wire.transport.getPeer()
        return address

    def host_address(self) -> IAddress:
        """Our address."""
        address: IAddress = self._wire.transport.getHost()
        return address

    def _send_close(self, code: int, text: str) -> None:
        self._wire.sendCloseFrame(code=code, reasonUtf8=text.encode()[:120].decode(errors="ignore").encode())

    # -- the transport calls -----------------------------------------------------------------------------------------

    def resumeProducing(self) -> None:
        """The transport's queue is empty."""
        if self._user is not None:
            self.queue_empty = self.pull
            self._user.carrier_drained()

    def pauseProducing(self) -> None:
        """The transport's queue is full (push only)."""
        if self._user is not None:
            self._user.carrier_paused()

    def stopProducing(self) -> None:
        """The transport is going; ``wire_closed`` tells."""


class _Wire(FramedWire):
    """What autobahn and the data path call on both ends, passed on."""

    carrier: WebSocketCarrier
    message_is_binary: bool
    # autobahn warns of each connection it drops. Why one ended is told by who has it, in words and with its address.
    log = make_logger(level="error")

    def payload_received(self, payload: bytes | memoryview) -> None:
        self.carrier.payload_received(payload)

    def read_began(self) -> None:
        self.carrier.read_began()

    def read_ended(self) -> None:
        self.carrier.read_ended()

    def onOpen(self) -> None:
        self.carrier.wire_opened()

    def onMessageBegin(self, isBinary: bool) -> None:
        super().onMessageBegin(isBinary)  # type: ignore[misc]
        if not isBinary:
            self.carrier.text_received()

    def onMessageFrame(self, payload: Sequence[bytes]) -> None:
        """A frame autobahn read: passed on at once; it would keep fragments to the message's end."""
        if self.message_is_binary:
            for piece in payload:
                self.carrier.payload_received(piece)

    def sendData(self, *args: Any, **kwargs: Any) -> None:
        """What autobahn itself sends waits in the transport's queue; nothing of ours may overtake it."""
        self.carrier.queue_empty = False
        super().sendData(*args, **kwargs)  # type: ignore[misc]

    def sendCloseFrame(self, *args: Any, **kwargs: Any) -> None:
        super().sendCloseFrame(*args, **kwargs)  # type: ignore[misc]
        self.carrier.wire_closing()

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:
        self.carrier.wire_closed(wasClean, f"WebSocket closed, code {code}" + (f": {reason}" if reason else ""))


class ClientWire(_Wire, WebSocketClientProtocol):  # type: ignore[misc]  # autobahn's own bases disagree
    """The dialling end."""

    masks = True
    refusal: DialRefused | None = None

    def failHandshake(self, reason: str) -> None:
        """autobahn's hook for an answer that is no upgrade; ``dial`` reads the details."""
        self.refusal = _refusal(self)
        super().failHandshake(reason)


class ServerWire(_Wire, WebSocketServerProtocol):  # type: ignore[misc]
    """The accepting end."""

    masks = False


def _refusal(wire: Any) -> DialRefused | None:
    try:
        status = int(wire.http_status_line.split()[1])
    except (AttributeError, IndexError, ValueError):
        return None
    if status == 101:
        return None
    return DialRefused(status, dict(wire.http_headers), f"answered {wire.http_status_line.strip()!r}, not the upgrade")
