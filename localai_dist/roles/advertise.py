"""
The address other frontends dial.

Found by a UDP connect toward the database, which sends nothing and tells which local address a packet there would
leave from. A configured address is only warned about, because two frontends on one machine are legal.

Source: wire contract §0.6, design §8 of the acceptance of many frontends.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from localai_dist.errors import UserMistake
from localai_dist.settings.kinds import HostPort

REMEDY = "set LOCALAI_DISTRIBUTED_ADVERTISE_ADDR to host:port as the other frontends reach this one"


def trouble_with(host: str) -> str | None:
    """Why no other machine can dial ``host``, or None when nothing speaks against it (names are not looked up)."""
    if "%" in host:
        return f"{host} has a zone, which means nothing on another machine"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{host} is this machine to everybody" if host == "localhost" else None
    if address.is_unspecified:
        return f"{host} is no address anybody can dial"
    if address.is_loopback:
        return f"{host} is this machine to everybody"
    if address.is_link_local:
        return f"{host} is valid on one network link only"
    return None


def discover(database_url: str, port: int) -> HostPort:
    """
    This machine's address toward the database, with the frontend's own ``port``.

    Raises:
        UserMistake: none was found that another machine could dial; the text says the remedy.
    """
    host, database_port = _database_at(database_url)
    try:
        found = _toward(host, database_port)
    except OSError as error:
        raise UserMistake(f"no address toward the database ({host}): {error}; {REMEDY}") from error
    trouble = trouble_with(found)
    if trouble is not None:
        raise UserMistake(f"the address toward the database can't be advertised: {trouble}; {REMEDY}")
    if not 1 <= port <= 65535:
        raise UserMistake(f"port {port} can't be advertised; {REMEDY}")
    return HostPort(found, port)


def _database_at(url: str) -> tuple[str, int]:
    if "://" in url:
        parts = urlsplit(url)
        return parts.hostname or "localhost", parts.port or 5432
    words = dict(word.split("=", 1) for word in url.split() if "=" in word)
    host = words.get("hostaddr") or words.get("host") or "localhost"
    return ("localhost" if host.startswith("/") else host), int(words.get("port") or 5432)


def _toward(host: str, port: int) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
