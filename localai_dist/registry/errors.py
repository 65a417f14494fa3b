"""What the registry refuses, and what its silence is to whoever asks it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from localai_dist.errors import LocalAIDistError
from localai_dist.reach import RegistryUnknown, Unreached
from localai_dist.store.errors import StoreUnavailable


@contextmanager
def registry_or_unreached() -> Iterator[None]:
    """
    A block that asks the database.

    Raises:
        Unreached: the database did not answer; ``RegistryUnknown``.
    """
    try:
        yield
    except StoreUnavailable as error:
        raise Unreached(RegistryUnknown(str(error))) from error


class RegistryError(LocalAIDistError):
    """Anything the registry refuses."""

    @property
    def told(self) -> str:
        """All of it: names and states of nodes."""
        return str(self)


class UnknownNode(RegistryError):
    """No node has that id."""

    def __init__(self, node: str) -> None:
        super().__init__(f"no node has the id {node}")


class NotPending(RegistryError):
    """Nothing waits for approval there; nodes are named here by their names."""

    def __init__(self, node: str) -> None:
        super().__init__(f"node {node} is approved already, and no newcomer waits under its name")


class NotApproved(RegistryError):
    """The node must be approved first."""

    def __init__(self, node: str) -> None:
        super().__init__(f"node {node} is pending: approve it first")


class NotDraining(RegistryError):
    """The node takes work already, or is down."""

    def __init__(self, node: str, status: str) -> None:
        super().__init__(f"node {node} is {status}, not draining")
