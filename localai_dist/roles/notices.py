"""
What frontends tell each other over the bus, and what each does when it hears it.

Every notice is a hint about something the database knows: a lost one costs time, never correctness.

    nodes.identity  an identity changed hands, or a node was removed   its tunnel ends wherever it is held
    nodes.claimed   a frontend claimed a node's tunnel                 what was believed of its owner is forgotten
    loads.ended     a load left the frontend that ran it: it ended,    whoever waits for that model looks at once, and
                    or was offered to the others                       whoever may take it on

Source: docs/wire/bus.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from localai_dist.bus.envelope import Message
from localai_dist.bus.publisher import Publisher
from localai_dist.bus.subscriber import Subscriber
from localai_dist.ids import NodeId
from localai_dist.relay.forward import Forwarder
from localai_dist.tunnel.identities import IdentityWatch

IDENTITY: Final = "nodes.identity"
CLAIMED: Final = "nodes.claimed"
LOAD_ENDED: Final = "loads.ended"


class OfNode(msgspec.Struct, frozen=True):
    """A notice about a node."""

    node: NodeId


class OfModel(msgspec.Struct, frozen=True):
    """A notice about a model."""

    model: str


class Notices:
    """
    The notices of one frontend.

    Args:
        identities: ends held tunnels that are nobody's any more.
        forwarder: believes who holds the others.
        look_at_load: has whoever waits for a model, or may load it, look at its job now.
        look_at_loads: the same for every model.
    """

    def __init__(
        self,
        publisher: Publisher,
        subscriber: Subscriber,
        *,
        identities: IdentityWatch,
        forwarder: Forwarder,
        look_at_load: Callable[[str], None],
        look_at_loads: Callable[[], None],
    ) -> None:
        self._publisher = publisher
        self._subscriber = subscriber
        self._identities = identities
        self._forwarder = forwarder
        self._look_at_load = look_at_load
        self._look_at_loads = look_at_loads

    async def subscribe(self) -> None:
        """Listen; raises ``StoreError``."""
        await self._subscriber.subscribe(IDENTITY, self._heard_identity, self._identities.check)
        await self._subscriber.subscribe(CLAIMED, self._heard_claimed, self._forwarder.forget_all)
        await self._subscriber.subscribe(LOAD_ENDED, self._heard_load_ended, self._look_at_loads)

    def identity_changed(self, node: NodeId) -> None:
        """This frontend approved or removed ``node``: its tunnel ends, here at once and elsewhere when they hear it."""
        self._forwarder.forget(node)
        self._identities.check_soon(node)
        self._publisher.hint(IDENTITY, OfNode(node))

    def claimed(self, node: NodeId) -> None:
        """This frontend holds the tunnel of ``node`` now."""
        self._forwarder.forget(node)
        self._identities.check_soon(node)  # its identity may have changed hands between the door and the claim
        self._publisher.hint(CLAIMED, OfNode(node))

    def load_ended(self, model: str) -> None:
        """A load that ran on this frontend ended, or is another one's from now on."""
        self._publisher.hint(LOAD_ENDED, OfModel(model))

    def _heard_identity(self, message: Message) -> None:
        node = message.read(OfNode).node
        self._forwarder.forget(node)
        self._identities.check_soon(node)

    def _heard_claimed(self, message: Message) -> None:
        self._forwarder.forget(message.read(OfNode).node)

    def _heard_load_ended(self, message: Message) -> None:
        self._look_at_load(message.read(OfModel).model)
