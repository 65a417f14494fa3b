"""
The control verbs of a worker with backends: each decodes nothing and encodes nothing, it does one thing and answers.

``control`` has the HTTP around it.

Source: wire contract §6, surface §1.7.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from twisted.logger import Logger

from localai_dist.errors import InvalidName
from localai_dist.ids import ProcessKey, parse_process_key
from localai_dist.wire import file_verbs as files
from localai_dist.wire import verbs as wire
from localai_dist.wire.keys import model_folder
from localai_dist.worker import sums
from localai_dist.worker.containment import Areas
from localai_dist.worker.errors import InstallFailed
from localai_dist.worker.gallery import parse_galleries
from localai_dist.worker.install import Wanted
from localai_dist.worker.offload import Offload
from localai_dist.worker.request_files import RequestFiles
from localai_dist.worker.supervisor import Stopped, Supervisor
from localai_dist.worker.uploads import Uploads

Tell: TypeAlias = Callable[[wire.InstallProgress], None]
"""Where a streaming verb's progress goes."""
VerbTable: TypeAlias = Mapping[wire.Verb[Any, Any], Callable[[Any, Tell], Awaitable[Any]]]
"""What a worker serves; every other verb is answered 404."""


class Verbs:
    """
    The verbs.

    Args:
        supervisor: the backend processes.
        areas: where model files are.
        offload: for work on the disk.
        uploads: who writes and drops them.
        requests: files of single requests.
        forget: ends what else writes below a folder whose files are about to go.
        stop_node: ends this daemon the way SIGTERM does.
    """

    _log = Logger()

    def __init__(
        self,
        *,
        supervisor: Supervisor,
        areas: Areas,
        uploads: Uploads,
        requests: RequestFiles,
        offload: Offload,
        stop_node: Callable[[], None],
        forget: Callable[[Path], Awaitable[None]],
    ) -> None:
        self._uploads = uploads
        self._requests = requests
        self._forget = forget
        self._supervisor = supervisor
        self._areas = areas
        self._offload = offload
        self._stop_node = stop_node

    def table(self) -> VerbTable:
        """Every verb with what serves it."""
        return {
            wire.INSTALL: self.install,
            wire.UPGRADE: self.upgrade,
            wire.LIST: self.installed,
            wire.STOP: self.stop,
            wire.DELETE: self.delete,
            wire.MODEL_STOP: self.model_stop,
            wire.MODEL_UNLOAD: self.model_unload,
            wire.MODEL_DELETE: self.model_delete,
            wire.MODELS_RUNNING: self.models_running,
            files.FILES_RELEASE: self.files_release,
            wire.NODE_STOP: self.node_stop,
        }

    async def install(self, request: wire.InstallRequest, tell: Tell) -> wire.InstallReply:
        """Install a backend, and start it for a model if one is named."""
        wanted = _wanted(request)

        def phase(name: str) -> None:
            tell(wire.InstallProgress(name, op_id=request.op_id, backend=wanted.backend))

        if not request.model_id:
            await self._supervisor.install(wanted, force=request.force, phase=phase)
            return wire.InstallReply(True)
        key = ProcessKey(request.model_id, request.replica_index)
        launch = await self._supervisor.start(key, wanted, force=request.force, phase=phase)
        return wire.InstallReply(True, address=launch.address, backend_token=launch.token)

    async def upgrade(self, request: wire.UpgradeRequest, tell: Tell) -> wire.StoppedReply:
        """Install a backend again; what ran of it is ended and reported, also if the install then fails."""
        wanted = _wanted(request)

        def phase(name: str) -> None:
            tell(wire.InstallProgress(name, op_id=request.op_id, backend=wanted.backend))

        return _stopped(await self._supervisor.upgrade(wanted, phase=phase))

    async def installed(self, _request: wire.Empty, _tell: Tell) -> wire.ListReply:
        """The installed backends."""
        return wire.ListReply(await self._offload(self._supervisor.installed().entries))

    async def stop(self, request: wire.StopRequest, _tell: Tell) -> wire.Empty:
        """End processes; nobody is told how it went but the log."""
        stopped = await self._supervisor.stop(request.backend, force=request.force)
        if stopped.error:
            self._log.error("backend/stop {name}: {error}", name=request.backend, error=stopped.error)
        return wire.Empty()

    async def delete(self, request: wire.DeleteRequest, _tell: Tell) -> wire.StoppedReply:
        """Remove an installed backend."""
        if not request.backend.strip():
            raise InstallFailed("backend/delete names no backend")
        return _stopped(await self._supervisor.delete(request.backend))

    async def model_stop(self, request: wire.ModelStopRequest, _tell: Tell) -> wire.ModelStopReply:
        """End exactly one process, if it is the one that is meant."""
        key = parse_process_key(request.process_key or request.model_name)
        done = await self._supervisor.stop_exact(key, expected_address=request.expected_address, force=request.force)
        return wire.ModelStopReply(done.matched, done.freed, done.terminated, str(key), done.address, done.error)

    async def model_unload(self, request: wire.ModelUnloadRequest, _tell: Tell) -> wire.DoneReply:
        """Have a model's processes free their memory; the processes stay."""
        trouble = await self._supervisor.unload(request.model_name, request.address)
        return wire.DoneReply(not trouble, trouble)

    async def model_delete(self, request: wire.ModelDeleteRequest, _tell: Tell) -> wire.DoneReply:
        """Remove the staged files of a model, or only the unfinished ones of them; none there is fine."""
        folder = self._areas.path(model_folder(request.model_name))
        if request.unfinished_only:
            for path in await self._offload(sums.unfinished, folder, math.inf):
                await self._uploads.drop_unfinished(path, math.inf)
            return wire.DoneReply(True)

        def remove() -> None:
            if folder.is_dir():
                shutil.rmtree(folder)

        await self._forget(folder)
        try:
            await self._offload(remove)
        except OSError as error:
            return wire.DoneReply(False, f"the files of {request.model_name} can't be removed: {error}")
        return wire.DoneReply(True)

    async def models_running(self, _request: wire.Empty, _tell: Tell) -> wire.RunningReply:
        """What serves right now."""
        launches = self._supervisor.running()
        return wire.RunningReply(
            [wire.RunningModel(one.key.model, one.key.replica, one.address) for one in launches],
        )

    async def files_release(self, request: files.ReleaseRequest, _tell: Tell) -> files.ErrorReply:
        """Remove the files of a request that is over."""
        await self._requests.release(request.request_id)
        return files.ErrorReply()

    async def node_stop(self, _request: wire.Empty, _tell: Tell) -> wire.Empty:
        """End this daemon, as SIGTERM does."""
        self._log.info("a frontend asked this node to stop")
        self._stop_node()
        return wire.Empty()


def _wanted(request: wire.InstallRequest | wire.UpgradeRequest) -> Wanted:
    backend = request.backend or request.name
    if not backend and not request.uri:
        raise InvalidName("an install names neither a backend nor a uri")
    name = (request.name or request.backend or request.uri.rstrip("/").rpartition("/")[2]) if request.uri else backend
    return Wanted(name, request.uri, request.alias, tuple(parse_galleries(request.backend_galleries)))


def _stopped(stopped: Stopped) -> wire.StoppedReply:
    keys = [str(key) for key in stopped.keys]
    return wire.StoppedReply(not stopped.error, stopped.error, keys, reports_stopped_processes=True)
