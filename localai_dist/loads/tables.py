"""What of the loads is in the database."""

from __future__ import annotations

from dataclasses import dataclass

from localai_dist.ids import InstanceId
from localai_dist.loads.endings import Endings
from localai_dist.loads.retire import RetirementTable
from localai_dist.loads.rows import PoolLike
from localai_dist.loads.table import JobTable
from localai_dist.loads.tools import LoadSettings


@dataclass(frozen=True, slots=True)
class Tables:
    """
    One frontend's view of it.

    Attributes:
        jobs: the loads that run.
        endings: how loads ended.
        retirement: replicas that some frontend no longer serves.
    """

    jobs: JobTable
    endings: Endings
    retirement: RetirementTable


def make_tables(pool: PoolLike, instance: InstanceId, settings: LoadSettings) -> Tables:
    """Those of ``instance``."""
    return Tables(
        JobTable(pool, instance, live_window=settings.live_window, orphan_after=settings.orphan_after),
        Endings(pool),
        RetirementTable(pool, instance, settings.live_window),
    )
