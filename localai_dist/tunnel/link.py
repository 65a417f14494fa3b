"""
The lifecycle of a worker's tunnel, as a machine.

Make before break: a tunnel whose frontend says go-away stays in use while the next one is dialled (``replacing``), and
while a failed round is waited out (``lingering``); its running streams end by themselves.

::

    resting ─start─▶ dialling ─dialled─▶ up ─told_to_go─▶ lingering ─retry─▶ replacing ─dialled─▶ up
                      │    ▲             │                 │    ▲               │ │
            round_failed  retry         lost              lost  └─round_failed──┘ └─lost─▶ dialling
                      ▼    │             ▼                 ▼
                     waiting ◀───────────┴─────────────────┘          stop: from anywhere to stopped
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from automat import TypeMachineBuilder, pep614
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.backoff import Backoff
from localai_dist.errors import LocalAIDistError
from localai_dist.mux.errors import KeepaliveTimeout
from localai_dist.net.errors import DialRefused, NetError
from localai_dist.net.session import MuxSession, SessionEnd
from localai_dist.tunnel.urls import Rotation

SETTLED: Final = 30.0
"""A session this long (s) resets the count of failed attempts. Source: design §7."""
BRIEF: Final = 2.0
"""A frontend that sends us on after less than this (s) is suspected of a loop, like two workers with one identity."""


class NoCredential(LocalAIDistError):
    """The node is not registered yet, so there is nothing to present: no dial is made."""


class RoundFailed(LocalAIDistError):
    """
    No frontend gave a tunnel; each refusal was logged, and the text is the last one's.

    Attributes:
        not_before: seconds that every one of them asked us to stay away, the least of it; 0 if one did not ask.
    """

    def __init__(self, text: str, not_before: float = 0.0) -> None:
        super().__init__(text)
        self.not_before: Final = not_before


class Link(Protocol):
    """The machine's inputs."""

    def start(self) -> None:
        """Open a tunnel and keep one open."""

    def stop(self) -> None:
        """Close every tunnel and open none."""

    def dialled(self, session: MuxSession) -> None:
        """A frontend admitted this node."""

    def round_failed(self) -> None:
        """No frontend did."""

    def told_to_go(self) -> None:
        """The frontend of the current tunnel said go-away, or has lost the registry."""

    def lost(self) -> None:
        """The current tunnel ended."""

    def retry(self) -> None:
        """The wait is over, or somebody knows that another try is worth it."""


@dataclass(slots=True)
class Core:
    """
    What the machine acts on.

    Attributes:
        dial: one frontend's URL -> a session; raises NetError or NoCredential.
        on_change: called after ``current`` changed.
        attempts: failed rounds and short sessions in a row.
        current: the tunnel new streams come on.
        leaving: the tunnel that was told to go last, so that it counts once.
        retiring: tunnels that were told to go and still carry streams.
    """

    clock: IReactorTime
    rotation: Rotation
    backoff: Backoff
    chance: Callable[[], float]
    dial: Callable[[str], Awaitable[MuxSession]]
    on_change: Callable[[str], None]
    attempts: int = 0
    at_once: bool = False
    not_before: float = 0.0
    current: MuxSession | None = None
    leaving: MuxSession | None = None
    retiring: set[MuxSession] = field(default_factory=set)
    round: Deferred[MuxSession] | None = None
    waiting: IDelayedCall | None = None
    log: Logger = field(default_factory=lambda: Logger(namespace="localai_dist.tunnel.link"))

    def begin_round(self, link: Link) -> None:
        """Try every frontend once."""
        self.end_wait()
        dialling = self.round = Deferred.fromCoroutine(self._try_each())
        dialling.addCallbacks(
            self._dialled, self._round_failed, callbackArgs=(link, dialling), errbackArgs=(link, dialling)
        )

    def begin_wait(self, link: Link) -> None:
        """Wait for the next round: not at all after a go-away, else as the backoff says."""
        delay = 0.0 if self.at_once else self.backoff.delay(self.attempts, self.chance())
        if self.not_before:  # as asked, and spread like any other wait
            delay = min(self.backoff.cap, self.not_before + delay)
        self.at_once, self.not_before = False, 0.0
        self.waiting = self.clock.callLater(delay, self._wait_over, link)
        if delay:
            self.log.debug("next try to open the tunnel in {delay:.1f} s", delay=delay, attempt=self.attempts)

    def adopt(self, link: Link, session: MuxSession) -> None:
        """``session`` is the tunnel now; the one before retires."""
        previous, self.current = self.current, session
        session.on_go_away = lambda: self.leave(link, session, "the frontend says go-away")
        self.on_change("connected")
        session.when_closed().addCallback(self._closed, link, session)
        if previous is not None:
            self._retire(previous)  # it may end at once, and must not count as the current one's end

    def _retire(self, session: MuxSession) -> None:
        """Let ``session`` finish its streams; its frontend opens no more on it."""
        self.retiring.add(session)
        session.on_idle = session.close
        if not session.stream_count:
            session.close()

    def halt(self) -> None:
        """No round, no wait, and every session closing."""
        self.end_wait()
        dialling, self.round = self.round, None
        if dialling is not None:
            dialling.cancel()
        for session in [*self.retiring, *([self.current] if self.current is not None else [])]:
            session.close()

    def end_wait(self) -> None:
        """Forget the timer."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None and waiting.active():
            waiting.cancel()

    async def _try_each(self) -> MuxSession:
        last, asked = "no frontend URL", []
        for url in self.rotation.order():
            try:
                session = await self.dial(url)
            except NetError as error:
                last = str(error)
                asked.append(asked_to_wait(error))
                continue
            self.rotation.worked(url)
            return session
        raise RoundFailed(last, min(asked, default=0.0))

    def _dialled(self, session: MuxSession, link: Link, dialling: Deferred[MuxSession]) -> None:
        if self.round is not dialling:  # halted while the answer was under way
            session.close()
            return
        self.round = None
        link.dialled(session)

    def _round_failed(self, failure: Failure, link: Link, dialling: Deferred[MuxSession]) -> None:
        if self.round is not dialling:
            return
        self.round = None
        self.attempts += 1
        self.not_before = failure.value.not_before if isinstance(failure.value, RoundFailed) else 0.0
        if failure.check(RoundFailed, NoCredential) is None:
            self.log.failure("dialling failed in an unforeseen way", failure)
        self.on_change(failure.getErrorMessage())
        link.round_failed()

    def _wait_over(self, link: Link) -> None:
        self.waiting = None
        link.retry()

    def leave(self, link: Link, session: MuxSession, why: str) -> None:
        """Open the next tunnel in place of ``session``, which goes on until then; nothing if it is being left."""
        if session is not self.current or session is self.leaving:
            return
        self.leaving = session
        self.log.info("{why}, opening the next tunnel", why=why)
        self._count(session)
        # At once, also at the tenth frontend of a rolling restart; unless they send us on as soon as we come, which
        # must not become a busy loop.
        brief = self.clock.seconds() - session.opened_at < BRIEF
        self.at_once = not brief or self.attempts <= len(self.rotation)
        self.rotation.skip()
        link.told_to_go()

    def _closed(self, reason: SessionEnd, link: Link, session: MuxSession) -> None:
        self.retiring.discard(session)
        if session is not self.current:
            return
        held = self.clock.seconds() - session.opened_at
        self.log.info("the tunnel ended after {held:.1f} s: {reason}", held=held, reason=reason.getErrorMessage())
        self.current = None
        self._count(session)
        if reason.check(KeepaliveTimeout) is not None:  # a silent frontend would cost the whole dial timeout
            self.rotation.skip()
        self.on_change(reason.getErrorMessage())
        link.lost()

    def _count(self, session: MuxSession) -> None:
        settled = self.clock.seconds() - session.opened_at >= SETTLED
        self.attempts = 1 if settled else self.attempts + 1


def asked_to_wait(error: NetError) -> float:
    """The seconds of a refusal's Retry-After, 0 for none (or a date, which would need both clocks to be right)."""
    text = error.headers.get("retry-after", "").strip() if isinstance(error, DialRefused) else ""
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0.0


def _machine() -> Callable[[Core], Link]:
    machine = TypeMachineBuilder(Link, Core)
    resting, dialling, waiting, up = map(machine.state, ("resting", "dialling", "waiting", "up"))
    lingering, replacing, stopped = map(machine.state, ("lingering", "replacing", "stopped"))

    @pep614(resting.upon(Link.start).to(dialling))
    @pep614(stopped.upon(Link.start).to(dialling))
    @pep614(waiting.upon(Link.retry).to(dialling))
    @pep614(lingering.upon(Link.retry).to(replacing))
    def begin_round(link: Link, core: Core) -> None:
        core.begin_round(link)

    @pep614(dialling.upon(Link.round_failed).to(waiting))
    @pep614(replacing.upon(Link.round_failed).to(lingering))
    @pep614(up.upon(Link.lost).to(waiting))
    @pep614(up.upon(Link.told_to_go).to(lingering))
    def begin_wait(link: Link, core: Core) -> None:
        core.begin_wait(link)

    @pep614(dialling.upon(Link.dialled).to(up))
    @pep614(replacing.upon(Link.dialled).to(up))
    def adopt(link: Link, core: Core, session: MuxSession) -> None:
        core.adopt(link, session)

    lingering.upon(Link.lost).to(waiting).returns(None)  # the timer goes on
    replacing.upon(Link.lost).to(dialling).returns(None)  # so does the round

    for state in (resting, dialling, waiting, up, lingering, replacing):

        @pep614(state.upon(Link.stop).to(stopped))
        def halt(link: Link, core: Core) -> None:
            core.halt()

    _changes_nothing(Link.stop, stopped)
    _changes_nothing(Link.lost, stopped)
    _changes_nothing(Link.told_to_go, lingering, replacing, stopped)
    _changes_nothing(Link.start, dialling, waiting, up, lingering, replacing)
    _changes_nothing(Link.retry, resting, dialling, up, replacing, stopped)
    return machine.build()


def _changes_nothing(said: Callable[[Link], None], *states: Any) -> None:
    for state in states:
        state.upon(said).loop().returns(None)


make_link: Final = _machine()
