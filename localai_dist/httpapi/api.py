"""The objects a frontend's API works with, and the site made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twisted.internet.interfaces import IReactorTime

from localai_dist.httpapi.auth import Keys
from localai_dist.httpapi.readiness import Readiness
from localai_dist.httpapi.seams import (
    CatalogLike,
    EndTunnel,
    LoadsLike,
    NodesLike,
    PresenceOf,
    ReplicaTable,
    SchedulingLike,
    VerbsLike,
)
from localai_dist.serving.received import ReceivedFiles

if TYPE_CHECKING:
    from localai_dist.serving.inference import Inference


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendApi:
    """
    What the routes use; made once by ``roles/``.

    Attributes:
        catalog: the served models.
        inference: calls on them.
        verbs: control calls to workers.
        received: files that come with requests.
        max_body: the longest body of a request (bytes).
        end_tunnel: closes a node's tunnel if this frontend holds it.
        registration_token: what workers register with; empty admits none.
        loose_identity: whether a node may leave out its own token (stock workers).
        grace: the reconnect grace (s).
        load_wait: how long ``/backend/load`` waits (s); None is without end.
    """

    catalog: CatalogLike
    inference: Inference
    nodes: NodesLike
    replicas: ReplicaTable
    scheduling: SchedulingLike
    ownership: PresenceOf
    loads: LoadsLike
    verbs: VerbsLike
    received: ReceivedFiles
    max_body: int
    end_tunnel: EndTunnel
    keys: Keys
    registration_token: str
    auto_approve: bool
    loose_identity: bool
    grace: float
    load_wait: float | None
    readiness: Readiness
    clock: IReactorTime
