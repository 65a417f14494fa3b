"""A worker with the scriptable test backend, over real gRPC: unloading what will not let go, and what it can see."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.trial.unittest import TestCase

from localai_dist import grpcclient
from localai_dist.ids import ProcessKey
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.testing import backend
from localai_dist.worker import groups, process
from localai_dist.worker.install import Wanted
from localai_dist.worker.process import Launch
from localai_dist.worker.service import BackendWorkerConfig, WorkerServer, make_backend_worker
from tests.worker.support import reactor
from tests.worker.test_supervisor import free_range

MAPPED = "0000000000000000FFFF0000"
M0 = ProcessKey("m", 0)
SECRETS = {"LOCALAI_REGISTRATION_TOKEN": "reg-secret", "HF_TOKEN": "hf-secret", "LOCALAI_NATS_URL": "nats://x:4222"}


class RealBackendTests(TestCase):
    timeout = 60
    gallery: Path
    worker: WorkerServer

    def setUp(self) -> None:
        folder = Path(self.mktemp()).absolute()
        self.gallery = backend.write_gallery(folder / "gallery")
        self.worker = make_backend_worker(
            BackendWorkerConfig(
                registration_token="reg-secret",
                models_path=folder / "models",
                backends_path=folder / "backends",
                data_path=folder / "data",
                ports=free_range(2),
                backend_galleries=json.dumps([{"url": str(self.gallery), "name": "test"}]),
            ),
            reactor=reactor,
            checks={},
            stop_node=lambda: None,
            environment=os.environ | SECRETS | {"INNOCENT": "has reg-secret in it"},
        )
        assert self.worker.supervisor is not None
        self.supervisor = self.worker.supervisor
        self.addCleanup(self.supervisor.close)

    async def load(self, *options: str) -> Launch:
        """A process that loaded a model with these options."""
        wanted = Wanted(backend.NAME)
        launch = await self.supervisor.start(M0, wanted, force=False, phase=lambda _phase: None)
        channel = await self.channel(launch)
        result = await channel.load_model(pb.ModelOptions(Model="m", Options=list(options)), timeout=10)
        channel.close()
        self.assertTrue(result.success, result.message)
        return launch

    async def channel(self, launch: Launch, token: str | None = None) -> grpcclient.BackendChannel:
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", launch.port)
        return await grpcclient.connect(endpoint, token=launch.token if token is None else token, clock=reactor)

    def group(self) -> int:
        pid = self.supervisor._processes[M0].pid
        assert pid is not None
        return pid

    async def check_ended(self, group: int, **expected: Any) -> None:
        done = await self.supervisor.stop_exact(M0, expected_address="", force=False)
        self.assertEqual(
            {name: getattr(done, name) for name in expected} | {"error": done.error}, expected | {"error": ""}
        )
        self.assertTrue(done.terminated)
        self.assertEqual(groups.members(group), [])

    async def test_unload_and_stop(self) -> None:
        """A backend that lets go is freed, then ended (WALK-21)."""
        launch = await self.load()
        self.assertEqual(await self.supervisor.unload("m", launch.address), "")
        await self.check_ended(self.group(), matched=True, freed=True)

    async def test_free_fails(self) -> None:
        """A Free that fails is told with the backend's own words; the process can still be ended (WALK-21)."""
        launch = await self.load("test:free=fail")
        trouble = await self.supervisor.unload("m", launch.address)
        self.assertIn(launch.address, trouble)
        self.assertEqual(self.supervisor.running(), [launch])
        await self.check_ended(self.group(), matched=True, freed=False)

    async def test_free_hangs(self) -> None:
        """A Free that hangs is told as that within its bound (WALK-21)."""
        self.patch(process, "FREE_WITHIN", 0.5)
        launch = await self.load("test:free=hang")
        self.assertIn(launch.address, await self.supervisor.unload("m", launch.address))
        await self.check_ended(self.group(), matched=True, freed=False)

    async def test_sigterm_is_ignored(self) -> None:
        """A process that ignores SIGTERM is killed with its group (WALK-21)."""
        self.patch(process, "TERM_WITHIN", 0.5)
        await self.load("test:sigterm=ignore")
        await self.check_ended(self.group(), matched=True, freed=True)

    async def test_what_it_sees_and_where_it_listens(self) -> None:
        """It sees no secret but its own token, shows none, and listens on loopback alone (WALK-8, WALK-23)."""
        launch = await self.load()
        for pid in groups.members(self.group()):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            self.assertFalse([entry for entry in environment if b"secret" in entry or b"nats" in entry])
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            self.assertNotIn(launch.token.encode(), command)
        listening = [line.split()[1] for line in _tcp_lines() if line.split()[3] == "0A"]
        at_port = [address for address in listening if address.endswith(f":{launch.port:04X}")]
        # gRPC listens on an IPv6 socket for the mapped address, which is loopback all the same.
        self.assertEqual([address.rpartition(":")[0].removeprefix(MAPPED) for address in at_port], ["0100007F"])

    async def test_its_own_token(self) -> None:
        """A backend serves nobody without its own token, the registration token included (WALK-23)."""
        launch = await self.load()
        for token in ("", "reg-secret"):
            channel = await self.channel(launch, token)
            error = None
            try:
                await channel.status(timeout=5)
            except grpcclient.RpcError as caught:
                error = caught
            channel.close()
            assert error is not None
            self.assertIs(error.status, grpcclient.StatusCode.UNAUTHENTICATED)


def _tcp_lines() -> list[str]:
    lines = []
    for name in ("tcp", "tcp6"):
        lines += Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    return lines
