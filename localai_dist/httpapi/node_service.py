"""
What a node says of itself: ``/api/node/*``.

The bearer is the registration token; a node proves that it is the one in the path by its own token.

Source: reference/surface.md §1.1 and §5.1, design §5 item 13.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from localai_dist.errors import InvalidName
from localai_dist.httpapi import nodes, scheduling
from localai_dist.httpapi.auth import Access, check_registration, refuse_token
from localai_dist.httpapi.call import Answer, ApiRoute, Call, Json
from localai_dist.httpapi.errors import bad_request, node_not_found
from localai_dist.httpapi.node_objects import replica_object
from localai_dist.httpapi.routing import Route
from localai_dist.ids import NodeId, parse_node_id
from localai_dist.registry.newcomer import taken_text
from localai_dist.registry.records import Readings, Registration
from localai_dist.wire.credentials import NODE_TOKEN, digest

API = "/api/nodes/"

RESERVED_NAMES = frozenset(
    part
    for route in (*nodes.ROUTES, *scheduling.ROUTES)
    if route.pattern.startswith(API) and not (part := route.pattern.removeprefix(API).split("/")[0]).startswith(":")
)
"""Names that are fixed parts of the operators' routes, ``scheduling`` and the like."""

Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class RegisterBody(msgspec.Struct, kw_only=True):
    """``POST /api/node/register``; what stock workers send beside this (addresses) means nothing here."""

    name: Annotated[str, Meta(min_length=1, max_length=255)]
    node_type: str = "backend"
    token: str = ""
    total_vram: Size = 0
    available_vram: Size | None = None
    total_ram: Size = 0
    available_ram: Size = 0
    total_disk: Size = 0
    available_disk: Size = 0
    gpu_vendor: str = ""
    gpu_compute_capability: str = ""
    capability: str = ""
    labels: dict[str, str] | None = None
    max_replicas_per_model: Annotated[int, Meta(ge=0, le=10_000)] = 1
    vram_budget: str = ""
    boot_id: str = ""


class HeartbeatBody(msgspec.Struct, kw_only=True):
    """``POST /api/node/:id/heartbeat``; what is absent keeps its last value."""

    available_vram: Size | None = None
    total_vram: Size | None = None
    available_ram: Size | None = None
    total_disk: Size | None = None
    available_disk: Size | None = None
    gpu_vendor: str | None = None


async def register(call: Call) -> Answer:
    """``POST /api/node/register``: 201 with the node token to keep; a parked newcomer is ``pending``, and told why."""
    api = call.api
    body = call.body(RegisterBody)
    check_registration(api.registration_token, call.header("Authorization"), body.token)
    result = await api.nodes.register(
        _registration(body, digest(api.registration_token), call.seen_from()),
        auto_approve=api.auto_approve,
        presented_token=call.header(NODE_TOKEN),
        loose=api.loose_identity,
    )
    node = result.node
    answer: dict[str, object] = {
        "id": node.id,
        "name": node.name,
        "node_type": node.node_type,
        "status": "pending" if result.parked else node.status,
        "created_at": node.created_at,
    }
    if result.parked:
        answer["message"] = taken_text(node, call.now())
    return Json({**answer, "tunnel_token": result.token} if result.token else answer, 201)


async def heartbeat(call: Call) -> Answer:
    """``POST /api/node/:id/heartbeat``; the answer says whether the registry knows of the node's tunnel."""
    node = await _itself(call)
    body = call.body(HeartbeatBody)
    readings = Readings(**{name: getattr(body, name) for name in body.__struct_fields__})
    held = await call.api.nodes.heartbeat(node, readings)
    if held is None:
        raise node_not_found(node)
    return Json({"message": "heartbeat received", "tunnel_held": held})


async def drain(call: Call) -> Answer:
    """``POST /api/node/:id/drain``."""
    await call.api.nodes.drain(await _itself(call))
    return _message("node set to draining")


async def resume(call: Call) -> Answer:
    """``POST /api/node/:id/resume``."""
    await call.api.nodes.resume(await _itself(call))
    return _message("node resumed")


async def deregister(call: Call) -> Answer:
    """``POST /api/node/:id/deregister`` and ``DELETE /api/node/:id``: the row stays, and with it the approval."""
    node = await _itself(call)
    if not await call.api.nodes.deregister(node):
        raise node_not_found(node)
    return _message("node set to offline")


async def models(call: Call) -> Answer:
    """``GET /api/node/:id/models``."""
    rows = await call.api.replicas.for_node(await _itself(call))
    return Json([replica_object(row) for row in rows])


async def _itself(call: Call) -> NodeId:
    """
    The node in the path, if the caller proved to be it.

    Raises:
        ApiError: 401 without a token, 403 with another one, 404 for a node nobody knows.
    """
    try:
        node = parse_node_id(call.values["id"])
    except InvalidName as error:
        raise node_not_found(NodeId(call.values["id"])) from error
    token = call.header(NODE_TOKEN)
    if call.api.loose_identity and not token:
        if await call.api.nodes.get(node) is None:
            raise node_not_found(node)
        return node
    refusal = refuse_token(await call.api.nodes.check_token(node, token), token, node)
    if refusal is not None:
        raise refusal
    return node


def _registration(body: RegisterBody, token_hash: str, seen_from: str) -> Registration:
    if body.name in RESERVED_NAMES:
        # A node is asked for by name too, and /api/nodes/<name> would be something else.
        raise bad_request(f"name: {body.name!r} can't be a node's name: {API}{body.name} is a route", "name")
    given = {name: getattr(body, name) for name in body.__struct_fields__ if name not in ("token", "labels")}
    return Registration(labels=body.labels or {}, token_hash=token_hash, seen_from=seen_from, **given)


def _message(text: str) -> Json:
    return Json({"message": text})


ROUTES: list[ApiRoute] = [
    Route("POST", "/api/node/register", Access.NODE, register),
    Route("POST", "/api/node/:id/heartbeat", Access.NODE, heartbeat),
    Route("POST", "/api/node/:id/drain", Access.NODE, drain),
    Route("POST", "/api/node/:id/resume", Access.NODE, resume),
    Route("POST", "/api/node/:id/deregister", Access.NODE, deregister),
    Route("DELETE", "/api/node/:id", Access.NODE, deregister),
    Route("GET", "/api/node/:id/models", Access.NODE, models),
]
