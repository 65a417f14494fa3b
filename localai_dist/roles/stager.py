"""How model files go to nodes: over the tunnels, or by way of an object store where the settings name one."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from twisted.internet.defer import Deferred

from localai_dist.ids import NodeId
from localai_dist.objects.bucket import Bucket, make_bucket
from localai_dist.objects.store import ObjectStore
from localai_dist.relay.control import VerbClient
from localai_dist.relay.http import NodeHttp
from localai_dist.settings.frontend import FrontendSettings
from localai_dist.staging.by_store import StoreStager
from localai_dist.staging.request_files import RequestFiles
from localai_dist.staging.stager import Stager


class Storage(Protocol):
    """The settings of either end."""

    @property
    def storage_url(self) -> str:
        """Empty: there is no store."""

    @property
    def storage_bucket(self) -> str:
        """The bucket."""

    @property
    def storage_region(self) -> str:
        """Its region."""

    @property
    def storage_access_key(self) -> str:
        """Empty: nothing is signed."""

    @property
    def storage_secret_key(self) -> str:
        """Goes with it."""


def bucket_of(settings: Storage) -> Bucket | None:
    """
    The bucket that the settings name, or None.

    Raises:
        UserMistake: they name something else.
    """
    return make_bucket(
        settings.storage_url,
        settings.storage_bucket,
        settings.storage_region,
        settings.storage_access_key,
        settings.storage_secret_key,
    )


def make_stager(
    settings: FrontendSettings,
    http: NodeHttp,
    verbs: VerbClient,
    *,
    reactor: Any,
    in_thread: Callable[..., Deferred[Any]],
    called: Callable[[NodeId], str],
) -> Stager:
    """
    One frontend's.

    Args:
        called: what people call a node.

    Raises:
        UserMistake: the object store's settings are wrong.
    """
    bucket = bucket_of(settings)
    common: dict[str, Any] = {"clock": reactor, "in_thread": in_thread, "chance": random.random, "called": called}
    if bucket is None:
        return Stager(http, Path(settings.models_path), **common)
    store = ObjectStore(bucket, reactor=reactor, now=lambda: datetime.now(UTC))
    return StoreStager(http, Path(settings.models_path), store=store, verbs=verbs, **common)


def make_request_files(
    http: NodeHttp,
    verbs: VerbClient,
    *,
    reactor: Any,
    in_thread: Callable[..., Deferred[Any]],
    called: Callable[[NodeId], str],
) -> RequestFiles:
    """One frontend's way for files of single requests: always over the tunnels, no store keeps what lives a minute."""
    stager = Stager(http, Path(), clock=reactor, in_thread=in_thread, chance=random.random, called=called)
    return RequestFiles(stager, verbs, clock=reactor)
