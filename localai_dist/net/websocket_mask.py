"""
The XOR of WebSocket frames, by autobahn's native masker.

autobahn's own wrapper copies a payload twice and allocates for each; here it is copied once.
``websocket.require_masker`` says at start when the native part is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

try:
    from _nvx_xormasker import ffi, lib
except ImportError:  # ``require_masker`` refuses before any frame
    ffi = lib = None

_KEYS_AT_ONCE: Final = 256

NO_KEY: Final = bytes(4)


def unmasked(key: bytes, offset: int, payload: memoryview) -> bytes:
    """
    ``payload`` unmasked.

    Args:
        key: the frame's masking key.
        offset: how many bytes of the frame came before.
        payload: a piece of it.
    """
    size = len(payload)
    piece = b"".join((payload, b""))
    _xor(key, offset, ffi.from_buffer("uint8_t[]", piece), size)
    return piece


def masked(header: bytes, parts: Sequence[bytes | memoryview], size: int) -> bytes:
    """
    A whole frame: ``header``, a fresh masking key, and ``parts``, of ``size`` bytes together, masked with it.

    The XOR is done inside the joined string, before anybody else has seen it: a Twisted transport takes nothing but
    ``bytes``, and to mask a ``bytearray`` first would copy each message twice more. Joining two or more strings always
    makes a new one.
    """
    key = _fresh_key()
    frame = b"".join((header, key, *parts))
    _xor(key, 0, ffi.from_buffer("uint8_t[]", frame) + len(header) + len(key), size)
    return frame


_keys: Iterator[bytes] = iter(())


def _fresh_key() -> bytes:
    """Four random bytes; drawn in bulk, because a system call for each message costs more than its XOR."""
    global _keys
    key = next(_keys, None)
    if key is None:
        drawn = os.urandom(4 * _KEYS_AT_ONCE)
        _keys = iter([drawn[at : at + 4] for at in range(0, len(drawn), 4)])
        key = next(_keys)
    return key


def _xor(key: bytes, offset: int, address: object, size: int) -> None:
    turn = offset & 3
    masker = lib.nvx_xormask_new(key[turn:] + key[:turn] if turn else key)
    lib.nvx_xormask_process(masker, address, size)
    lib.nvx_xormask_free(masker)
