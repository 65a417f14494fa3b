"""
Mutated frames against a session: ``python -m tests.mux.fuzz [FRAMES [SEED]]``.

What an honest peer could say is flipped, cut, given odd types, flags, ids and lengths, then fed to a session whose
application opens, reads, writes and ends streams at random. What must hold after each frame: nothing is
raised, whatever the peer is accused of has a name of ours, and what is held stays under the session's bounds.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from twisted.internet import defer
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock

from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import LocalProtocolError, RemoteProtocolError, SessionDead
from localai_dist.mux.frame import HEADER_SIZE, MAX_LENGTH, Flag, FrameType, decode, encode, pack_header
from localai_dist.mux.session import CONTROL_MAX, Session
from localai_dist.mux.window import SPEC_WINDOW
from localai_dist.net.config import SessionConfig
from localai_dist.net.session import MuxSession
from localai_dist.net.stream import MuxStream
from localai_dist.testing.sessions import MemoryCarrier
from localai_dist.units import MiB

CONFIG = SessionConfig(max_streams=24, backlog=8, session_pool=1 * MiB)
IN_SUITE = 100_000
IN_FULL = 1_000_000
ZEROS = bytes(16 * MiB)
ODD_LENGTHS = (0, 1, 11, 12, 255, 256, 65_535, SPEC_WINDOW - 1, SPEC_WINDOW, SPEC_WINDOW + 1, 16 * MiB + 1, MAX_LENGTH)
CHECK_EVERY = 16


class Sink(Protocol):
    """Takes everything and keeps nothing."""


@dataclass
class Report:
    """
    What a run saw.

    Attributes:
        frames: frames fed.
        sessions: sessions begun.
        ends: why sessions ended, by the name of the error.
        unread_most: the most bytes one session held for applications that did not read.
        control_most: the most control frames one session had waiting.
    """

    frames: int = 0
    sessions: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    unread_most: int = 0
    control_most: int = 0


class Peer:
    """Says what an honest peer could, mostly on streams that live; ``mutate`` then spoils it."""

    def __init__(self, chance: random.Random, core: Session, *, client: bool) -> None:
        self._chance = chance
        self._core = core
        self._next_id = 1 if client else 2

    def frame(self) -> bytes:
        """One frame."""
        kind = self._chance.choices(("data", "syn", "credit", "flag", "session"), (8, 3, 2, 2, 1))[0]
        if kind == "syn" or not self._core.streams:
            self._next_id += 2
            return encode(FrameType.WINDOW_UPDATE, Flag.SYN, self._next_id - 2, self._chance.choice((0, 1 * MiB)))
        stream_id = self._chance.choice(list(self._core.streams))
        if kind == "data":
            size = self._chance.choice((0, 1, 100, 5000, 60_000))
            return (
                encode(FrameType.DATA, self._chance.choice((Flag.NONE, Flag.ACK, Flag.FIN)), stream_id, size)
                + (ZEROS[:size])
            )
        if kind == "credit":
            return encode(FrameType.WINDOW_UPDATE, Flag.NONE, stream_id, self._chance.randrange(100_000))
        if kind == "flag":
            return encode(FrameType.WINDOW_UPDATE, self._chance.choice((Flag.ACK, Flag.FIN, Flag.RST)), stream_id, 0)
        if self._chance.random() < 0.02:
            return encode(FrameType.GO_AWAY, Flag.NONE, 0, self._chance.randrange(4))
        return encode(FrameType.PING, self._chance.choice((Flag.SYN, Flag.ACK)), 0, self._chance.randrange(20))


def mutate(frame: bytes, chance: random.Random) -> bytes:
    """One frame made a little or very wrong; sometimes left as it was."""
    kind = chance.choices(range(6), (50, 4, 2, 15, 15, 15))[0]
    if kind == 0:
        return frame
    if kind == 1:
        at = chance.randrange(min(len(frame), 40))
        return frame[:at] + bytes([frame[at] ^ (1 << chance.randrange(8))]) + frame[at + 1 :]
    if kind == 2:
        return frame[: chance.randrange(len(frame))]
    version, type_, flags, stream_id, length = decode(frame)
    if kind == 3:
        # Most odd ids end the session, so they are rarer than odd flags and lengths.
        stream_id = chance.choice((stream_id, stream_id - 2, 0)) if chance.random() < 0.15 else stream_id
        type_ = chance.randrange(2) if chance.random() < 0.97 else chance.randrange(256)
    elif kind == 4:
        odd = chance.choice((0, 2, 4, 8, 6, 12, 10, 14)) | flags & Flag.SYN
        flags = odd if chance.random() < 0.95 else chance.randrange(65_536)
    else:
        length = chance.choice(ODD_LENGTHS) if chance.random() < 0.3 else chance.randrange(2000)
    payload = frame[HEADER_SIZE:]
    if chance.random() < 0.95:  # else what follows is read out of step, which soon ends the session
        payload = ZEROS[:length] if type_ == FrameType.DATA and length <= 16 * MiB else b""
    return pack_header(version, type_, flags, stream_id & MAX_LENGTH, length) + payload


class Target:
    """One session under attack, and its careless application."""

    def __init__(self, chance: random.Random, *, client: bool) -> None:
        self._chance = chance
        self._clock = Clock()
        self._carrier = MemoryCarrier()
        self._streams: list[MuxStream] = []
        self.session = MuxSession(self._carrier, client=client, config=CONFIG, clock=self._clock)
        self.session.on_stream = self._arrived
        self.session.begin()
        self._peer = Peer(chance, self.session.core, client=not client)

    def attack(self) -> None:
        """The peer sends one frame; then the application does something."""
        self.feed(mutate(self._peer.frame(), self._chance))
        self.act()

    def feed(self, data: bytes) -> None:
        """Hand over what the peer sent, cut somewhere."""
        at = self._chance.randrange(len(data) + 1)
        self.session.bytes_received(data[:at])
        self.session.bytes_received(data[at:])
        left = self.session.core._payload_left
        if left and self.session.is_open and self._chance.random() < 0.9:
            # A payload nobody will send would swallow all frames to come.
            self.session.bytes_received(ZEROS[:left])

    def act(self) -> None:
        """The application does something; the transport takes what there is."""
        for action in (self._open, self._write, self._turn, self._end, self._read):
            if self._chance.random() < 0.1:
                action()
        self._clock.advance(0.001)
        self._carrier.outbox.clear()
        if self._carrier.user is not None:
            self._carrier.user.carrier_drained()

    def check(self, report: Report) -> None:
        """The bounds and the books."""
        core = self.session.core
        core.check()
        unread = sum(stream._unread_size for stream in self._streams if stream.session.is_open)
        report.unread_most = max(report.unread_most, unread)
        report.control_most = max(report.control_most, len(core.sender.control))
        assert unread <= len(core.streams) * SPEC_WINDOW + CONFIG.session_pool, unread
        assert len(core.sender.control) <= CONTROL_MAX
        assert core.opened_there <= CONFIG.max_streams and core.opened_here <= CONFIG.max_streams
        assert len(core._partial) < HEADER_SIZE

    def ending(self) -> str:
        """Why the session ended, by the name of the error that must be one of ours."""
        ends: list[Any] = []
        self.session.when_closed().addCallback(ends.append)
        error = ends[0].value
        assert isinstance(error, SessionDead), error
        cause = error.__cause__ or error
        assert isinstance(cause, RemoteProtocolError | SessionDead), cause
        assert self.session.stream_count == 0
        return type(cause).__name__

    def finish(self) -> None:
        """End what still lives; nothing may be left on the clock."""
        self.session.abort(SessionDead("the run is over"))
        self._clock.advance(0)
        assert self._clock.getDelayedCalls() == [], self._clock.getDelayedCalls()

    # -- the application -------------------------------------------------------------------------------------------

    def _arrived(self, stream: MuxStream) -> None:
        self._keep(stream)
        dice = self._chance.random()
        if dice < 0.6:
            stream.start(Sink())
        elif dice < 0.8:
            stream.accept()
        elif dice < 0.9:
            stream.abortConnection()

    def _keep(self, stream: MuxStream) -> None:
        self._streams = [kept for kept in self._streams if kept.is_live or kept._unread_size]
        self._streams.append(stream)

    def _open(self) -> None:
        opening = self.session.open(self._chance.choice(list(TrafficClass)))
        opening.addCallbacks(self._opened, lambda failure: failure.trap(LocalProtocolError, SessionDead))

    def _opened(self, stream: MuxStream) -> None:
        self._keep(stream)
        stream.start(Sink())

    def _write(self) -> None:
        if self._streams:
            self._chance.choice(self._streams).write(ZEROS[: self._chance.randrange(5000)])

    def _turn(self) -> None:
        if self._streams:
            stream = self._chance.choice(self._streams)
            self._chance.choice((stream.pauseProducing, stream.resumeProducing))()
            if self.session.is_open and stream.is_live:
                stream.traffic = self._chance.choice(list(TrafficClass))

    def _end(self) -> None:
        if self._streams:
            stream = self._chance.choice(self._streams)
            self._chance.choice((stream.loseConnection, stream.loseWriteConnection, stream.abortConnection))()

    def _read(self) -> None:
        for stream in self._streams:
            if stream.protocol is None and stream._reader is None:
                stream.read_exactly(self._chance.randrange(1, 300)).addErrback(lambda failure: None)
                return


def run(frames: int, seed: int) -> Report:
    """Feed ``frames`` mutated frames; raises ``AssertionError``, or whatever escaped, when something is wrong."""
    debugging = defer.getDebugging()
    defer.setDebugging(False)  # it would keep a traceback per Deferred
    try:
        return _run(frames, random.Random(seed))
    finally:
        defer.setDebugging(debugging)


def _run(frames: int, chance: random.Random) -> Report:
    report = Report()
    target: Target | None = None
    while report.frames < frames:
        if target is None:
            target = Target(chance, client=chance.random() < 0.5)
            report.sessions += 1
        target.attack()
        report.frames += 1
        if not target.session.is_open:
            report.ends[target.ending()] += 1
            target.finish()
            target = None
        elif report.frames % CHECK_EVERY == 0:
            target.check(report)
    if target is not None:
        target.finish()
    return report


def main(arguments: list[str]) -> int:
    """Run from the command line; the seed is printed, so that a find can be repeated."""
    frames = int(arguments[0]) if arguments else IN_FULL
    seed = int(arguments[1]) if len(arguments) > 1 else random.SystemRandom().randrange(2**32)
    print(f"{frames} mutated frames, seed {seed} (repeat: python -m tests.mux.fuzz {frames} {seed})", flush=True)
    began = time.monotonic()
    report = run(frames, seed)
    print(f"{report.frames} frames, {report.sessions} sessions in {time.monotonic() - began:.0f} s; they ended with:")
    for name, count in report.ends.most_common():
        print(f"  {name}: {count}")
    print(f"held at most {report.unread_most} unread bytes and {report.control_most} control frames in one session")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
