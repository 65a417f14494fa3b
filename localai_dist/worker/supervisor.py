"""
Which backend processes run on this node, by process key: started on request, reused, ended until really gone.

Two locks, never held together: one per backend name (so that its files are not replaced by two at once), one per
process key (so that two requests for one replica start one process). Ending a process takes neither.

Whoever asks may leave. An install then stops and leaves nothing, unless somebody else waits for the same one. A process
that is being started goes on: the next one who asks finds it, and an exact stop ends it.

Source: surface §5.4, internals §10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from twisted.internet.defer import Deferred, DeferredLock, gatherResults
from twisted.logger import Logger

from localai_dist.errors import InvalidName
from localai_dist.ids import ProcessKey, parse_process_key
from localai_dist.worker.errors import InstallFailed, StartFailed, StillRunning, WorkerError
from localai_dist.worker.install import Installed, Installer, Wanted
from localai_dist.worker.lifecycle import State
from localai_dist.worker.offload import Offload
from localai_dist.worker.ports import PortTable, Probe, bind_probe
from localai_dist.worker.process import LAST_WORDS, BackendProcess, Connect, Launch, LineSink
from localai_dist.worker.sharing import Shared

_log = Logger()

Phase = Callable[[str], None]
"""Told each phase of an install: resolving, downloading, starting."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """
    What came of ending processes.

    Attributes:
        keys: those that are gone.
        error: why some are not, or empty.
    """

    keys: tuple[ProcessKey, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class ExactStop:
    """What came of ending one process; see ``wire.verbs.ModelStopReply``."""

    matched: bool = False
    freed: bool = False
    terminated: bool = False
    address: str = ""
    error: str = ""


class Installing(Shared[Installed]):
    """
    An install under way.

    Attributes:
        what: is installed, and whether although it is there.
    """

    def __init__(self, what: tuple[Wanted, bool]) -> None:
        super().__init__()
        self.what = what
        self._phases: list[Phase] = []

    def join_with(self, phase: Phase) -> Deferred[Installed]:
        """Its result, for one more caller, who is told the phases from now on."""
        self._phases.append(phase)
        return self.join()

    def tell(self, name: str) -> None:
        """A phase begins."""
        for phase in self._phases:
            phase(name)


class Supervisor:
    """
    The processes of this node.

    Args:
        reactor: spawns them, and is the clock.
        installer: where backends come from.
        ports: which port each gets.
        connect: how to ask a backend something.
        environment: the environment for a process with this token.
        mint: a fresh random token.
        last_words: the last lines a process wrote to stderr.
        line: gets every line they write.
        offload: for work on the disk.
        probe: whether a port can be bound.
    """

    def __init__(
        self,
        *,
        reactor: Any,
        installer: Installer,
        ports: PortTable,
        connect: Connect,
        environment: Callable[[str], Mapping[str, str]],
        mint: Callable[[], str],
        last_words: Callable[[ProcessKey, int], list[str]],
        line: LineSink,
        offload: Offload,
        probe: Probe = bind_probe,
    ) -> None:
        self._reactor = reactor
        self._installer = installer
        self._ports = ports
        self._connect = connect
        self._environment = environment
        self._mint = mint
        self._last_words = last_words
        self._line = line
        self._offload = offload
        self._probe = probe
        self._processes: dict[ProcessKey, BackendProcess] = {}
        self._key_locks: dict[ProcessKey, DeferredLock] = {}
        self._backend_locks: dict[str, DeferredLock] = {}
        self._installs: dict[str, Installing] = {}
        self._closed = False

    async def start(self, key: ProcessKey, wanted: Wanted, *, force: bool, phase: Phase) -> Launch:
        """
        A process of ``wanted`` for ``key`` that answers Health: the running one if it is that, else a new one.

        Args:
            key: which replica of which model.
            wanted: the backend; installed first if it is not.
            force: install it again, ending every process of it.
            phase: told what is being done.

        Raises:
            InstallFailed, PortsExhausted, StartFailed: nothing runs for ``key``.
            StillRunning: what ran for ``key`` would not end.
        """
        installed = await self.install(wanted, force=force, phase=phase)
        starting: Shared[Launch] = Shared()
        launch = starting.join()
        starting.begin(lambda: self._in_turn(key, installed, phase, starting))
        return await launch

    async def install(self, wanted: Wanted, *, force: bool, phase: Phase) -> Installed:
        """
        ``wanted`` as an installed backend; nothing is started.

        Cancelling it ends the install, if nobody else waits for it.

        Raises:
            InstallFailed: it could not be installed.
            StillRunning: ``force``, and a process of the old one would not end.
        """
        phase("resolving")
        what = (wanted, force)
        installing = self._installs.get(wanted.backend)
        if installing is not None and installing.what == what and not installing.unwanted:
            _log.info("one more waits for backend {name}, which is being installed", name=wanted.backend)
            return await installing.join_with(phase)
        begun = self._installs[wanted.backend] = Installing(what)
        installed = begun.join_with(phase)
        begun.begin(lambda: self._install(wanted, force, begun), lambda: self._installed(begun))
        return await installed

    async def upgrade(self, wanted: Wanted, *, phase: Phase) -> Stopped:
        """
        End every process of a backend and install it again; nothing is started.

        What was ended is told also when the install then fails: those processes are gone all the same.
        """

        async def upgrade() -> Stopped:
            stopped = await self._end_all(self._of_backend(wanted.backend), force=True)
            if stopped.error:
                return stopped
            phase("downloading")
            return await self._then(stopped, self._installer.install, wanted)

        return await self._backend_lock(wanted.backend).run(lambda: Deferred.fromCoroutine(upgrade()))

    async def delete(self, backend: str) -> Stopped:
        """End every process of a backend, then remove its files; a survivor keeps the files."""

        async def delete() -> Stopped:
            stopped = await self._end_all(self._of_backend(backend), force=True)
            return stopped if stopped.error else await self._then(stopped, self._installer.remove, backend)

        return await self._backend_lock(backend).run(lambda: Deferred.fromCoroutine(delete()))

    async def stop(self, name: str, *, force: bool) -> Stopped:
        """End the processes ``name`` means: a ``model#n``, a model, a backend; blank = all."""
        return await self._end_all(self._meant(name.strip()), force=force)

    async def stop_exact(self, key: ProcessKey, *, expected_address: str, force: bool) -> ExactStop:
        """End the process of ``key`` if it has the address expected (any, if empty); an absent one is ended already."""
        process = self._processes.get(key)
        if process is None:
            return ExactStop(terminated=True)
        address = process.launch.address
        if expected_address and expected_address != address:
            return ExactStop(address=address, error=f"{key} is at {address}, not at {expected_address}: left alone")
        try:
            freed = await process.end(force=force)
        except StillRunning as error:
            return ExactStop(matched=True, address=address, error=str(error))
        return ExactStop(matched=True, freed=freed, terminated=True, address=address)

    async def unload(self, model: str, address: str) -> str:
        """
        Ask the processes of ``model`` (those at ``address``, if given) to free their memory.

        Returns:
            Which did not, and why; empty if all did or there are none.
        """
        meant = [one for key, one in self._processes.items() if key.model == model]
        asked = [one for one in meant if address in ("", one.launch.address)]
        answers = await gatherResults([Deferred.fromCoroutine(one.free()) for one in asked], consumeErrors=True)
        told = zip(asked, answers, strict=True)
        return "; ".join(f"{one.launch.key} at {one.launch.address}: {trouble}" for one, trouble in told if trouble)

    def running(self) -> list[Launch]:
        """The processes that serve, and those that would not end; neither dead nor starting nor ending ones."""
        alive = (State.SERVING, State.SURVIVING)
        return [one.launch for one in self._processes.values() if one.state in alive]

    def serves(self, port: int) -> bool:
        """Whether a process of ours has ``port``."""
        return any(one.launch.port == port for one in self._processes.values())

    def installed(self) -> Installer:
        """The installed backends."""
        return self._installer

    async def close(self) -> Stopped:
        """End everything and start nothing any more."""
        self._closed = True
        for installing in self._installs.values():
            installing.stop()
        return await self._end_all(list(self._processes.values()), force=True)

    async def _install(self, wanted: Wanted, force: bool, installing: Installing) -> Installed:
        lock = self._backend_lock(wanted.backend)
        return await lock.run(lambda: Deferred.fromCoroutine(self._ensure(wanted, force, installing)))

    def _installed(self, installing: Installing) -> None:
        backend = installing.what[0].backend
        if self._installs.get(backend) is installing:
            del self._installs[backend]

    async def _in_turn(self, key: ProcessKey, installed: Installed, phase: Phase, starting: Shared[Launch]) -> Launch:
        lock = self._key_locks.setdefault(key, DeferredLock())
        try:
            return await lock.run(lambda: Deferred.fromCoroutine(self._start(key, installed, phase, starting)))
        finally:
            if not lock.locked and self._key_locks.get(key) is lock:
                del self._key_locks[key]

    async def _start(self, key: ProcessKey, installed: Installed, phase: Phase, starting: Shared[Launch]) -> Launch:
        starting.check()  # it may have waited for its turn longer than its caller did
        running = self._processes.get(key)
        if running is not None:
            if running.state is State.SERVING and running.launch.folder_id == installed.folder_id:
                return running.launch
            await running.end()
        phase("starting")
        return await self._launch(key, installed)

    async def _ensure(self, wanted: Wanted, force: bool, installing: Installing) -> Installed:
        installing.check()
        found = await self._offload(self._installer.find, wanted.backend)
        if found is not None and not force:
            return found
        if force:
            stopped = await self._end_all(self._of_backend(wanted.backend), force=True)
            if stopped.error:
                raise StillRunning(stopped.error)
        installing.tell("downloading")
        return await self._offload(self._installer.install, wanted, installing.check)

    async def _launch(self, key: ProcessKey, installed: Installed) -> Launch:
        if self._closed:
            raise StartFailed("this worker is shutting down")
        port = self._ports.allocate(key, now=self._reactor.seconds(), probe=self._probe)
        token = self._mint()
        launch = Launch(
            key, installed.name, installed.folder, installed.folder_id, port, token, self._environment(token)
        )
        process = BackendProcess(launch, reactor=self._reactor, connect=self._connect, line=self._line)
        try:
            process.spawn()
        except OSError as error:
            self._ports.release(port, key, now=self._reactor.seconds())
            raise StartFailed(f"backend {installed.name} can't be started: {error}") from error
        self._processes[key] = process
        process.when_gone().addCallback(lambda _none: self._forget(process))
        return await self._until_serving(process)

    async def _until_serving(self, process: BackendProcess) -> Launch:
        try:
            await process.until_healthy()
        except StartFailed as error:
            await process.end(force=True)
            said = self._last_words(process.launch.key, LAST_WORDS)
            raise StartFailed("\n".join([str(error), *said])) from error
        _log.info("backend {name} serves {key}", name=process.launch.backend, key=str(process.launch.key))
        return process.launch

    def _forget(self, process: BackendProcess) -> None:
        key = process.launch.key
        if self._processes.get(key) is process:
            del self._processes[key]
        self._ports.release(process.launch.port, key, now=self._reactor.seconds())

    async def _then(self, stopped: Stopped, work: Callable[..., Any], *arguments: Any) -> Stopped:
        """``stopped``, with the reason if ``work`` on the files failed."""
        try:
            await self._offload(work, *arguments)
        except InstallFailed as error:
            return replace(stopped, error=str(error))
        return stopped

    async def _end_all(self, processes: list[BackendProcess], *, force: bool) -> Stopped:
        async def one(process: BackendProcess) -> tuple[ProcessKey, str]:
            try:
                await process.end(force=force)
            except WorkerError as error:
                return process.launch.key, str(error)
            return process.launch.key, ""

        ended = await gatherResults([Deferred.fromCoroutine(one(process)) for process in processes])
        return Stopped(
            tuple(key for key, error in ended if not error), "; ".join(error for _key, error in ended if error)
        )

    def _of_backend(self, name: str) -> list[BackendProcess]:
        found = self._installer.find(name)
        names = {name} if found is None else {name, found.name}
        return [one for one in self._processes.values() if one.launch.backend in names]

    def _meant(self, name: str) -> list[BackendProcess]:
        if not name:
            return list(self._processes.values())
        if "#" in name:
            try:
                exact = self._processes.get(parse_process_key(name))
            except InvalidName:
                exact = None
            if exact is not None:
                return [exact]
        by_model = [one for key, one in self._processes.items() if key.model == name]
        return by_model or self._of_backend(name)

    def _backend_lock(self, name: str) -> DeferredLock:
        return self._backend_locks.setdefault(name, DeferredLock())
