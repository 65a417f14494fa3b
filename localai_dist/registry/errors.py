"""What the registry refuses."""

from __future__ import annotations

from localai_dist.errors import LocalAIDistError


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
