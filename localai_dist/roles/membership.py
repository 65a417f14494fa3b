"""What makes a daemon a node of the cluster: its registration and its tunnel, for worker and agent worker alike."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from twisted.logger import Logger

from localai_dist.net import websocket
from localai_dist.net.session import SessionConfig
from localai_dist.net.stream import MuxStream
from localai_dist.roles.ending import end_with
from localai_dist.settings.proxies import Proxies, parse_proxies
from localai_dist.tunnel.dialer import TunnelClient
from localai_dist.urls import parse_url
from localai_dist.worker.frontends import Frontends
from localai_dist.worker.identity import IdentityFile
from localai_dist.worker.readings import TakeReadings, no_readings
from localai_dist.worker.registration import Profile, Registration

_log = Logger()


class NodeSettings(Protocol):
    """The settings both kinds of node have."""

    @property
    def program(self) -> str: ...
    @property
    def register_to(self) -> tuple[str, ...]: ...
    @property
    def registration_token(self) -> str: ...
    @property
    def data_path(self) -> str: ...
    @property
    def heartbeat_interval(self) -> float: ...
    @property
    def tunnel_keepalive(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Member:
    """One node's registration and tunnel, not started."""

    registration: Registration
    tunnel: TunnelClient

    @property
    def checks(self) -> Mapping[str, Callable[[], str]]:
        """What ``/readyz`` asks: name -> why not, or an empty text."""
        return {
            "registration": self.registration.why_not,
            "tunnel": self._why_no_tunnel,
        }

    def _why_no_tunnel(self) -> str:
        """Nothing is dialled before the node is registered, and nothing admits it before it is approved."""
        state = self.tunnel.state
        if state.connected:
            return ""
        if self.registration.node_id() is None:
            return self.registration.why_not() or state.reason
        if state.refused == HTTPStatus.FORBIDDEN:
            return self.registration.waiting()
        return state.reason


def session_config(keepalive: float) -> SessionConfig:
    """The numbers of a tunnel or peer link: PING after ``keepalive`` s of silence, death after three times that."""
    return SessionConfig(keepalive_interval=keepalive, keepalive_timeout=3 * keepalive)


def boot_id() -> str:
    """A new id for each process: frontends tell by it whether what was loaded here can still be running."""
    return str(uuid.uuid4())


def make_member(
    settings: NodeSettings,
    reactor: Any,
    *,
    profile: Profile,
    on_stream: Callable[[MuxStream], None],
    readings: TakeReadings = no_readings,
) -> Member:
    """
    Registration and tunnel of the node ``profile`` describes.

    Args:
        on_stream: what serves a stream a frontend opened.
        readings: what each registration and heartbeat tells of the machine.

    Raises:
        UserMistake: the identity on the disk can't be read, or the proxy a frontend is reached by is none.
    """
    proxies = parse_proxies(os.environ)
    _tell_ways(settings.register_to, proxies)
    token = settings.registration_token
    registration = Registration(
        reactor=reactor,
        frontends=Frontends(reactor=reactor, urls=settings.register_to, registration_token=token, proxies=proxies),
        registration_token=token,
        profile=profile,
        identity_file=IdentityFile(Path(settings.data_path), profile.name),
        readings=readings,
        interval=settings.heartbeat_interval,
        chance=random.random,
        on_refused=lambda refused: end_with(reactor, settings.program, str(refused)),
        on_registered=lambda: tunnel.retry_now(),
        on_tunnel_held=lambda held: tunnel.registry_says(held),
    )
    registration.load_identity()
    tunnel = _tunnel(settings, reactor, profile.name, registration, on_stream, proxies)
    return Member(registration, tunnel)


def _tunnel(
    settings: NodeSettings,
    reactor: Any,
    name: str,
    registration: Registration,
    on_stream: Callable[[MuxStream], None],
    proxies: Proxies,
) -> TunnelClient:
    return TunnelClient(
        reactor=reactor,
        name=name,
        urls=settings.register_to,
        node_id=registration.node_id,
        token=registration.node_token,
        on_stream=on_stream,
        chance=random.random,
        config=session_config(settings.tunnel_keepalive),
        on_unauthorised=registration.register_again,
        dial=partial(websocket.dial, proxies=proxies),
    )


def _tell_ways(urls: Sequence[str], proxies: Proxies) -> None:
    """One line for each frontend that is reached by a proxy: who looks for a lost connection wants to know."""
    for url in urls:
        frontend = parse_url(url)
        proxy = proxies.towards(frontend.scheme, frontend.host, frontend.port)
        if proxy is not None:
            text = "{url} is reached by way of the proxy {proxy} of {variable}"
            _log.info(text, url=url, proxy=str(proxy), variable=proxy.variable)
