"""What serving itself says no to; everything about reaching a node is ``reach.Unreached``."""

from __future__ import annotations

from localai_dist.errors import LocalAIDistError


class RequestRefused(LocalAIDistError):
    """The backend called the request itself invalid (too long for its context, say); its own words are the text."""
