"""A database URL with our defaults in it, and without its password."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

import psycopg2
from psycopg2.extensions import make_dsn, parse_dsn

from localai_dist.errors import UserMistake

_SECRETS = ("password", "sslpassword", "passfile")
_DEFAULTS = {
    # Silent death of the link: without these an idle connection would notice nothing for two hours.
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    # Only the synchronous connections of schema.py heed this one; the others have their own timer.
    "connect_timeout": "5",
    "client_encoding": "UTF8",
}


class UnreadableDsn(UserMistake):
    """A database URL that can't be read. The text never quotes it: any part may be the password."""

    def __init__(self) -> None:
        super().__init__(
            "the database URL can't be read: want postgresql://user:password@host:5432/database "
            "(special characters in the password percent-encoded)"
        )


def parameters(dsn: str) -> dict[str, str]:
    """
    The libpq parameters in ``dsn``, a URL or ``key=value`` words.

    Raises:
        UnreadableDsn: it is neither, or empty.
    """
    if not dsn.strip():
        raise UnreadableDsn
    try:
        found = {key: str(value) for key, value in parse_dsn(dsn).items()}
    except psycopg2.Error:
        raise UnreadableDsn from None
    # An @ or : of the password that is not percent-encoded ends it too early, and libpq takes the rest for the host.
    if "@" in found.get("host", "")[1:] or not found.get("port", "0").replace(",", "0").isdigit():
        raise UnreadableDsn
    return found


def with_defaults(dsn: str, *, application_name: str) -> str:
    """
    ``dsn`` with keepalive, timeouts and a name for ``pg_stat_activity``, where it does not say otherwise itself.

    Raises:
        UnreadableDsn: as for ``parameters``.
    """
    return str(make_dsn(**{**_DEFAULTS, "application_name": application_name[:63], **parameters(dsn)}))


def names_in(dsn: str) -> list[str]:
    """The host names in ``dsn`` that libpq would have to look up, which it does while everything waits."""
    found = parameters(dsn)
    if found.get("hostaddr"):
        return []
    return [host for host in found.get("host", "").split(",") if _is_name(host)]


def with_addresses(dsn: str, addresses: Mapping[str, Sequence[str]]) -> str:
    """``dsn`` with the addresses of each host name beside it; a name with several is tried at each, in order."""
    found = parameters(dsn)
    hosts = found["host"].split(",")
    ports = found.get("port", "").split(",")
    ways = [
        (host, address, ports[index] if len(ports) > 1 else ports[0])
        for index, host in enumerate(hosts)
        for address in (addresses[host] if _is_name(host) else [""])
    ]
    host, hostaddr, port = (",".join(column) for column in zip(*ways, strict=True))
    return str(make_dsn(**{**found, "host": host, "hostaddr": hostaddr, "port": port}))


def _is_name(host: str) -> bool:
    if not host or host[0] in "/@":
        return False
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return True
    return False


def redact(dsn: str) -> str:
    """Where ``dsn`` leads, for a log line or an error: ``user@host:port/database``, never a secret."""
    try:
        found = parameters(dsn)
    except UnreadableDsn:
        return "(an unreadable database URL)"
    host = found.get("host") or found.get("hostaddr") or "(local socket)"
    port = f":{found['port']}" if "port" in found else ""
    user = f"{found['user']}@" if "user" in found else ""
    return f"{user}{host}{port}/{found.get('dbname', found.get('user', ''))}"


def one_line(text: str, dsn: str) -> str:
    """The driver's ``text`` on one line, with every secret of ``dsn`` blotted out."""
    line = "; ".join(part.strip() for part in text.splitlines() if part.strip())
    try:
        found = parameters(dsn)
    except UnreadableDsn:
        return "the database URL can't be read"
    for key in _SECRETS:
        if found.get(key):
            line = line.replace(found[key], "***")
    return line
