"""
A cluster of real processes: PostgreSQL, frontends and workers as children of this process, on loopback.

``localai-dist demo`` is this with a face; the process tests are this with assertions. Blocking code: start it from a
thread that lives as long as the cluster, since the children end with that thread (see ``guard``).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from localai_dist.errors import LocalAIDistError
from localai_dist.testing.child import Child, child_environment, end_all, twistd
from localai_dist.testing.database import Database, open_database
from localai_dist.testing.members import Frontend, Worker
from localai_dist.testing.ports import Ports
from localai_dist.testing.state import Secrets, State, choose_models, wipe, write_private
from localai_dist.testing.waiting import NeverCame, until
from localai_dist.testing.web import ask
from localai_dist.worker.ports import bind_probe

T = TypeVar("T")

START_BOUND = 90.0
"""How long each step of a start may take (s); a first start makes a database."""


class ClusterFailed(LocalAIDistError):
    """The cluster did not start; everything it had started has been ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    What a cluster shall be.

    Attributes:
        state: its state folder; a second start with the same one keeps nodes, keys, staged files, database.
        frontends: how many.
        workers: how many.
        http_port: the first frontend's port, the next one's is one more; 0: free ports.
        models: names of ``state.models_at_hand``.
        postgres: ``auto``, ``system``, ``embedded`` or a libpq URI of a running server.
        frontend_env: given to every frontend, over what the cluster gives.
        worker_env: the same for the workers.
        way: from the numbers of a worker and of a frontend, and that one's URL, to the URL the worker is told; for a
            proxy in between.
        auto_approve: admit the workers without an operator.
        ready_file: where the ready file goes; None: ``ready.json`` in the state folder.
        durable: False lets a launched PostgreSQL forget what a power cut would interrupt; for tests.
    """

    state: Path
    frontends: int = 2
    workers: int = 2
    http_port: int = 0
    models: Sequence[str] = ("tiny-facts", "tiny-words")
    postgres: str = "auto"
    frontend_env: Mapping[str, str] = field(default_factory=dict)
    worker_env: Mapping[str, str] = field(default_factory=dict)
    way: Callable[[int, int, str], str] = lambda worker, frontend, url: url
    auto_approve: bool = True
    ready_file: Path | None = None
    durable: bool = True


class Cluster:
    """
    The running processes of a ``Plan``.

    Attributes:
        state: the folder everything is in.
        secrets: the registration token and the API key.
        database: the PostgreSQL in use.
        frontends, workers: in order; the children themselves.
    """

    secrets: Secrets
    database: Database

    def __init__(self, plan: Plan, *, say: Callable[[str], None] = lambda line: None) -> None:
        self.plan = plan
        self.state = State(plan.state)
        self.frontends: list[Frontend] = []
        self.workers: list[Worker] = []
        self._others: list[Child] = []
        self._say = say
        self._ports = Ports()
        self._ends = ExitStack()

    @property
    def ready_file(self) -> Path:
        """Where the ready file is or will be."""
        return (self.plan.ready_file or self.state.root / "ready.json").absolute()

    def start(self) -> None:
        """
        Start everything and write the ready file; when it fails, end what was started.

        Raises:
            UserMistake: the plan can't be followed.
            LocalAIDistError: something did not start; one sentence.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        models = choose_models(self.plan.models)
        ports = self._frontend_ports()
        self.state.open()
        self._ends.callback(self.state.close)
        self.ready_file.unlink(missing_ok=True)
        self.state.install_models(models)
        self.secrets = self.state.secrets()
        self.database = open_database(self.plan.postgres, self.state, self._say, durable=self.plan.durable)
        self._ends.callback(self.database.stop)
        self._start_frontends(ports)
        self._start_workers()
        self.write_ready_file()

    def _frontend_ports(self) -> list[int]:
        if self.plan.http_port == 0:
            return [self._ports.one() for _ in range(self.plan.frontends)]
        wanted = [self.plan.http_port + index for index in range(self.plan.frontends)]
        for port in wanted:
            if not bind_probe(port):
                raise ClusterFailed(
                    f"port {port} is taken: free it, or choose others with --http-port (0: any free ones)"
                )
        return wanted

    def _start_frontends(self, ports: Sequence[int]) -> None:
        self._say(f"starting {_count(self.plan.frontends, 'frontend')}")
        self.frontends = [self._frontend(index, port) for index, port in enumerate(ports)]
        self._ends.callback(lambda: end_all(self.frontends, polite=1.0, insist=1.5))
        for frontend in self.frontends:
            frontend.start()
        for frontend in self.frontends:
            self.wait_for(f"{frontend.name} ready", frontend.is_ready, START_BOUND, needed=self.frontends)

    def _start_workers(self) -> None:
        self._say(f"starting {_count(self.plan.workers, 'worker')}")
        self.workers = [self._worker(index) for index in range(self.plan.workers)]
        self._ends.callback(lambda: end_all([*self.workers, *self._others], polite=3.0, insist=1.0))
        earlier = {name: node.get("last_heartbeat") for name, node in self.nodes().items()}
        for worker in self.workers:
            worker.start()
        needed = [*self.frontends, *self.workers]
        what = "registration of every worker"
        self.wait_for(what, lambda: self.workers_registered(earlier), START_BOUND, needed=needed)
        if not self.workers_spread() and self.plan.auto_approve:
            what = "a tunnel of every worker, spread over the frontends"
            self.wait_for(what, self.workers_spread, START_BOUND, needed=needed)
        for worker in self.workers:
            if worker.home is not None:  # a frontend has its tunnel; the worker itself hears of that a moment later
                self.wait_for(f"{worker.name} ready", worker.is_ready, START_BOUND, needed=needed)

    def _frontend(self, index: int, port: int) -> Frontend:
        name = f"frontend-{index}"
        folder = self.state.folder(name, inside=["data"])
        instance_id = f"{name}-{secrets.token_hex(4)}"
        env = {
            "LOCALAI_ADDRESS": f"127.0.0.1:{port}",
            "LOCALAI_DISTRIBUTED_ADVERTISE_ADDR": f"127.0.0.1:{port}",
            "LOCALAI_INSTANCE_ID": instance_id,
            "LOCALAI_AUTH_DATABASE_URL": self.database.url,
            "LOCALAI_REGISTRATION_TOKEN": self.secrets.registration_token,
            "LOCALAI_API_KEY": self.secrets.api_key,
            "LOCALAI_MODELS_PATH": str(self.state.models),
            "LOCALAI_DATA_PATH": str(folder / "data"),
            "LOCALAI_AUTO_APPROVE_NODES": "true" if self.plan.auto_approve else "false",
            **self.plan.frontend_env,
        }
        url = f"http://127.0.0.1:{port}"
        return Frontend(
            url=url, instance_id=instance_id, data_dir=folder / "data", **self.program(name, "localai-frontend", env)
        )

    def _worker(self, index: int) -> Worker:
        name = f"worker-{index}"
        folder = self.state.folder(name, inside=["data", "models", "backends"])
        first, probe = self._ports.backends(), self._ports.one()
        env = {
            "LOCALAI_REGISTER_TO": ",".join(self._ways(index)),
            "LOCALAI_REGISTRATION_TOKEN": self.secrets.registration_token,
            "LOCALAI_NODE_NAME": name,
            "LOCALAI_SERVE_ADDR": f"127.0.0.1:{first}",
            "LOCALAI_GRPC_MAX_PORT": str(first + 63),
            "LOCALAI_HTTP_ADDR": f"127.0.0.1:{probe}",
            "LOCALAI_DATA_PATH": str(folder / "data"),
            "LOCALAI_MODELS_PATH": str(folder / "models"),
            "LOCALAI_BACKENDS_PATH": str(folder / "backends"),
            **self.plan.worker_env,
        }
        url = f"http://127.0.0.1:{probe}"
        return Worker(probe_url=url, folder=folder, **self.program(name, "localai-worker", env))

    def _ways(self, worker: int) -> list[str]:
        """The addresses of every frontend as one worker is told them, another one first for each worker."""
        told = [self.plan.way(worker, index, frontend.url) for index, frontend in enumerate(self.frontends)]
        turn = worker % len(told)
        return [*told[turn:], *told[:turn]]

    def program(self, name: str, program: str, env: Mapping[str, str]) -> dict[str, Any]:
        """What a ``Child`` called ``name`` that runs one of our daemons is made with."""
        return {
            "name": name,
            "argv": twistd(program),
            "env": child_environment(env),
            "cwd": self.state.folder(name),
            "log": self.state.logs / f"{name}.log",
        }

    def another(self, name: str, program: str, env: Mapping[str, str]) -> Child:
        """One more daemon, not started yet; it is ended with the cluster."""
        child = Child(**self.program(name, program, env))
        self._others.append(child)
        return child

    @property
    def children(self) -> list[Child]:
        """Every daemon of the cluster."""
        return [*self.frontends, *self.workers, *self._others]

    def wait_for(
        self, what: str, fact: Callable[[], T | None], bound: float, *, needed: Sequence[Child] | None = None
    ) -> T:
        """
        Wait for a fact about the whole cluster; a child that ends meanwhile ends the waiting.

        Args:
            needed: the children without which the waiting is over, also those that have ended by now; None: all that
                run now.

        Raises:
            ClusterFailed: it did not come, or a child that was needed ended; one line that tells which and why.
        """
        watched = [child for child in self.children if child.is_alive()] if needed is None else needed

        def asked() -> T | None:
            for child in watched:
                if not child.is_alive():
                    raise ClusterFailed(f"while waiting for {what}: {child.obituary()}")
            return fact()

        try:
            return until(what, asked, bound, every=0.1)
        except NeverCame as late:
            raise ClusterFailed(f"{late}; logs: {self.state.logs}") from late

    def nodes(self, frontend: Frontend | None = None) -> dict[str, dict[str, Any]]:
        """The nodes by name as a frontend's ``GET /api/nodes`` tells them; empty when it doesn't answer 200."""
        asked = frontend or self.frontends[0]
        reply = ask(asked.url + "/api/nodes", key=self.secrets.api_key)
        listed = reply.json() if reply.status == 200 else None
        return {str(node["name"]): node for node in listed} if isinstance(listed, list) else {}

    def workers_registered(self, earlier: Mapping[str, Any]) -> bool:
        """Whether every worker has registered since its ``last_heartbeat`` was what ``earlier`` says."""
        nodes = self.nodes()
        for worker in self.workers:
            node = nodes.get(worker.name, {})
            heard = node.get("last_heartbeat")
            worker.node_id = node.get("id") if heard and heard != earlier.get(worker.name) else None
        return all(worker.node_id for worker in self.workers)

    def workers_spread(self) -> bool:
        """Whether every worker's tunnel is up and no frontend is left out that could hold one."""
        by_instance = {frontend.instance_id: index for index, frontend in enumerate(self.frontends)}
        nodes = self.nodes()
        for worker in self.workers:
            tunnel = nodes.get(worker.name, {}).get("tunnel") or {}
            worker.home = by_instance.get(tunnel.get("owner", "")) if tunnel.get("state") == "connected" else None
        homes = [worker.home for worker in self.workers]
        return None not in homes and len(set(homes)) == min(len(self.frontends), len(self.workers))

    def restart(self, child: Child, *, emptied: bool = False) -> None:
        """
        Start a daemon again: same port, same log; it is killed first if it runs.

        Args:
            child: one of ``frontends`` or ``workers``.
            emptied: whether its data folder is emptied in between.
        """
        child.kill()
        if emptied and isinstance(child, Frontend | Worker):
            wipe(child.data_dir, self.state.root)
        child.start()

    def document(self) -> dict[str, Any]:
        """The ready file's content. Source: design §8."""
        return {
            "version": 1,
            "state": str(self.state.root),
            "models_dir": str(self.state.models),
            "log_dir": str(self.state.logs),
            "database_url": self.database.url,
            "registration_token": self.secrets.registration_token,
            "api_key": self.secrets.api_key,
            "admin": None,
            "frontends": [frontend.document() for frontend in self.frontends],
            "workers": [worker.document() for worker in self.workers],
        }

    def write_ready_file(self) -> None:
        """Write the ready file: mode 0600, whole or not at all."""
        write_private(self.ready_file, json.dumps(self.document(), indent=2) + "\n")

    def stop(self) -> None:
        """End everything: workers, then frontends, then PostgreSQL; at most 10 s. May be called again."""
        self._ends.close()


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
