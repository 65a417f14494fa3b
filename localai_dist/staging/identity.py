"""What a file is called on its way to a node: its SHA-256 or, while that is being found, its fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twisted.internet.defer import Deferred

from localai_dist.staging.digests import Digests
from localai_dist.wire.files import CONTENT_SHA256, FINGERPRINT


class Identity:
    """
    The names of one source file.

    Args:
        hashed: called while somebody waits for the hash, whenever more of the file was hashed.

    Attributes:
        sha256: lower-case hexadecimal; empty until it is found.
        fingerprint: the same of what earlier pieces were called; empty if nobody needed it.
    """

    def __init__(self, digests: Digests, path: Path, hashed: Callable[[], None]) -> None:
        self.sha256 = ""
        self.fingerprint = ""
        self._digests = digests
        self._path = path
        self._hashed = hashed
        self._hashing: Deferred[str] | None = None
        self._awaited = False

    async def recall(self) -> None:
        """Take the hash if it is known already; raises ``SourceMissing``."""
        self.sha256 = await self._digests.known(self._path) or ""

    async def sample(self) -> None:
        """Find the fingerprint; raises ``SourceMissing``."""
        self.fingerprint = self.fingerprint or await self._digests.fingerprint(self._path)

    def begin(self) -> None:
        """Have the hash found while something else goes on. How far it is tells nothing of that: it is no progress."""
        if not self.sha256 and self._hashing is None:
            self._hashing = Deferred.fromCoroutine(self._digests.of(self._path, self._observed))

    def _observed(self, count: int) -> None:
        if self._awaited:
            self._hashed()

    @property
    def is_ready(self) -> bool:
        """Whether ``settle`` would not wait."""
        return bool(self.sha256) or (self._hashing is not None and self._hashing.called)

    async def settle(self) -> None:
        """
        Wait for the hash.

        Cancelling it gives the hashing up.

        Raises:
            SourceMissing, SourceChanged: see ``Digests.of``.
        """
        self._awaited = True
        self.begin()
        if self._hashing is not None:
            hashing, self._hashing = self._hashing, None
            self.sha256 = await hashing

    def close(self) -> None:
        """Nobody wants the hash any more."""
        if self._hashing is not None:
            self._hashing.addErrback(lambda _: None)
            self._hashing.cancel()

    def headers(self) -> dict[str, str]:
        """What a piece of the file says of the whole."""
        if not self.sha256:
            return {CONTENT_SHA256: self.fingerprint}
        if not self.fingerprint:
            return {CONTENT_SHA256: self.sha256}
        return {CONTENT_SHA256: self.sha256, FINGERPRINT: self.fingerprint}
