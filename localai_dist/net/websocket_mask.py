"""
The XOR of WebSocket frames, by autobahn's native masker.

autobahn's own wrapper copies a payload twice and allocates for each; here it is copied once.
``websocket.require_masker`` says at start when the native part is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from localai_dist.units import KiB

try:
    from _nvx_xormasker import ffi, lib
except ImportError:  # ``require_masker`` refuses before any frame
    ffi = lib = None

SCRATCH: Final = 256 * KiB
"""What one call of ``unmasked`` can take; no read of a transport is larger."""

_KEYS_AT_ONCE: Final = 256

NO_KEY: Final = bytes(4)

# One for the process: a thousand idle tunnels need none of their own, and nothing outlives the call that filled it.
_scratch = bytearray(SCRATCH)
_scratch_view = memoryview(_scratch)
_scratch_address = ffi.from_buffer("uint8_t[]", _scratch) if ffi else None


def unmasked(key: bytes, offset: int, payload: memoryview) -> memoryview:
    """
    ``payload`` unmasked, in memory that the next call overwrites.

    Args:
        key: the frame's masking key.
        offset: how many bytes of the frame came before.
        payload: at most ``SCRATCH`` bytes.
    """
    size = len(payload)
    ffi.memmove(_scratch_address, payload, size)
    _xor(key, offset, _scratch_address, size)
    return _scratch_view[:size]


def masked(parts: Sequence[bytes]) -> tuple[bytes, bytes]:
    """A fresh masking key, and ``parts`` joined and masked with it."""
    key = _fresh_key()
    payload = bytearray().join(parts)
    _xor(key, 0, ffi.from_buffer("uint8_t[]", payload), len(payload))
    return key, bytes(payload)  # a Twisted transport takes nothing else


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
