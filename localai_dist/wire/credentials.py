"""
Secrets as they travel and as they are stored: header names, bearer parsing, digests, constant-time comparison.

An empty secret, presented or configured or stored, admits nobody.

Source: design §5 items 12 and 13, wire contract §1 and §2.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final

AUTHORIZATION: Final = "Authorization"
NODE_TOKEN: Final = "X-LocalAI-Node-Token"
"""The node's own credential, on registration and on every ``/api/node/:id`` call."""
PEER_TOKEN: Final = "X-LocalAI-Peer-Token"
"""The dialling frontend's own secret, on a peer link."""
VERSION: Final = "X-LocalAI-Dist-Version"
"""The release of whoever speaks, on both dials and their answers."""

MIN_ENTROPY_BYTES: Final = 16


def mint_token(entropy: bytes) -> str:
    """
    A token from random bytes of the caller's: lower-case base32, no padding.

    Args:
        entropy: at least 16 bytes from a cryptographic source.

    Raises:
        ValueError: fewer bytes.
    """
    if len(entropy) < MIN_ENTROPY_BYTES:
        raise ValueError(f"a token needs at least {MIN_ENTROPY_BYTES} random bytes, got {len(entropy)}")
    return base64.b32encode(entropy).decode("ascii").rstrip("=").lower()


def digest(token: str) -> str:
    """What is stored of a token: the hexadecimal SHA-256 of it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def matches(token: str | None, stored: str | None) -> bool:
    """Whether ``token`` is the one whose digest is ``stored``, in constant time; nothing matches an empty one."""
    if not token or not stored:
        return False
    return hmac.compare_digest(digest(token).encode("ascii"), stored.lower().encode("utf-8", "surrogateescape"))


def same_secret(presented: str | None, configured: str | None) -> bool:
    """Whether a shared secret was presented, in constant time; an empty configured one admits nobody."""
    if not presented or not configured:
        return False
    return hmac.compare_digest(digest(presented), digest(configured))


def bearer(header: str | None) -> str | None:
    """The token in an ``Authorization: Bearer`` header (the scheme in any case), or None if there is none."""
    scheme, _, token = (header or "").strip().partition(" ")
    return (token.strip() or None) if scheme.lower() == "bearer" else None


def authorization(token: str) -> str:
    """The header's value that presents ``token``."""
    return f"Bearer {token}"
