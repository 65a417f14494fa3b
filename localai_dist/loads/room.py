"""The slot of a new replica, taken from an older configuration: no new request, the running ones end, then stop."""

from __future__ import annotations

from twisted.internet.task import deferLater

from localai_dist.loads.errors import LoadFailed, UnloadFailed
from localai_dist.loads.rows import Claim
from localai_dist.loads.stop import stop_exactly
from localai_dist.loads.tools import Tools
from localai_dist.registry.errors import registry_or_unreached
from localai_dist.scheduler.facts import ReplicaFacts
from localai_dist.scheduler.placement import Placement
from localai_dist.staging.hold_timer import HoldTimer


async def make_room(tools: Tools, place: Placement, claim: Claim, hold: HoldTimer) -> None:
    """
    Stop the replica of an older revision that holds the slot; its row goes when its process is gone.

    Raises:
        LoadFailed: it can't be stopped.
        Unreached: the worker can't be asked, or the database did not answer.
    """
    old = place.replaces
    if old is None:
        return
    try:
        with registry_or_unreached():
            slot = (old.node, old.model, old.index, old.address)
            await _drain(tools, old, hold)
            await stop_exactly(tools.verbs, *slot, attempt=claim.attempt, name=place.node_name)
            await tools.fleet.replicas.remove(*slot)
    except UnloadFailed as error:
        text = "the replica of an older configuration could not be stopped: "
        raise LoadFailed(f"{text}{error}", f"{text}{error.told}") from error


async def _drain(tools: Tools, old: ReplicaFacts, hold: HoldTimer) -> None:
    await tools.fleet.replicas.set_state(old.node, old.model, old.index, "unloading")
    until = tools.clock.seconds() + tools.settings.drain
    while tools.clock.seconds() < until and await _busy(tools, old):
        hold.check()
        await deferLater(tools.clock, tools.settings.poll)


async def _busy(tools: Tools, old: ReplicaFacts) -> bool:
    for row in await tools.fleet.replicas.of_model(old.model):
        if (row.node_id, row.replica_index, row.address) == (old.node, old.index, old.address):
            return row.in_flight > 0
    return False
