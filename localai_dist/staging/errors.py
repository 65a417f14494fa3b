"""What ends a staging, or the load around it, before its time."""

from __future__ import annotations

from localai_dist.errors import LocalAIDistError


class StagingError(LocalAIDistError):
    """Staging a model's files did not succeed; the text names the file, how far it came and what stopped it."""


class SourceMissing(StagingError):
    """A file that the model needs is not in this frontend's models folder."""


class SourceChanged(StagingError):
    """A source file became shorter or vanished while it was being read."""


class UploadRefused(StagingError):
    """The worker's file server answered with something no retry cures."""


class NoSpace(UploadRefused):
    """The node's disk is full; no retry cures that, and what was sent there is in the way."""


class HoldExpired(LocalAIDistError):
    """The hold of a load is over: a stall or the cap. Reads "deadline exceeded"; a caller's cancel never does."""
