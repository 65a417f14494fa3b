"""What serving itself says no to; everything about reaching a node is ``reach.Unreached``."""

from __future__ import annotations

from localai_dist.errors import LocalAIDistError


class DiskFull(LocalAIDistError):
    """This frontend's own disk has no room for a file that came with a request."""


class RequestRefused(LocalAIDistError):
    """The backend called the request itself invalid (too long for its context, say); its own words are the text."""

    @property
    def told(self) -> str:
        """All of it, as the backend said it."""
        return str(self)
