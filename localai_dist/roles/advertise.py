"""
The address other frontends dial.

Found by a UDP connect toward the database, which sends nothing and tells which local address a packet there would
leave from. A configured address is only warned about, because two frontends on one machine are legal.

Source: wire contract §0.6 and §0.7, acceptance CLUS-5.
"""

from __future__ import annotations

import ipaddress
import socket

from localai_dist.errors import UserMistake
from localai_dist.settings.kinds import HostPort
from localai_dist.store.dsn import parameters

REMEDY = "set LOCALAI_DISTRIBUTED_ADVERTISE_ADDR to host:port as the other frontends reach this one"


def trouble_with(address: HostPort) -> str | None:
    """Why no other machine can dial ``address``, or None when nothing speaks against it (names are not looked up)."""
    host = address.host
    if not 1 <= address.port <= 65535:
        return f"{address.port} is no port anybody can dial"
    if "%" in host:
        return f"{host} has a zone, which means nothing on another machine"
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return f"{host} is this machine to everybody" if host.rstrip(".").lower() == "localhost" else None
    return _trouble_with_number(host, getattr(number, "ipv4_mapped", None) or number)


def discover(database_url: str, port: int) -> HostPort:
    """
    This machine's address toward the database, with the frontend's own ``port``.

    Raises:
        UserMistake: none was found that another machine could dial; the text says the remedy.
    """
    host, database_port = _database_at(database_url)
    try:
        found = HostPort(_toward(host, database_port), port)
    except (OSError, UnicodeError) as error:
        raise UserMistake(f"no address toward the database ({host}): {error}; {REMEDY}") from error
    trouble = trouble_with(found)
    if trouble is not None:
        raise UserMistake(f"the address toward the database can't be advertised: {trouble}; {REMEDY}")
    return found


def _trouble_with_number(host: str, number: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    if number.is_unspecified or number.is_multicast:
        return f"{host} is no address anybody can dial"
    if number.is_loopback:
        return f"{host} is this machine to everybody"
    if number.is_link_local:
        return f"{host} is valid on one network link only"
    return None


def _database_at(url: str) -> tuple[str, int]:
    """Host and port of the database as libpq would read them; of several the first, a socket folder is this machine."""
    found = parameters(url)
    host = (found.get("hostaddr") or found.get("host") or "").split(",")[0]
    port = found.get("port", "").split(",")[0]
    return (host if host and host[0] not in "/@" else "localhost"), int(port) if port.isdecimal() else 5432


def _toward(host: str, port: int) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
