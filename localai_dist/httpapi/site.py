"""The site of a frontend: every route, and the two doors for WebSockets, behind one listener."""

from __future__ import annotations

from typing import Any

from twisted.web.resource import IResource

from localai_dist.httpapi import loads, node_service, nodes, probes, scheduling
from localai_dist.httpapi.api import FrontendApi
from localai_dist.httpapi.call import ApiRoute
from localai_dist.httpapi.openai import routes as openai
from localai_dist.httpapi.resource import ApiResource
from localai_dist.httpapi.routing import RouteTable
from localai_dist.net.request import StreamingSite
from localai_dist.relay.peers import PEER_PATH
from localai_dist.tunnel.urls import CONNECT_PATH

ROUTES: list[ApiRoute] = [
    *openai.ROUTES,
    *probes.ROUTES,
    *node_service.ROUTES,
    *nodes.ROUTES,
    *scheduling.ROUTES,
    *loads.ROUTES,
]


def make_site(
    api: FrontendApi,
    *,
    connect_resource: IResource,
    peer_resource: IResource | None,
    reactor: Any,
) -> StreamingSite:
    """
    The site to listen with.

    Args:
        connect_resource: where workers' tunnels arrive.
        peer_resource: where other frontends' links arrive; None when this one has no peers.
    """
    mounted = {CONNECT_PATH: connect_resource}
    if peer_resource is not None:
        mounted[PEER_PATH] = peer_resource
    return StreamingSite(ApiResource(api, RouteTable(ROUTES), mounted), max_body=api.max_body, reactor=reactor)
