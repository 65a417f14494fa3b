"""One frontend: what it is made of. Its starting and stopping is ``roles.frontend_service``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from twisted.application.service import IService
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from localai_dist import __version__
from localai_dist.bus.service import Bus
from localai_dist.errors import UserMistake
from localai_dist.health.departure import ROUTES, Departures
from localai_dist.health.monitor import HealthMonitor
from localai_dist.httpapi.api import FrontendApi
from localai_dist.httpapi.auth import Keys
from localai_dist.httpapi.readiness import Readiness
from localai_dist.httpapi.site import make_site
from localai_dist.ids import InstanceId, NodeId, NodeNames
from localai_dist.loads.fleet import Fleet
from localai_dist.loads.service import Loads
from localai_dist.loads.tools import LoadSettings
from localai_dist.registry.instances import Instances
from localai_dist.registry.membership import Membership
from localai_dist.registry.nodes import Nodes
from localai_dist.registry.ownership import Ownership
from localai_dist.registry.replicas import Replicas
from localai_dist.registry.scheduling import Scheduling
from localai_dist.relay.acceptor import PeerResource
from localai_dist.relay.control import VerbClient
from localai_dist.relay.forward import Forwarder
from localai_dist.relay.http import NodeHttp
from localai_dist.relay.peers import PeerPool
from localai_dist.relay.serve import RelayService
from localai_dist.roles.advertise import REMEDY, discover, trouble_with
from localai_dist.roles.frontend_service import FrontendService, Parts
from localai_dist.roles.membership import session_config
from localai_dist.roles.notices import Notices
from localai_dist.roles.stager import make_request_files, make_stager
from localai_dist.serving.connector import BackendConnector
from localai_dist.serving.inference import Inference, Waits
from localai_dist.serving.received import ReceivedFiles
from localai_dist.serving.watch import CatalogWatch
from localai_dist.settings.frontend import FrontendSettings
from localai_dist.store.pool import Pool
from localai_dist.tunnel.acceptor import ConnectResource
from localai_dist.tunnel.held import HeldTunnels
from localai_dist.tunnel.identities import IdentityWatch
from localai_dist.wire.credentials import digest, mint_token

log = Logger()


def make(settings: FrontendSettings, reactor: Any) -> IService:
    """
    The frontend as a service for twistd.

    Raises:
        UserMistake: the configured advertised address names no host.
    """
    return _Graph(settings, reactor).service()


class _Graph:
    """The objects of one frontend, in the order in which they need each other."""

    def __init__(self, settings: FrontendSettings, reactor: Any) -> None:
        self.settings = settings
        self.reactor = reactor
        self.instance = InstanceId(settings.instance_id)
        self.session = session_config(settings.tunnel_keepalive)
        self.pool = Pool(settings.auth_database_url, reactor=reactor, application_name="localai-frontend")
        self.names = NodeNames()
        self.nodes = Nodes(self.pool, names=self.names)
        self.replicas = Replicas(self.pool, caller=self.instance)
        self.scheduling = Scheduling(self.pool)
        self.instances = Instances(self.pool, live_window=settings.instance_live_window)
        self.ownership = Ownership(self.pool, live_window=settings.instance_live_window, names=self.names)
        self.held = HeldTunnels(self.ownership, self.instance, clock=reactor, names=self.names)
        self.secret = mint_token(secrets.token_bytes(32))
        self.address = advertised(settings)
        self.peers = self._peers()
        self.forwarder = Forwarder(
            self.held,
            self.peers,
            self.ownership,
            clock=reactor,
            grace=settings.worker_reconnect_grace,
            names=self.names,
        )
        self.http = NodeHttp(self.forwarder, reactor=reactor, token=settings.registration_token)
        self.verbs = VerbClient(self.http, clock=reactor)
        self.connect = BackendConnector(self.forwarder, clock=reactor)
        self.catalog = CatalogWatch(Path(settings.models_path), clock=reactor, in_thread=self.in_thread)
        self.loads = self._loads()
        self.catalog.on_change = self.loads.models_changed
        self.bus = Bus(settings.auth_database_url, self.pool, reactor=reactor)
        self.identities = IdentityWatch(self.held, self._still_theirs, clock=reactor)
        self.notices = self._notices()
        self.loads.on_ended = self.notices.load_ended
        self.received = ReceivedFiles(Path(settings.data_path) / "received", in_thread=self.in_thread)
        self.request_files = make_request_files(
            self.http, self.verbs, reactor=self.reactor, in_thread=self.in_thread, called=self.names
        )
        self.readiness = Readiness("database", "membership", clock=reactor)

    def in_thread(self, call: Callable[..., Any], *arguments: Any) -> Deferred[Any]:
        """Run a blocking function off the reactor's thread."""
        return deferToThreadPool(self.reactor, self.reactor.getThreadPool(), call, *arguments)

    def service(self) -> FrontendService:
        """The whole, not started."""
        parts = Parts(
            pool=self.pool,
            bus=self.bus,
            notices=self.notices,
            identities=self.identities,
            catalog=self.catalog,
            membership=self._membership(),
            monitor=self._monitor(),
            loads=self.loads,
            held=self.held,
            peers=self.peers,
            received=self.received,
            request_files=self.request_files,
            readiness=self.readiness,
        )
        service = FrontendService(parts, self.settings, reactor=self.reactor)
        service.site = make_site(
            self._api(),
            connect_resource=self._connect_resource(lambda: service.accepting),
            peer_resource=self._peer_resource(),
            reactor=self.reactor,
        )
        return service

    def _membership(self) -> Membership:
        settings = self.settings
        return Membership(
            self.instances,
            id=self.instance,
            address=self.address,
            version=__version__,
            peer_token_hash=digest(self.secret),
            grace=settings.worker_reconnect_grace,
            reclaim=self.held.reclaim,
            each_beat=self.held.adopt_lost,
            clock=self.reactor,
            beat=settings.instance_live_window / 6,
        )

    def _monitor(self) -> HealthMonitor:
        settings = self.settings
        return HealthMonitor(
            self.nodes,
            self.ownership,
            departures_for(self.forwarder),
            clock=self.reactor,
            interval=settings.health_interval,
            stale_after=settings.node_stale_after,
            names=self.names,
            grace=settings.worker_reconnect_grace,
        )

    def _connect_resource(self, accepting: Callable[[], bool]) -> ConnectResource:
        return ConnectResource(
            nodes=self.nodes,
            held=self.held,
            config=self.session,
            clock=self.reactor,
            accepting=accepting,
            on_held=self.notices.claimed,
        )

    def _notices(self) -> Notices:
        return Notices(
            self.bus.publisher,
            self.bus.subscriber,
            identities=self.identities,
            forwarder=self.forwarder,
            look_at_load=self.loads.look_now,
            look_at_loads=self.loads.look_all_now,
        )

    async def _still_theirs(self, credentials: Mapping[NodeId, str]) -> Collection[NodeId]:
        return await self.nodes.still_theirs(credentials, loose=self.settings.node_identity == "loose")

    def _peers(self) -> PeerPool | None:
        if self.address is None:
            return None
        return PeerPool(
            reactor=self.reactor,
            instance=self.instance,
            registration_token=self.settings.registration_token,
            secret=self.secret,
            config=self.session,
        )

    def _peer_resource(self) -> PeerResource | None:
        if self.address is None:
            return None
        return PeerResource(
            instances=self.instances,
            registration_token=self.settings.registration_token,
            on_stream=RelayService(self.held, clock=self.reactor, names=self.names).serve,
            config=self.session,
            clock=self.reactor,
        )

    def _loads(self) -> Loads:
        settings = self.settings
        return Loads(
            self.pool,
            Fleet(self.nodes, self.replicas, self.scheduling, self.ownership, settings.worker_reconnect_grace),
            self.verbs,
            make_stager(
                settings, self.http, self.verbs, reactor=self.reactor, in_thread=self.in_thread, called=self.names
            ),
            self.connect,
            clock=self.reactor,
            instance=self.instance,
            settings=LoadSettings(
                grace=settings.worker_reconnect_grace,
                live_window=settings.instance_live_window,
                route_wait=settings.route_wait,
                install_timeout=settings.nats_backend_install_timeout,
                load_timeout=settings.nats_model_load_timeout,
                backend_galleries=settings.backend_galleries,
                orphan_after=settings.load_orphan_after,
            ),
            find_model=self.catalog.get,
            is_gone=self.catalog.is_gone,
            called=self.names,
        )

    def _api(self) -> FrontendApi:
        settings = self.settings
        waits = Waits(
            route=settings.route_wait, load=settings.model_load_wait or None, grace=settings.worker_reconnect_grace
        )
        inference = Inference(
            replicas=self.replicas,
            ownership=self.ownership,
            loads=self.loads,
            connect=self.connect,
            files=self.request_files,
            clock=self.reactor,
            waits=waits,
        )
        return FrontendApi(
            catalog=self.catalog,
            inference=inference,
            nodes=self.nodes,
            replicas=self.replicas,
            scheduling=self.scheduling,
            ownership=self.ownership,
            loads=self.loads,
            verbs=self.verbs,
            received=self.received,
            max_body=settings.upload_limit,
            end_tunnel=self.notices.identity_changed,
            keys=Keys(settings.api_key),
            registration_token=settings.registration_token,
            auto_approve=settings.auto_approve_nodes,
            loose_identity=settings.node_identity == "loose",
            grace=settings.worker_reconnect_grace,
            load_wait=waits.load,
            readiness=self.readiness,
            clock=self.reactor,
        )


def departures_for(forwarder: Forwarder) -> Departures:
    """Everybody here who keeps something of a node until it departs."""
    return Departures({ROUTES: lambda departure: forwarder.forget(departure.id)})


def advertised(settings: FrontendSettings) -> str | None:
    """
    The ``host:port`` peers dial; None, with a warning that says the remedy, when there is none.

    Raises:
        UserMistake: the configured one names no host.
    """
    configured = settings.distributed_advertise_addr
    if configured is not None:
        if not configured.host:
            raise UserMistake(f"{configured} can't be advertised; {REMEDY}")
        trouble = trouble_with(configured)
        if trouble is not None:
            log.warn("advertising {address} all the same: {trouble}", address=str(configured), trouble=trouble)
        return str(configured)
    try:
        return str(discover(settings.auth_database_url, settings.address.port))
    except UserMistake as mistake:
        log.warn("this frontend will have no peers and is never relayed to: {why}", why=str(mistake))
        return None
