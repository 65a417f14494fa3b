"""
One backend process as a child: started under the guard, watched until it serves, ended until it is really gone.

Gone means: the guard was reaped and nobody of its process group is left. Until then key and port stay reserved.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.error import ConnectError, ConnectionClosed, ProcessDone
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.errors import LocalAIDistError
from localai_dist.ids import ProcessKey
from localai_dist.worker import groups
from localai_dist.worker.errors import StartFailed, StillRunning
from localai_dist.worker.lifecycle import Input, State, step
from localai_dist.worker.logs import LineCutter
from localai_dist.worker.ports import LOOPBACK
from localai_dist.worker.timing import after, bounded

HEALTH_EVERY = 0.2
"""Seconds between two asks for Health. Source: design §7."""
HEALTH_ASK = 2.0
"""Seconds one ask for Health may take. Source: surface §4.4."""
HEALTH_WITHIN = 60.0
"""Seconds a backend may take to answer Health. Source: design §7."""
FREE_WITHIN = 5.0
"""Seconds for Free before the process is ended anyway. Source: surface §5.4."""
TERM_WITHIN = 2.0
"""Seconds between SIGTERM and SIGKILL; with Free and the last wait it stays below model.stop's budget of 10 s."""
KILL_WITHIN = 2.0
"""Seconds for the kernel to end a killed group."""
LAST_WORDS = 20
"""Lines of stderr in the text of a failed start. Source: surface §4.4."""

_GUARD = str(Path(__file__).with_name("guard.py"))
_ASK_FAILURES = (LocalAIDistError, ConnectError, ConnectionClosed, OSError)
_log = Logger()


class Backend(Protocol):
    """What a process is asked over gRPC (``grpcclient.BackendChannel`` is one)."""

    async def health(self, timeout: float = 2.0) -> bool:
        """Whether it serves."""

    async def free(self, timeout: float = 5.0) -> Any:
        """Give memory back; the answer has ``success`` and ``message``."""

    def close(self) -> None:
        """End the connection."""


Connect = Callable[[int, str], Awaitable[Backend]]
"""Port and token -> a connected backend; raises if there is nobody."""


@dataclass(frozen=True, slots=True)
class Launch:
    """
    What to start.

    Attributes:
        key: which replica of which model.
        backend: the installed backend's name.
        folder: its directory; ``run.sh`` is in it.
        folder_id: device and inode of the directory, so that a reinstall is noticed.
        port: on 127.0.0.1.
        token: what it will want as gRPC bearer.
        environment: everything it will see.
    """

    key: ProcessKey
    backend: str
    folder: Path
    folder_id: tuple[int, int]
    port: int
    token: str = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)

    @property
    def address(self) -> str:
        """``127.0.0.1:port``."""
        return f"{LOOPBACK}:{self.port}"


LineSink = Callable[[ProcessKey, str, str], None]
"""Key, stream (``stdout`` or ``stderr``), text."""


class BackendProcess(ProcessProtocol):
    """
    One child.

    Args:
        launch: what it runs.
        reactor: spawns it, and is the clock.
        connect: how to ask it something.
        line: gets every line it writes.

    Attributes:
        launch: as given.
        state: see ``lifecycle``.
        ended_with: how the guard ended, in words, once it did.
    """

    def __init__(self, launch: Launch, *, reactor: Any, connect: Connect, line: LineSink) -> None:
        self.launch = launch
        self.state = State.STARTING
        self.ended_with = ""
        self._reactor = reactor
        self._connect = connect
        self._line = line
        self._cutters = {1: LineCutter(), 2: LineCutter()}
        self._waiting: list[Deferred[None]] = []
        self._ending = False
        self._enders: list[Deferred[bool]] = []
        self._pid: int | None = None

    @property
    def pid(self) -> int | None:
        """The guard's process id, which is also the process group; None before the start."""
        return self._pid

    def spawn(self) -> None:
        """
        Start it.

        Raises:
            OSError: no process could be started.
        """
        python = sys.executable
        command = [python, "-I", "-S", _GUARD, str(self.launch.folder / "run.sh"), "--addr", self.launch.address]
        transport = self._reactor.spawnProcess(
            self, python, command, env=dict(self.launch.environment), path=str(self.launch.folder)
        )
        self._pid = transport.pid

    def when_gone(self) -> Deferred[None]:
        """Fires once, when the process and its whole group are gone; at once if they are. Each call its own."""
        waiter: Deferred[None] = Deferred(lambda cancelled: self._waiting.remove(cancelled))
        if self.state is State.GONE:
            waiter.callback(None)
        else:
            self._waiting.append(waiter)
        return waiter

    async def until_healthy(self) -> None:
        """
        Wait until it answers Health. Cancelling stops the waiting, not the process.

        Raises:
            StartFailed: it ended, was told to end, or took longer than ``HEALTH_WITHIN``.
        """
        give_up_at = self._reactor.seconds() + HEALTH_WITHIN
        while self._starting():
            if await self._healthy() and self._starting():
                self._step(Input.CAME_UP)
                return
            if self._reactor.seconds() >= give_up_at:
                raise StartFailed(f"{self._name()} did not answer Health within {HEALTH_WITHIN:.0f} s")
            await self._pause(HEALTH_EVERY)
        raise StartFailed(f"{self._name()} {self.ended_with or 'was stopped'} before it answered Health")

    async def free(self) -> str:
        """
        Ask it to give its memory back, within ``FREE_WITHIN``.

        Returns:
            Why it did not, or an empty text.
        """
        try:
            return await bounded(self._free(), FREE_WITHIN, self._reactor, f"Free took longer than {FREE_WITHIN:.0f} s")
        except _ASK_FAILURES as error:
            return str(error) or type(error).__name__

    async def end(self, *, force: bool = False) -> bool:
        """
        End it and wait until it is really gone; concurrent callers share one attempt.

        Args:
            force: don't ask it to free its memory first.

        Returns:
            Whether Free succeeded.

        Raises:
            StillRunning: it survived SIGKILL; it keeps its key and its port.
        """
        waiter: Deferred[bool] = Deferred(lambda cancelled: self._enders.remove(cancelled))
        self._enders.append(waiter)
        if not self._ending:
            self._ending = True
            Deferred.fromCoroutine(self._end(force)).addBoth(self._end_over)
        return await waiter

    def outReceived(self, data: bytes) -> None:
        """Lines of stdout."""
        self._wrote(1, data)

    def errReceived(self, data: bytes) -> None:
        """Lines of stderr."""
        self._wrote(2, data)

    def processExited(self, reason: Failure) -> None:
        """The guard was reaped; its pipes may be held open by somebody who left the group."""
        closing = self._reactor.callLater(1.0, self._close_pipes)
        self._closing = closing

    def processEnded(self, reason: Failure) -> None:
        """The guard was reaped and its pipes are closed: kill what is left of the group, and wait for that."""
        if self._closing.active():
            self._closing.cancel()
        for number, cutter in self._cutters.items():
            for text in cutter.finish():
                self._line(self.launch.key, _STREAMS[number], text)
        self.ended_with = _in_words(reason)
        _log.info("{process} ended: {how}", process=self._name(), how=self.ended_with)
        self._until_group_gone()

    def _until_group_gone(self) -> None:
        if self._pid is not None and groups.members(self._pid):
            groups.signal_group(self._pid, signal.SIGKILL)
            self._reactor.callLater(0.05, self._until_group_gone)
            return
        self._step(Input.ENDED)
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.callback(None)

    async def _end(self, force: bool) -> bool:
        was_serving = self.state is State.SERVING
        self._step(Input.TOLD_TO_END)
        freed = False
        if was_serving and not force:
            trouble = await self.free()
            freed = not trouble
            if trouble:
                _log.warn("{process} did not free its memory: {trouble}", process=self._name(), trouble=trouble)
        for number, patience in ((signal.SIGTERM, TERM_WITHIN), (signal.SIGKILL, KILL_WITHIN)):
            if self.state is State.GONE:
                return freed
            if self._pid is not None:
                groups.signal_group(self._pid, number)
            await self._gone_within(patience)
        if self.state is State.GONE:
            return freed
        self._step(Input.SURVIVED)
        raise StillRunning(f"{self._name()} (process group {self._pid}) survived SIGKILL for {KILL_WITHIN:.0f} s")

    async def _gone_within(self, patience: float) -> None:
        gone = self.when_gone()
        late = after(self._reactor, patience)
        await DeferredList([gone, late], fireOnOneCallback=True, consumeErrors=True)
        for one in (gone, late):
            if not one.called:
                one.addErrback(lambda _cancelled: None)
                one.cancel()

    def _end_over(self, result: Any) -> None:
        self._ending = False
        enders, self._enders = self._enders, []
        for waiter in enders:
            waiter.callback(result)

    async def _healthy(self) -> bool:
        try:
            return await bounded(self._ask_health(), 2 * HEALTH_ASK, self._reactor, "Health took too long")
        except _ASK_FAILURES as error:
            _log.debug("{process} is not there yet: {error}", process=self._name(), error=error)
            return False

    async def _ask_health(self) -> bool:
        backend = await self._connect(self.launch.port, self.launch.token)
        try:
            return await backend.health(timeout=HEALTH_ASK)
        finally:
            backend.close()

    async def _free(self) -> str:
        backend = await self._connect(self.launch.port, self.launch.token)
        try:
            answer = await backend.free(timeout=FREE_WITHIN)
        finally:
            backend.close()
        return "" if answer.success else str(answer.message or "Free failed")

    async def _pause(self, seconds: float) -> None:
        await self._gone_within(seconds)

    def _wrote(self, number: int, data: bytes) -> None:
        for text in self._cutters[number].feed(data):
            self._line(self.launch.key, _STREAMS[number], text)

    def _close_pipes(self) -> None:
        if self.transport is not None:
            self.transport.loseConnection()

    def _starting(self) -> bool:
        return self.state is State.STARTING

    def _step(self, input_: Input) -> None:
        self.state = step(self.state, input_)

    def _name(self) -> str:
        return f"backend {self.launch.backend} for {self.launch.key} at {self.launch.address}"


_STREAMS = {1: "stdout", 2: "stderr"}


def _in_words(reason: Failure) -> str:
    if reason.check(ProcessDone):
        return "exited with status 0"
    status = getattr(reason.value, "exitCode", None)
    number = getattr(reason.value, "signal", None)
    if number is not None:
        return f"was killed by {signal.Signals(number).name}"
    if status is not None and status > 128:
        try:
            return f"was killed by {signal.Signals(status - 128).name}"
        except ValueError:
            pass
    return f"exited with status {status}"
