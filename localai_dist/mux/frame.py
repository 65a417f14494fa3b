"""
The 12-byte header: version, type, flags, stream id, length, big endian.

Source: docs/wire/mux.md §1.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

_HEADER: Final = struct.Struct(">BBHII")
HEADER_SIZE: Final = 12
VERSION: Final = 0
MAX_LENGTH: Final = 2**32 - 1

pack_header: Final = _HEADER.pack
unpack_header: Final = _HEADER.unpack_from


class FrameType(IntEnum):
    """What a frame is."""

    DATA = 0
    WINDOW_UPDATE = 1
    PING = 2
    GO_AWAY = 3


class Flag(IntFlag):
    """What a frame does to its stream (or, on a ping, whether it asks or answers)."""

    NONE = 0
    SYN = 1
    ACK = 2
    FIN = 4
    RST = 8


class GoAway(IntEnum):
    """Why a session ends."""

    NORMAL = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2


class Header(NamedTuple):
    """One decoded header; the flags and type are plain numbers because a peer may send anything."""

    version: int
    type: int
    flags: int
    stream_id: int
    length: int


def encode(type_: FrameType, flags: Flag, stream_id: int, length: int) -> bytes:
    """The header of one frame; for a data frame ``length`` payload bytes must follow."""
    return pack_header(VERSION, type_, flags, stream_id, length)


def decode(data: bytes, offset: int = 0) -> Header:
    """The header at ``offset`` of ``data``, of which at least 12 bytes must be there; nothing is judged."""
    return Header(*unpack_header(data, offset))
