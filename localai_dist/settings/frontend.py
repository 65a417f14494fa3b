"""The frontend's options."""

# ruff: noqa: RUF009  -- option() returns a dataclass field, which ruff can't see

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from localai_dist.errors import UserMistake
from localai_dist.settings import accepted, rows
from localai_dist.settings.kinds import (
    ADDRESS,
    DURATION,
    LIST,
    MAYBE_ADDRESS,
    MAYBE_DURATION,
    PATH,
    SWITCH,
    TEXT,
    UPLOAD,
    HostPort,
    choice,
)
from localai_dist.settings.option import option
from localai_dist.units import MINUTE, SECOND, MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    """
    What one frontend was told.

    Durations are seconds, sizes bytes, paths absolute once ``resolve`` was given the working directory.
    Source: design §7; surface §2.1; wire contract §10.
    """

    program: ClassVar[str] = "localai-frontend"
    accepted: ClassVar[tuple[accepted.Accepted, ...]] = (*accepted.BROKER, *accepted.FRONTEND)

    address: HostPort = option(ADDRESS, HostPort("", 8080), "Where to listen for clients, workers and other frontends.")
    auth_database_url: str = option(TEXT, "", "PostgreSQL's address (a libpq URI); required.", secret=True)
    registration_token: str = option(
        TEXT, "", "The secret workers register with; without one no worker and no other frontend is admitted.",
        secret=True, flag_tolerated=True,
    )  # fmt: skip
    api_key: tuple[str, ...] = option(
        LIST, (), "Keys clients and operators present; without one inference is open and the admin routes are closed.",
        secret=True,
    )  # fmt: skip
    models_path: str = option(PATH, "models", "The folder of model files and their YAML.")
    data_path: str = option(PATH, "data", "The folder of this frontend's own state.")
    backend_galleries: str = rows.backend_galleries()
    storage_url: str = option(
        TEXT, "", "An S3 object store's address: model files go by way of it; empty: over the tunnels."
    )
    storage_bucket: str = rows.storage_bucket()
    storage_region: str = rows.storage_region()
    storage_access_key: str = rows.storage_access_key()
    storage_secret_key: str = rows.storage_secret_key()
    upload_limit: int = option(UPLOAD, 15 * MiB, "The largest body of an API request.", least=1)

    instance_id: str = option(TEXT, "", "This frontend's id in the cluster; empty: a random one for each start.")
    distributed_advertise_addr: HostPort | None = option(
        MAYBE_ADDRESS, None, "The address other frontends dial; empty: found by connecting toward the database."
    )
    auto_approve_nodes: bool = option(SWITCH, False, "Admit new nodes without an operator's approval.")
    node_identity: str = option(
        choice("bound", "loose"), "bound",
        "Whether a node proves itself by its own token (bound) or the registration token is enough (loose).",
    )  # fmt: skip
    registration_require_auth: bool = rows.require_auth()
    distributed_require_auth: bool = rows.require_auth()

    route_wait: float = option(DURATION, 5 * SECOND, "How long a request waits for a worker that is reconnecting.")
    model_load_wait: float = option(DURATION, MINUTE, "How long a request waits for a cold load; 0: without end.")
    nats_backend_install_timeout: float = option(
        DURATION, 15 * MINUTE, "Budget of installing a backend on a worker.", flag="backend-install-timeout",
        zero_is_default=True,
    )  # fmt: skip
    nats_backend_upgrade_timeout: float = option(
        DURATION, 15 * MINUTE, "Budget of upgrading a backend on a worker.", flag="backend-upgrade-timeout",
        zero_is_default=True,
    )  # fmt: skip
    nats_model_load_timeout: float | None = option(
        MAYBE_DURATION, None, "Budget of the backend's own loading; empty: 5 min and 20 s per GiB, at most 6 h.",
        flag="model-load-timeout", zero_is_default=True,
    )  # fmt: skip

    worker_reconnect_grace: float = option(
        DURATION, 90 * SECOND, "How long a lost tunnel counts as reconnecting before the node counts as departed.",
        zero_is_default=True, lab=True,
    )  # fmt: skip
    instance_live_window: float = option(
        DURATION, 30 * SECOND, "How long a silent frontend counts as live (it reports six times in that).",
        zero_is_default=True, lab=True,
    )  # fmt: skip
    tunnel_keepalive: float = option(
        DURATION, 5 * SECOND, "Silence on a tunnel before it is pinged; three times that without a byte ends it.",
        zero_is_default=True, lab=True,
    )  # fmt: skip
    health_interval: float = option(
        DURATION, 15 * SECOND, "How often nodes are checked.", zero_is_default=True, lab=True
    )
    node_stale_after: float = option(
        DURATION,
        MINUTE,
        "Age of a node's last heartbeat from which it counts as offline.",
        zero_is_default=True,
        lab=True,
    )
    load_orphan_after: float = option(
        DURATION,
        MINUTE,
        "Silence of a load job after which another frontend takes it over.",
        zero_is_default=True,
        lab=True,
    )
    lame_duck: float = option(
        DURATION,
        5 * SECOND,
        "On SIGTERM: how long new requests are still served while /readyz already says no.",
        lab=True,
    )
    drain_timeout: float = rows.drain_timeout()

    def check(self) -> None:
        """
        Refuse what can't work together.

        Raises:
            UserMistake: one sentence naming the option and the remedy.
        """
        _check_database_url(self.auth_database_url)
        demanded = self.registration_require_auth or self.distributed_require_auth
        if demanded and not self.registration_token:
            raise UserMistake("a registration token is required and none is set: set LOCALAI_REGISTRATION_TOKEN")
        if self.lame_duck > self.drain_timeout:
            raise UserMistake("LOCALAI_LAME_DUCK is longer than LOCALAI_DRAIN_TIMEOUT, which bounds the whole shutdown")


def _check_database_url(url: str) -> None:
    if not url:
        raise UserMistake(
            "no database: set LOCALAI_AUTH_DATABASE_URL to PostgreSQL's address, like postgresql://user@host/localai"
        )
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in ("postgres", "postgresql") and (scheme or "=" not in url):
        # The value itself stays out of the text: it may hold a password.
        raise UserMistake(
            "LOCALAI_AUTH_DATABASE_URL is no PostgreSQL address: want postgresql://user@host:5432/localai"
        )
