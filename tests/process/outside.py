"""Processes, doors and files as somebody sees them who asks the kernel and not the program."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from localai_dist.testing.child import Child
from tests.process.kit import command_line, descendants

LISTEN = 0x0A
"""The kernel's number for a listening TCP socket."""


@dataclass(frozen=True, slots=True)
class Bound:
    """
    A socket of a process.

    Attributes:
        kind: ``tcp``, ``tcp6``, ``udp`` or ``udp6``.
        address, port: its own end; an IPv4 address inside an IPv6 one is told as IPv4.
        remote_port: the other end's; 0 for none.
        listening: whether it waits for connections.
    """

    kind: str
    address: str
    port: int
    remote_port: int
    listening: bool

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.address).is_loopback


def sockets_of(pid: int) -> list[Bound]:
    """Every TCP and UDP socket a process has open, read from ``/proc``."""
    inodes = {target[8:-1] for target in links_of(pid) if target.startswith("socket:[")}
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes:
                (address, port), (_, remote) = _end(words[1]), _end(words[2])
                listening = kind.startswith("tcp") and int(words[3], 16) == LISTEN
                found.append(Bound(kind, address, port, remote, listening))
    return found


def _end(text: str) -> tuple[str, int]:
    """``0100007F:1F90`` is 127.0.0.1, 8080: words of four bytes, each in the machine's order."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)


def links_of(pid: int) -> list[str]:
    """What each descriptor of a process points to."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:  # closed while we looked
            continue
    return found


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def memory_of(child: Child) -> int:
    """Resident bytes of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{child.pid}/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024


def moved(pid: int) -> tuple[int, int]:
    """Bytes a process has read and written so far by file calls; its sockets don't count."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["wchar"])


def backends_of(worker: Child, port: int | None = None) -> set[int]:
    """Every process below a worker: guards and backends; with ``port``, those that were started for that one."""
    found = descendants(worker.pid)
    return found if port is None else {pid for pid in found if command_line(pid).rstrip().endswith(f":{port}")}


@dataclass(frozen=True, slots=True)
class DoorAnswer:
    """What a door said to an upgrade: 101 is let in; ``code`` is the envelope's."""

    status: int
    code: str = ""
    text: str = ""


def knock(url: str, path: str, headers: Iterable[tuple[str, str]] = ()) -> DoorAnswer:
    """Ask for a WebSocket at ``path`` of a daemon, and hang up after the answer."""
    with upgraded(url, path, headers) as (answer, _):
        return answer


@contextmanager
def upgraded(
    url: str, path: str, headers: Iterable[tuple[str, str]] = ()
) -> Iterator[tuple[DoorAnswer, socket.socket]]:
    """As ``knock``, the connection kept open."""
    where = urlsplit(url)
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: {where.netloc}",
        *("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"),
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        *(f"{name}: {value}" for name, value in headers),
    ]
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        yield _answer(connection), connection


def _answer(connection: socket.socket) -> DoorAnswer:
    received = b""
    while b"\r\n\r\n" not in received:
        more = connection.recv(65536)
        assert more, f"the door hung up after {received!r}"
        received += more
    head, _, body = received.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if status == 101:
        return DoorAnswer(status)
    sizes = [line.split(b":")[1] for line in head.splitlines() if line.lower().startswith(b"content-length:")]
    while len(body) < int(sizes[0]):
        more = connection.recv(65536)
        assert more, f"the door hung up after {body!r}"
        body += more
    error = json.loads(body)["error"]
    return DoorAnswer(status, error["code"], error["message"])
