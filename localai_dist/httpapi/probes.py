"""Is this process alive, and should it be sent requests: no credential needed."""

from __future__ import annotations

from localai_dist.httpapi.auth import Access
from localai_dist.httpapi.call import Answer, ApiRoute, Call, Json
from localai_dist.httpapi.routing import Route


async def healthz(call: Call) -> Answer:
    """``GET /healthz``: depends on nothing."""
    return Json({"status": "ok"})


async def readyz(call: Call) -> Answer:
    """``GET /readyz``: 200 only when ready; the reasons are whole for who shows an operator's key."""
    readiness = call.api.readiness
    operator = call.api.keys.admits(call.presented_key())
    return Json(readiness.as_json(operator=operator), 200 if readiness.status == "ready" else 503)


ROUTES: list[ApiRoute] = [
    Route("GET", "/healthz", Access.OPEN, healthz),
    Route("GET", "/readyz", Access.OPEN, readyz),
]
