"""The closed list of what deletes, demotes or evicts; the list itself is ``store/acting.py``, which siblings share."""

from __future__ import annotations

from localai_dist.store.acting import ACTS, Act, Ground, acts_on

__all__ = ["ACTS", "Act", "Ground", "acts_on"]
