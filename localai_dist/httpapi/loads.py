"""Loading and unloading models by hand, and what is being loaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import msgspec
from msgspec import Meta

from localai_dist.httpapi.auth import Access
from localai_dist.httpapi.call import Answer, ApiRoute, Call, Json
from localai_dist.httpapi.errors import not_found
from localai_dist.httpapi.routing import Route
from localai_dist.httpapi.validation import NO_NUL
from localai_dist.loads.status import LoadStatus

STAGING = "staging:"
"""What the id of a load among the operations begins with."""


class ModelBody(msgspec.Struct):
    """``POST /backend/load`` and ``/backend/shutdown``."""

    model: Annotated[str, Meta(min_length=1, max_length=255, pattern=NO_NUL)]


async def load(call: Call) -> Answer:
    """``POST /backend/load``: answers when the model is loaded, or 503 ``model_loading`` when the wait is over."""
    model = call.model(call.body(ModelBody).model)
    replica = await call.api.loads.ensure(model, wait=call.api.load_wait)
    return Json(
        {"message": "model loaded", "model": model.name, "node": replica.node_id, "node_name": replica.node_called}
    )


async def shutdown(call: Call) -> Answer:
    """``POST /backend/shutdown``: stops every replica, wherever; 404 when there is none."""
    name = call.body(ModelBody).model
    if not await call.api.loads.unload(name):
        raise not_found(f"the model {name!r} is not loaded anywhere")
    return Json({"message": "model stopped"})


async def load_status(call: Call) -> Answer:
    """``GET /api/models/:id/load-status``: the same on every frontend."""
    name = call.values["id"]
    status = await call.api.loads.status(name)
    if status is None:
        raise not_found(f"the model {name!r} is not being loaded")
    return Json(status.as_json())


async def problems(call: Call) -> Answer:
    """``GET /api/models/problems``: the model files this frontend does not serve, and why; and odd ones it serves."""
    return Json({"problems": [asdict(one) for one in call.api.catalog.problems]})


async def cancel(call: Call) -> Answer:
    """``POST /api/operations/:jobID/cancel``: the load stops wherever it runs, and nothing of it is left."""
    job = call.values["jobID"]
    name = job.removeprefix(STAGING)
    if name == job or not await call.api.loads.cancel(name, "cancelled by an operator"):
        raise not_found(f"there is no running operation {job!r}")
    return Json({"success": True, "message": f"the load of {name} is being cancelled"})


async def operations(call: Call) -> Answer:
    """``GET /api/operations``: the running loads, the least far first."""
    shown = [_operation(job) for job in await call.api.loads.jobs()]
    return Json({"operations": sorted(shown, key=lambda one: (one["progress"], one["id"]))})


def _operation(job: LoadStatus) -> dict[str, object]:
    """
    A load as one entry of the operations list.

    Source: reference/surface.md §1.4.
    """
    name = STAGING + job.model
    return {
        "id": name,
        "name": job.model,
        "fullName": job.model,
        "jobID": name,
        "progress": int(job.progress),
        "taskType": "staging",
        "isDeletion": False,
        "isBackend": False,
        "isQueued": job.state == "pending",
        "cancellable": job.state != "failed" and not job.cancelled,
        "cancelled": job.cancelled,
        "message": job.sentence(),
        "nodeName": job.node,
        "state": job.state,
        "phase": job.phase,
        "currentBytes": job.bytes_sent,
        "totalBytes": job.total_bytes,
        "fileIndex": job.file_index,
        "totalFiles": job.total_files,
        "fileName": job.file_name,
        **({"bytesPerSecond": round(job.rate)} if job.rate is not None else {}),
        **({"error": job.error} if job.error else {}),
        **({"waits": job.waits} if job.waits else {}),
        **({"etaSeconds": round(job.eta_seconds, 1)} if job.eta_seconds is not None else {}),
        **({"etaRange": [round(seconds, 1) for seconds in job.eta_range]} if job.eta_range is not None else {}),
    }


ROUTES: list[ApiRoute] = [
    Route("POST", "/backend/load", Access.ADMIN, load),
    Route("POST", "/backend/shutdown", Access.ADMIN, shutdown),
    Route("POST", "/v1/backend/load", Access.ADMIN, load),
    Route("POST", "/v1/backend/shutdown", Access.ADMIN, shutdown),
    Route("GET", "/api/models/:id/load-status", Access.KEY, load_status),
    Route("GET", "/api/models/problems", Access.ADMIN, problems),
    Route("GET", "/api/operations", Access.ADMIN, operations),
    Route("POST", "/api/operations/:jobID/cancel", Access.ADMIN, cancel),
]
