"""
What can go wrong on the bus.

::

    BusError
    ├── UnknownSubject   no subject or filter this program may use; the text names it
    ├── Unpublishable    a value that can't be JSON, or is too large
    └── BadEnvelope      a notification that is none of ours
"""

from __future__ import annotations

from localai_dist.errors import LocalAIDistError


class BusError(LocalAIDistError):
    """Anything this folder raises on purpose."""


class UnknownSubject(BusError):
    """A subject or filter that is malformed, or whose first word is not in the closed set; the text names it."""


class Unpublishable(BusError):
    """A value that can't be written as JSON, or is larger than the bus carries."""


class BadEnvelope(BusError):
    """A notification that is no message of the bus."""
