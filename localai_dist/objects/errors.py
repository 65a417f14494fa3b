"""
What an object store can answer, or fail to::

    ObjectStoreError
    ├── ObjectAbsent   there is no such object
    ├── StoreAway      not reached, broken off, or asked to come back later: it may pass
    └── StoreRefused   any other answer, in the store's own words
"""

from __future__ import annotations

from localai_dist.errors import LocalAIDistError


class ObjectStoreError(LocalAIDistError):
    """Anything about the object store."""


class ObjectAbsent(ObjectStoreError):
    """There is no such object."""


class StoreAway(ObjectStoreError):
    """The store could not be asked, or said that it can't now."""


class StoreRefused(ObjectStoreError):
    """The store's answer is no; the text has its status and its words."""
