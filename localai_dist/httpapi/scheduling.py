"""Where models may run, and in how many copies: ``/api/nodes/scheduling*``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from localai_dist.httpapi.auth import Access
from localai_dist.httpapi.call import Answer, ApiRoute, Call, Empty, Json
from localai_dist.httpapi.errors import not_found
from localai_dist.httpapi.node_objects import scheduling_object
from localai_dist.httpapi.routing import Route
from localai_dist.httpapi.validation import NO_NUL
from localai_dist.registry.records import SchedulingRow

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class SchedulingBody(msgspec.Struct, kw_only=True):
    """
    ``POST /api/nodes/scheduling``; the last four keep their value when absent, the rest is replaced.

    Source: reference/surface.md §1.2 and §1.3.
    """

    model_name: Annotated[str, Meta(min_length=1, max_length=255, pattern=NO_NUL)]
    node_selector: dict[str, str] | None = None
    min_replicas: Count = 0
    max_replicas: Count = 0
    spread_all: bool = False
    route_policy: str | None = None
    balance_abs_threshold: Count | None = None
    balance_rel_threshold: float | None = None
    min_prefix_match: float | None = None


_KEPT = ("route_policy", "balance_abs_threshold", "balance_rel_threshold", "min_prefix_match")


async def list_rows(call: Call) -> Answer:
    """``GET /api/nodes/scheduling``."""
    return Json([scheduling_object(row) for row in await call.api.scheduling.all()])


async def show(call: Call) -> Answer:
    """``GET /api/nodes/scheduling/:model``."""
    row = await call.api.scheduling.get(call.values["model"])
    if row is None:
        raise not_found(f"no scheduling rule for the model {call.values['model']!r}")
    return Json(scheduling_object(row))


async def put(call: Call) -> Answer:
    """``POST /api/nodes/scheduling``."""
    body = call.body(SchedulingBody)
    before = await call.api.scheduling.get(body.model_name) or SchedulingRow(body.model_name)
    given = {name: getattr(body, name) for name in _KEPT}
    row = SchedulingRow(
        model_name=body.model_name,
        node_selector=body.node_selector or {},
        min_replicas=body.min_replicas,
        max_replicas=body.max_replicas,
        spread_all=body.spread_all,
        **{name: getattr(before, name) if value is None else value for name, value in given.items()},
    )
    return Json(scheduling_object(await call.api.scheduling.put(row)))


async def delete(call: Call) -> Answer:
    """``DELETE /api/nodes/scheduling/:model``."""
    await call.api.scheduling.delete(call.values["model"])
    return Empty()


ROUTES: list[ApiRoute] = [
    Route("GET", "/api/nodes/scheduling", Access.ADMIN, list_rows),
    Route("POST", "/api/nodes/scheduling", Access.ADMIN, put),
    Route("GET", "/api/nodes/scheduling/:model", Access.ADMIN, show),
    Route("DELETE", "/api/nodes/scheduling/:model", Access.ADMIN, delete),
]
