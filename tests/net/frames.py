"""WebSocket frames, made by hand."""

from __future__ import annotations


def frame(first: int, payload: bytes, key: bytes | None = bytes(4), *, announce: int | None = None) -> bytes:
    """
    One frame.

    Args:
        first: its first byte: the last-fragment bit, the reserved bits, the opcode.
        key: it is masked with; None masks nothing, as a server does.
        announce: a length that need not be true; None is the payload's.
    """
    size, bit = len(payload) if announce is None else announce, 0 if key is None else 0x80
    if size < 126:
        head = bytes([first, bit | size])
    elif size < 65536:
        head = bytes([first, bit | 126]) + size.to_bytes(2, "big")
    else:
        head = bytes([first, bit | 127]) + size.to_bytes(8, "big")
    if key is None:
        return head + payload
    return head + key + (bytes(byte ^ key[at & 3] for at, byte in enumerate(payload)) if any(key) else payload)
