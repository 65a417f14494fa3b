"""The agent worker's options."""

# ruff: noqa: RUF009  -- option() returns a dataclass field, which ruff can't see

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from localai_dist.settings import accepted, rows
from localai_dist.settings.kinds import DURATION, MAYBE_ADDRESS, PATH, SWITCH, TEXT, HostPort
from localai_dist.settings.option import option
from localai_dist.settings.worker import check_registration
from localai_dist.units import SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """
    What one agent worker was told.

    Durations are seconds, paths absolute once ``resolve`` was given the working directory.
    Source: design §7; surface §2.3.
    """

    program: ClassVar[str] = "localai-agent-worker"
    accepted: ClassVar[tuple[accepted.Accepted, ...]] = (*accepted.BROKER, *accepted.AGENT)

    register_to: tuple[str, ...] = rows.register_to()
    registration_token: str = option(
        TEXT, "", "The secret of the cluster this agent worker registers with.", secret=True, flag_tolerated=True
    )
    node_name: str = option(TEXT, "", "This node's name, unique in the cluster; empty: agent- and the host name.")
    api_token: str = option(
        TEXT, "", "Key for the frontend's API; empty: the one handed out at registration.", secret=True
    )
    data_path: str = option(PATH, "data", "The folder of this daemon's own state; node.json holds its identity.")
    http_addr: HostPort | None = option(
        MAYBE_ADDRESS, None, "Port of this daemon's own server (probes, control) on loopback; empty: any free one."
    )
    heartbeat_interval: float = rows.heartbeat_interval()
    tunnel_keepalive: float = rows.tunnel_keepalive()
    lame_duck: float = option(DURATION, 5 * SECOND, "On SIGTERM: the longest wait for running work.", lab=True)
    drain_timeout: float = rows.drain_timeout()
    distributed_require_auth: bool = option(
        SWITCH, False, "Refuse to start without a registration token, and wait for an operator's approval."
    )

    @property
    def http_port(self) -> int:
        """The loopback port of this daemon's own server; 0 is any free one."""
        return self.http_addr.port if self.http_addr is not None else 0

    def check(self) -> None:
        """
        Refuse what can't work together.

        Raises:
            UserMistake: one sentence naming the option and the remedy.
        """
        check_registration(self.register_to, self.registration_token, demanded=self.distributed_require_auth)
