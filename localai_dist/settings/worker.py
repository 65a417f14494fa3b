"""The worker's options."""

# ruff: noqa: RUF009  -- option() returns a dataclass field, which ruff can't see

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from localai_dist.errors import UserMistake
from localai_dist.settings import accepted, rows
from localai_dist.settings.kinds import (
    ADDRESS,
    COUNT,
    DURATION,
    LABELS,
    MAYBE_ADDRESS,
    MAYBE_SIZE,
    PATH,
    PORT,
    SWITCH,
    TEXT,
    UPLOAD,
    VRAM,
    HostPort,
)
from localai_dist.settings.option import option
from localai_dist.units import SECOND, GiB

LOOPBACK = "127.0.0.1"
BASE_PORT = 20000
"""Below the kernel's ephemeral range (32768 to 60999), so that outgoing connections don't take backends' ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """
    What one worker was told.

    Durations are seconds, paths absolute once ``resolve`` was given the working directory.
    Source: design §7; surface §2.2; wire contract §10.
    """

    program: ClassVar[str] = "localai-worker"
    accepted: ClassVar[tuple[accepted.Accepted, ...]] = (*accepted.BROKER, *accepted.WORKER)

    register_to: tuple[str, ...] = rows.register_to()
    registration_token: str = option(
        TEXT, "", "The secret of the cluster this worker registers with.", secret=True, flag_tolerated=True
    )
    node_name: str = option(TEXT, "", "This node's name, unique in the cluster; empty: the machine's host name.")
    node_labels: Mapping[str, str] = option(LABELS, {}, "Labels that placement rules can select by.")
    models_path: str = option(PATH, "models", "The folder model files are staged into.")
    backends_path: str = option(PATH, "backends", "The folder backends are installed into.")
    data_path: str = option(PATH, "data", "The folder of this worker's own state; node.json holds its identity.")
    backend_galleries: str = rows.backend_galleries()
    force_meta_backend_capability: str = option(
        TEXT, "",
        "Which builds of backends to install (nvidia-cuda-12, amd, default, …); empty: by the card that is found.",
    )  # fmt: skip
    storage_url: str = option(
        TEXT, "", "An S3 object store's address, to fetch model files from; empty: they come over the tunnel."
    )
    storage_bucket: str = rows.storage_bucket()
    storage_region: str = rows.storage_region()
    storage_access_key: str = rows.storage_access_key()
    storage_secret_key: str = rows.storage_secret_key()
    storage_cache: int = option(
        UPLOAD, 10 * GiB, "How much of the object store's files is kept here when no model has them any more."
    )
    request_files_limit: int | None = option(
        MAYBE_SIZE, None,
        "How much files of requests (recordings) may have here together; empty: 10 % of the disk, at most 10 GiB.",
        least=1,
    )  # fmt: skip
    request_files_free: int | None = option(
        MAYBE_SIZE, None, "How much of the disk they leave free; empty: 5 % of it, at least 1 GiB."
    )  # fmt: skip

    serve_addr: HostPort = option(
        ADDRESS, HostPort(LOOPBACK, BASE_PORT), "First port of the backends; only the port counts, they bind loopback."
    )
    addr: HostPort | None = option(MAYBE_ADDRESS, None, "Old spelling of --serve-addr; its port wins.")
    grpc_max_port: int = option(PORT, 0, "Last port of the backends; 0: up to 65535.")
    http_addr: HostPort | None = option(
        MAYBE_ADDRESS, None,
        "Port of this worker's own server on loopback; empty: the first backend port less one; port 0: any free one.",
    )  # fmt: skip
    max_replicas_per_model: int = option(COUNT, 1, "Copies of one model this node may hold.", least=1)
    vram_budget: str = option(VRAM, "", "How much VRAM may be used; empty: all.")

    heartbeat_interval: float = rows.heartbeat_interval()
    tunnel_keepalive: float = rows.tunnel_keepalive()
    lame_duck: float = option(DURATION, 5 * SECOND, "On SIGTERM: the longest wait for running requests.", lab=True)
    drain_timeout: float = rows.drain_timeout()
    registration_require_auth: bool = rows.require_auth()
    distributed_require_auth: bool = rows.require_auth()
    worker_tunnel: bool = option(SWITCH, True, "Must stay true: there is no way to a worker but its tunnel.")

    @property
    def base_port(self) -> int:
        """The first port of the backends."""
        return (self.addr or self.serve_addr).port

    @property
    def http_port(self) -> int:
        """The loopback port of the worker's own server; 0 is any free one."""
        return self.http_addr.port if self.http_addr is not None else self.base_port - 1

    def check(self) -> None:
        """
        Refuse what can't work together.

        Raises:
            UserMistake: one sentence naming the option and the remedy.
        """
        check_registration(self.register_to, self.registration_token, demanded=self._demanded)
        if not self.worker_tunnel:
            raise UserMistake("LOCALAI_WORKER_TUNNEL=false can't be: a worker is reached by its tunnel alone; unset it")
        if not 1024 <= self.base_port <= 65535:
            raise UserMistake(f"the backends' first port is {self.base_port}: want LOCALAI_SERVE_ADDR from 1024 on")
        if self.grpc_max_port and self.grpc_max_port < self.base_port:
            raise UserMistake(
                f"LOCALAI_GRPC_MAX_PORT ({self.grpc_max_port}) is below the backends' first port ({self.base_port})"
            )

    @property
    def _demanded(self) -> bool:
        return self.registration_require_auth or self.distributed_require_auth


def check_registration(register_to: tuple[str, ...], token: str, *, demanded: bool) -> None:
    """
    Refuse to start without somebody to register with.

    Raises:
        UserMistake: no address, or a token is demanded and missing.
    """
    if not register_to:
        raise UserMistake("no frontend to register with: set LOCALAI_REGISTER_TO to its address, like http://host:8080")
    if demanded and not token:
        raise UserMistake("a registration token is required and none is set: set LOCALAI_REGISTRATION_TOKEN")
