"""
What an operator asks of nodes: ``/api/nodes*``.

A node is named by its id or by its name.

Source: reference/surface.md §1.2, design §8.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from localai_dist.httpapi.auth import Access
from localai_dist.httpapi.call import Answer, ApiRoute, Call, Empty, Json
from localai_dist.httpapi.errors import ApiError, bad_request, node_not_found, not_found
from localai_dist.httpapi.node_objects import backend_object, node_object, replica_object, tunnel_objects
from localai_dist.httpapi.routing import Route
from localai_dist.httpapi.validation import NO_NUL
from localai_dist.ids import NodeId
from localai_dist.registry.newcomer import newcomer_text
from localai_dist.registry.presence import PresenceState
from localai_dist.registry.records import Node
from localai_dist.store.errors import StoreUnavailable
from localai_dist.wire.verbs import LIST
from localai_dist.wire.verbs import Empty as NoFields

LABEL_KEY_LIMIT = 255
"""Characters of a label's key at most (the width of the registry's column)."""


class UnloadBody(msgspec.Struct):
    """``POST /api/nodes/:id/models/unload``."""

    model_name: Annotated[str, Meta(min_length=1, max_length=255, pattern=NO_NUL)]


async def list_nodes(call: Call) -> Answer:
    """``GET /api/nodes``: every node, by name."""
    return Json(await _objects(call, await call.api.nodes.all()))


async def show(call: Call) -> Answer:
    """``GET /api/nodes/:id``."""
    return Json((await _objects(call, [await find_node(call)]))[0])


async def approve(call: Call) -> Answer:
    """``POST /api/nodes/:id/approve``; a name handed over to a newcomer loses its old tunnel, and it is said so."""
    approval = await call.api.nodes.approve((await find_node(call)).id)
    node = approval.node
    call.api.end_tunnel(node.id)
    named = {"id": node.id, "name": node.name, "node_type": node.node_type, "status": node.status}
    notice = approval.notice(call.now())
    told = {"replaced": approval.replaced is not None, "notice": notice} if notice else {}
    return Json({**named, "message": "node approved", **told})


async def drain(call: Call) -> Answer:
    """``POST /api/nodes/:id/drain``."""
    await call.api.nodes.drain((await find_node(call)).id)
    return Json({"message": "node set to draining"})


async def resume(call: Call) -> Answer:
    """``POST /api/nodes/:id/resume``."""
    await call.api.nodes.resume((await find_node(call)).id)
    return Json({"message": "node resumed"})


async def remove(call: Call) -> Answer:
    """``DELETE /api/nodes/:id``: row, labels and replicas; its tunnel ends."""
    node = (await find_node(call)).id
    if not await call.api.nodes.remove(node):
        raise node_not_found(node)
    call.api.end_tunnel(node)
    return Json({"message": "node deregistered"})


async def labels(call: Call) -> Answer:
    """``GET /api/nodes/:id/labels``."""
    return Json(await call.api.nodes.labels((await find_node(call)).id))


async def put_labels(call: Call) -> Answer:
    """``PUT /api/nodes/:id/labels``: replace."""
    given = _labels(call)
    return Json(await call.api.nodes.put_labels((await find_node(call)).id, given))


async def patch_labels(call: Call) -> Answer:
    """``PATCH /api/nodes/:id/labels``: merge."""
    given = _labels(call)
    return Json(await call.api.nodes.patch_labels((await find_node(call)).id, given))


async def delete_label(call: Call) -> Answer:
    """``DELETE /api/nodes/:id/labels/:key``."""
    await call.api.nodes.delete_label((await find_node(call)).id, call.values["key"])
    return Empty()


async def all_models(call: Call) -> Answer:
    """``GET /api/nodes/models``: every loaded replica; one on a node that departed is loaded for nobody."""
    rows = [row for row in await call.api.replicas.all() if row.state == "loaded"]
    nodes = sorted({row.node_id for row in rows})
    presences = await call.api.ownership.presence_many(nodes, call.api.grace) if nodes else {}
    departed = {node for node, presence in presences.items() if presence.state is PresenceState.DEPARTED}
    return Json([replica_object(row) for row in rows if row.node_id not in departed])


async def node_models(call: Call) -> Answer:
    """``GET /api/nodes/:id/models``: every replica on the node, whatever its state."""
    rows = await call.api.replicas.for_node((await find_node(call)).id)
    return Json([replica_object(row) for row in rows])


async def unload(call: Call) -> Answer:
    """``POST /api/nodes/:id/models/unload``; it fails with the cause while the backend is not really gone."""
    body = call.body(UnloadBody)
    node = await find_node(call)
    if not await call.api.loads.unload(body.model_name, node.id):
        raise not_found(f"the model {body.model_name!r} is not loaded on node {node.name}")
    return Json({"message": "model unloaded"})


async def backends(call: Call) -> Answer:
    """``GET /api/nodes/:id/backends``, as the worker says; an agent worker has none."""
    node = await find_node(call)
    if node.node_type != "backend":
        return Json([])
    reply = await call.api.verbs.call(node.id, LIST, NoFields())
    if reply.error:
        raise ApiError(500, "worker_error", reply.error)
    return Json([backend_object(entry) for entry in reply.backends])


async def find_node(call: Call) -> Node:
    """
    The node that the path names.

    Raises:
        ApiError: 404.
    """
    named = call.values["id"]
    node = await call.api.nodes.get(NodeId(named)) or await call.api.nodes.by_name(named)
    if node is None:
        raise node_not_found(named)
    return node


async def _objects(call: Call, nodes: list[Node]) -> list[dict[str, object]]:
    ids = [node.id for node in nodes]
    try:
        presences = await call.api.ownership.presence_many(ids, call.api.grace) if ids else {}
    except StoreUnavailable:
        tunnels = tunnel_objects(None, ids)
    else:
        tunnels = tunnel_objects(presences, ids)
    return [node_object(node, tunnels[node.id], newcomer_text(node, call.now())) for node in nodes]


def _labels(call: Call) -> dict[str, str]:
    given = call.body(dict[str, str])
    for key in given:
        if not key or len(key) > LABEL_KEY_LIMIT or "\0" in key + given[key]:
            raise bad_request(f"{key[:40]!r}: want a label key of 1 to {LABEL_KEY_LIMIT} characters", key[:40] or None)
    return given


ROUTES: list[ApiRoute] = [
    Route("GET", "/api/nodes", Access.ADMIN, list_nodes),
    Route("GET", "/api/nodes/models", Access.ADMIN, all_models),
    Route("GET", "/api/nodes/:id", Access.ADMIN, show),
    Route("DELETE", "/api/nodes/:id", Access.ADMIN, remove),
    Route("POST", "/api/nodes/:id/approve", Access.ADMIN, approve),
    Route("POST", "/api/nodes/:id/drain", Access.ADMIN, drain),
    Route("POST", "/api/nodes/:id/resume", Access.ADMIN, resume),
    Route("GET", "/api/nodes/:id/labels", Access.ADMIN, labels),
    Route("PUT", "/api/nodes/:id/labels", Access.ADMIN, put_labels),
    Route("PATCH", "/api/nodes/:id/labels", Access.ADMIN, patch_labels),
    Route("DELETE", "/api/nodes/:id/labels/:key", Access.ADMIN, delete_label),
    Route("GET", "/api/nodes/:id/models", Access.ADMIN, node_models),
    Route("POST", "/api/nodes/:id/models/unload", Access.ADMIN, unload),
    Route("GET", "/api/nodes/:id/backends", Access.ADMIN, backends),
]
