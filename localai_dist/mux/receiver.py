"""The receive half of a session: frames to events, partial frames delivered as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localai_dist.mux.classes import BULK, INFERENCE, TrafficClass
from localai_dist.mux.errors import (
    BadFrameType,
    BadStreamId,
    BadVersion,
    FrameTooLong,
    RemoteProtocolError,
    SessionDead,
    StreamViolation,
)
from localai_dist.mux.events import (
    DataReceived,
    Event,
    GoAwayReceived,
    PongReceived,
    SessionFailed,
    StreamAccepted,
    StreamCut,
    StreamFinished,
    StreamOpened,
)
from localai_dist.mux.frame import HEADER_SIZE, VERSION, Flag, FrameType, GoAway, encode, unpack_header
from localai_dist.mux.stream import (
    RECV_CREDIT,
    RECV_DATA,
    RECV_FIN,
    RECV_RST,
    REMOTE_CLOSED,
    RESET,
    SEND_RST,
    IllegalInput,
    Stream,
)
from localai_dist.mux.window import WindowPool

if TYPE_CHECKING:
    from localai_dist.mux.limits import Limits
    from localai_dist.mux.sender import Sender

_DATA, _WINDOW_UPDATE, _PING, _GO_AWAY = map(int, FrameType)
_KNOWN_FLAGS = int(Flag.SYN | Flag.ACK | Flag.FIN | Flag.RST)
_SYN, _ACK, _FIN, _RST = int(Flag.SYN), int(Flag.ACK), int(Flag.FIN), int(Flag.RST)


class Receiver:
    """What ``Session`` does with received bytes; not used by itself."""

    limits: Limits
    sender: Sender
    pool: WindowPool
    unacked: int
    go_away_sent: GoAway | None

    def __init__(self, *, client: bool) -> None:
        self.streams: dict[int, Stream] = {}
        self.opened_here = 0
        self.opened_there = 0
        self.go_away_received = False
        self.failed = False
        self._next_id = 1 if client else 2
        self._peer_parity = 0 if client else 1
        self._highest_peer_id = 0
        self._owed: dict[int, Stream] = {}
        self._withheld: dict[int, Stream] = {}
        self._partial = b""
        self._payload_left = 0
        self._payload_of: Stream | None = None
        self._fin_after_payload = 0
        self._events: list[Event] = []

    def receive(self, data: bytes | memoryview, now: float) -> list[Event]:
        """What ``data`` from the peer means, of which nothing is kept; nothing more once the session failed."""
        if self.failed:
            return []
        events = self._events = []
        try:
            self._parse(data, now)
        except RemoteProtocolError as error:
            self.failed = True
            events.append(SessionFailed(error, error.go_away))
        return events

    def _parse(self, data: bytes | memoryview, now: float) -> None:
        if self._partial:
            data, self._partial = self._partial + data, b""
        position, end = 0, len(data)
        while position < end and not self.failed:
            if self._payload_left:
                position += self._take_payload(data, position, end)
            elif end - position < HEADER_SIZE:
                self._partial = bytes(data[position:])
                return
            else:
                version, type_, flags, stream_id, length = unpack_header(data, position)
                position += HEADER_SIZE
                self._on_header(version, type_, flags, stream_id, length, now)

    def _take_payload(self, data: bytes | memoryview, position: int, end: int) -> int:
        count = min(self._payload_left, end - position)
        self._payload_left -= count
        stream = self._payload_of
        if stream is not None and stream.state is not RESET:
            chunk = bytes(data if count == len(data) else data[position : position + count])
            self._events.append(DataReceived(stream, chunk))
        if not self._payload_left:
            self._payload_of = None
            if stream is not None and self._fin_after_payload:
                self._on_endings(stream, self._fin_after_payload)
            self._fin_after_payload = 0
        return count

    def _on_header(self, version: int, type_: int, flags: int, stream_id: int, length: int, now: float) -> None:
        if version != VERSION:
            raise BadVersion(f"frame of version {version}, want {VERSION}")
        if flags & ~_KNOWN_FLAGS:
            raise BadFrameType(f"unknown flags {flags:#x}")
        if type_ <= _WINDOW_UPDATE:
            self._on_stream_frame(type_ == _DATA, flags, stream_id, length)
        elif stream_id:
            raise BadStreamId(f"a session frame on stream {stream_id}")
        elif type_ == _PING:
            self._on_ping(flags, length, now)
        elif type_ == _GO_AWAY:
            self._on_go_away(length)
        else:
            raise BadFrameType(f"unknown frame type {type_}")

    # -- stream frames ---------------------------------------------------------------------------------------------

    def _on_stream_frame(self, is_data: bool, flags: int, stream_id: int, length: int) -> None:
        if not stream_id:
            raise BadStreamId("a stream frame on stream 0")
        if is_data and length > self.limits.max_window:
            raise FrameTooLong(f"a data frame of {length} bytes; no window is larger than {self.limits.max_window}")
        stream = self._on_syn(stream_id) if flags & _SYN else self._known(stream_id)
        if is_data:
            self._payload_left, self._payload_of, self._fin_after_payload = length, stream, 0
        if stream is None:
            return  # of a stream already gone: ignored, its payload discarded by length
        if flags & _ACK:
            self._on_ack(stream)
        if is_data and length:
            self._charge(stream, length)
            self._fin_after_payload = flags & (_FIN | _RST)
        else:
            if length:
                self._on_credit(stream, length)
            self._on_endings(stream, flags)

    def _known(self, stream_id: int) -> Stream | None:
        stream = self.streams.get(stream_id)
        if stream is None:
            theirs = stream_id % 2 == self._peer_parity
            if stream_id > self._highest_peer_id if theirs else stream_id >= self._next_id:
                raise BadStreamId(f"a frame on stream {stream_id}, which was never opened")
        return stream

    def _on_syn(self, stream_id: int) -> Stream | None:
        if stream_id % 2 != self._peer_parity:
            raise BadStreamId(f"the peer opened stream {stream_id}, an id of ours")
        if stream_id in self.streams:
            raise BadStreamId(f"the peer opened stream {stream_id} twice")
        self._highest_peer_id = max(self._highest_peer_id, stream_id)
        if self.go_away_sent is not None or self.opened_there >= self.limits.max_streams:
            self._control(FrameType.WINDOW_UPDATE, Flag.RST, stream_id, 0)
            return None
        stream = self._new_stream(stream_id, local=False, traffic=INFERENCE)
        self.opened_there += 1
        self._events.append(StreamOpened(stream))
        return stream

    def _on_ack(self, stream: Stream) -> None:
        if stream.local and not stream.acked:
            stream.acked = True
            self.unacked -= 1
            self._events.append(StreamAccepted(stream))
            self.sender.wake(stream)

    def _charge(self, stream: Stream, length: int) -> None:
        """Judge a data frame by its header: its payload is discarded when the stream has to be cut."""
        try:
            stream.apply(RECV_DATA)
            if stream.state is not RESET:
                stream.receive_window.received(length)
        except IllegalInput as error:
            self._cut_for(stream, StreamViolation(str(error)))
        except StreamViolation as error:
            self._cut_for(stream, error)

    def _cut_for(self, stream: Stream, violation: StreamViolation) -> None:
        self._payload_of = None  # what it announced was not charged to its window
        if stream.over:
            return  # closed both ways and only kept for its unread bytes, which are whole
        after_fin = stream.state is REMOTE_CLOSED
        stream.apply(SEND_RST)
        self._control(FrameType.WINDOW_UPDATE, Flag.RST, stream.id, 0)
        self._settle_cut(stream)
        self._events.append(StreamCut(stream, violation, after_fin))

    def _on_credit(self, stream: Stream, count: int) -> None:
        stream.apply(RECV_CREDIT)
        stream.send_window.granted(count)
        if stream.traffic is BULK:
            self.sender.delay.bulk_credited(count)
        self.sender.wake(stream)

    def _on_endings(self, stream: Stream, flags: int) -> None:
        if flags & _RST:
            if stream.over:
                return
            after_fin = stream.state is REMOTE_CLOSED
            stream.apply(RECV_RST)
            self._settle_cut(stream)
            self._events.append(StreamCut(stream, None, after_fin))
        elif flags & _FIN and stream.readable:
            stream.apply(RECV_FIN)
            self._events.append(StreamFinished(stream))
            self._retire(stream)

    # -- session frames --------------------------------------------------------------------------------------------

    def _on_ping(self, flags: int, value: int, now: float) -> None:
        if flags & _SYN:
            self._control(FrameType.PING, Flag.ACK, 0, value)
        elif flags & _ACK:
            round_trip = self.sender.delay.pong_received(value, now, self.sender.limit.frame_time)
            if round_trip is not None:
                if self.sender.delay.rate:
                    self.sender.limit.arriving(self.sender.delay.rate)
                self._events.append(PongReceived(round_trip))

    def _on_go_away(self, code: int) -> None:
        if code == GoAway.NORMAL:
            if not self.go_away_received:
                self.go_away_received = True
                self._events.append(GoAwayReceived())
            return
        self.failed = True
        why = {1: "a protocol error", 2: "an internal error"}.get(code, f"an unknown reason ({code})")
        self._events.append(SessionFailed(SessionDead(f"the peer ended the session because of {why}"), None))

    # -- shared with Session ---------------------------------------------------------------------------------------

    def _new_stream(self, stream_id: int, *, local: bool, traffic: TrafficClass) -> Stream:
        stream = Stream(stream_id, local=local, traffic=traffic, pool=self.pool, maximum=self.limits.max_window)
        self.streams[stream_id] = stream
        return stream

    def _control(self, type_: FrameType, flags: Flag, stream_id: int, length: int) -> None:
        self.sender.control.append(encode(type_, flags, stream_id, length))

    def _settle_cut(self, stream: Stream) -> None:
        """Take a stream that was just reset out of the line; what is on its way here will be discarded."""
        if self._payload_of is stream:
            self._payload_of = None
            stream.receive_window.unread -= self._payload_left
        stream.drop_queue()
        self.sender.forget(stream)
        self._owed.pop(stream.id, None)
        self._retire(stream)

    def _retire(self, stream: Stream) -> None:
        """Forget a stream that is over and fully read; until then it counts against the bounds."""
        if not stream.over or stream.receive_window.unread or stream.id not in self.streams:
            return
        del self.streams[stream.id]
        self._owed.pop(stream.id, None)
        stream.receive_window.release()
        if stream.local:
            self.opened_here -= 1
            if not stream.acked:
                stream.acked = True
                self.unacked -= 1
        else:
            self.opened_there -= 1
