"""The node of one attempt: chosen by placement, waited for a little when its tunnel is just away."""

from __future__ import annotations

from twisted.internet.task import deferLater

from localai_dist.catalog.model import ModelConfig
from localai_dist.loads.rows import Claim
from localai_dist.loads.tools import Tools
from localai_dist.reach import Reconnecting, RegistryUnknown, Unreached
from localai_dist.scheduler.placement import Need, NoPlace, Placement
from localai_dist.staging.hold_timer import HoldTimer
from localai_dist.staging.plan import total_size
from localai_dist.staging.progress import Progress
from localai_dist.staging.source import Sources
from localai_dist.store.errors import StoreUnavailable


async def place_for(
    tools: Tools, model: ModelConfig, claim: Claim, sources: Sources, hold: HoldTimer, progress: Progress
) -> Placement:
    """
    Where to load; waits the route wait for the only node that suits, and longer for one that has our bytes.

    Args:
        progress: told what is waited for.

    Raises:
        NoPlace: no node can take it; the text says what each lacks.
        Unreached: the nodes that could can't be reached now, or the database did not answer.
    """
    prefer = claim.node or None
    patience = tools.clock.seconds() + tools.settings.route_wait
    while True:
        found = await _choose(tools, model, claim, sources)
        if isinstance(found, Placement):
            progress.goes_on()
            return found
        hold.check()
        waits = isinstance(found.outcome, Reconnecting | RegistryUnknown)
        error = found if found.outcome is None else Unreached(found.outcome)
        if not waits or (prefer is None and tools.clock.seconds() >= patience):
            raise error
        progress.interrupted(error)
        await deferLater(tools.clock, tools.settings.poll)


async def _choose(tools: Tools, model: ModelConfig, claim: Claim, sources: Sources) -> Placement | NoPlace:
    try:
        staged = dict(await tools.endings.staged(model.name))
        if claim.node:
            staged[claim.node] = max(claim.bytes, staged.get(claim.node, 0))
        need = Need(model.name, model.revision, total_size(sources.files), claim.node or None, staged)
        found = await tools.fleet.choose(need)
        if isinstance(found, Placement):
            await tools.fleet.forget_departed(model.name)
        return found
    except StoreUnavailable as error:
        return NoPlace(str(error), RegistryUnknown(str(error)))
