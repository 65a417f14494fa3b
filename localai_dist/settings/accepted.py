"""Names that are taken so that an old command line or unit file still starts, and that do nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accepted:
    """
    One old option without effect.

    Attributes:
        flag: long flag without dashes; also the YAML key.
        env: its environment variable.
        takes_value: False for a switch.
        warn: whether setting it says so in the log (broker names are silent: they are expected in every old setup).
    """

    flag: str
    env: str
    takes_value: bool = True
    warn: bool = False

    @property
    def key(self) -> str:
        """The YAML key."""
        return self.flag.replace("-", "_")


def _broker(flag: str, *, takes_value: bool = True, env: str = "") -> Accepted:
    return Accepted(flag, env or "LOCALAI_" + flag.upper().replace("-", "_"), takes_value)


def _without_effect(flag: str, *, takes_value: bool = True) -> Accepted:
    return Accepted(flag, "LOCALAI_" + flag.upper().replace("-", "_"), takes_value, warn=True)


BROKER: tuple[Accepted, ...] = (
    _broker("nats-url"),
    _broker("nats-account-seed"),
    _broker("nats-service-jwt"),
    _broker("nats-service-seed"),
    _broker("nats-worker-jwt-ttl"),
    _broker("nats-jwt"),
    _broker("nats-user-seed"),
    _broker("nats-worker-jwt"),
    _broker("nats-worker-seed"),
    _broker("nats-require-auth", takes_value=False),
    _broker("nats-tls-ca"),
    _broker("nats-tls-cert"),
    _broker("nats-tls-key"),
    _broker("subject", env="LOCALAI_AGENT_SUBJECT"),
    _broker("agent-subject"),
    _broker("queue", env="LOCALAI_AGENT_QUEUE"),
    _broker("agent-queue"),
)
"""Broker options: taken by all three daemons, ignored, hidden; TLS paths are not looked at. Source: surface §2."""

FRONTEND: tuple[Accepted, ...] = (
    _broker("distributed", takes_value=False),
    _broker("auth", takes_value=False),
    _without_effect("distributed-shared-models", takes_value=False),
    _without_effect("distributed-disk-headroom-check", takes_value=False),
    _without_effect("distributed-prefix-cache", takes_value=False),
    _without_effect("distributed-prefix-cache-ttl"),
    _without_effect("expose-node-header", takes_value=False),
    _without_effect("model-scheduling"),
    _without_effect("model-scheduling-config"),
    _without_effect("agent-worker-concurrency"),
    _without_effect("job-worker-concurrency"),
    _without_effect("file-transfer-timeout"),
    _without_effect("file-transfer-retries"),
    _without_effect("galleries"),
)
"""The frontend's: this daemon is always distributed and always checks keys; the rest has no effect in this version."""

WORKER: tuple[Accepted, ...] = (
    _without_effect("advertise-addr"),
    _without_effect("advertise-http-addr"),
    _without_effect("prefetch-models"),
    _without_effect("backends-system-path"),
    _without_effect("galleries"),
    _without_effect("require-backend-integrity", takes_value=False),
)
"""The worker's: it advertises nothing, because it opens no port; the rest has no effect in this version."""

AGENT: tuple[Accepted, ...] = (
    _without_effect("api-url"),
    _without_effect("mcp-ci-job-timeout"),
)
"""The agent worker's, until it runs chats and jobs."""
