"""A real worker server behind a real tunnel, and a frontend's ways to it: WebSocket, mux streams, splice, loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet import reactor as _reactor
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from localai_dist.ids import InstanceId, NodeId
from localai_dist.relay.control import VerbClient
from localai_dist.relay.forward import Forwarder
from localai_dist.relay.http import NodeHttp
from localai_dist.staging.stager import Stager
from localai_dist.units import MiB
from localai_dist.worker.service import BackendWorkerConfig, WorkerServer, make_backend_worker
from tests.relay.mesh import Held, Registry
from tests.tunnel.sockets import no_connection_left, tunnel

reactor: Any = _reactor
NODE = NodeId("n-1")
TOKEN = "registration-token"


class TunnelCase(TestCase):
    """One frontend's ``http``, ``verbs`` and ``stager``, and one ``worker``."""

    timeout = 120

    async def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.models = self.folder / "frontend-models"
        self.models.mkdir(parents=True)
        self.worker = self.make_worker()
        self.worker.startService()
        self.listening, self.near, self.far = await tunnel(self.worker.on_stream)
        held = Held(InstanceId("here"))
        held.tunnels[NODE] = self.near
        forwarder = Forwarder(held, None, Registry(), clock=reactor, grace=90.0)
        self.http = NodeHttp(forwarder, reactor=reactor, token=TOKEN)
        self.verbs = VerbClient(self.http, clock=reactor)
        self.stager = self.make_stager()

    def config(self, **more: Any) -> BackendWorkerConfig:
        """The worker's."""
        return BackendWorkerConfig(
            registration_token=TOKEN,
            models_path=self.folder / "models",
            backends_path=self.folder / "backends",
            data_path=self.folder / "data",
            **more,
        )

    def make_worker(self) -> WorkerServer:
        """May be another one."""
        return make_backend_worker(self.config(), reactor=reactor, checks={}, stop_node=lambda: None)

    def make_stager(self) -> Stager:
        """May be another one."""
        return Stager(self.http, self.models, clock=reactor, in_thread=deferToThread, chance=lambda: 0.0, piece=1 * MiB)

    async def tearDown(self) -> None:
        ended = [self.near.when_closed(), self.far.when_closed()]
        self.far.close()
        for end in ended:
            await end
        await self.listening.stopListening()
        await self.worker.stopService()
        await no_connection_left()
