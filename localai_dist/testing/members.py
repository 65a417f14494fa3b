"""The two kinds of daemons a cluster runs, and how the ready file tells of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localai_dist.testing.child import Child
from localai_dist.testing.web import ask


class Frontend(Child):
    """
    A frontend of the cluster.

    Attributes:
        url: its address, without a trailing slash.
        instance_id: its id in the cluster; the same after a restart.
        data_dir: what a wipe empties.
    """

    def __init__(self, *, url: str, instance_id: str, data_dir: Path, **child: Any) -> None:
        super().__init__(**child)
        self.url = url
        self.instance_id = instance_id
        self.data_dir = data_dir

    def is_ready(self) -> bool:
        """Whether ``/readyz`` says yes."""
        return ask(self.url + "/readyz", timeout=2).status == 200

    def document(self) -> dict[str, Any]:
        """Its entry in the ready file."""
        return {
            "name": self.name,
            "url": self.url,
            "pid": self.pid,
            "instance_id": self.instance_id,
            "log": str(self.log),
            **_by_hand(self),
        }


class Worker(Child):
    """
    A worker of the cluster.

    Attributes:
        probe_url: its own server on loopback (``/healthz``, ``/readyz``), without a trailing slash.
        folder: its ``data``, ``models`` and ``backends``.
        node_id: its id once registered.
        home: the index of the frontend that holds its tunnel, as last seen.
    """

    def __init__(self, *, probe_url: str, folder: Path, **child: Any) -> None:
        super().__init__(**child)
        self.probe_url = probe_url
        self.folder = folder
        self.node_id: str | None = None
        self.home: int | None = None

    @property
    def data_dir(self) -> Path:
        """Its own state; what a wipe empties."""
        return self.folder / "data"

    @property
    def models_dir(self) -> Path:
        """Where model files are staged."""
        return self.folder / "models"

    def is_ready(self) -> bool:
        """Whether its ``/readyz`` says yes: registered and its tunnel up."""
        return ask(self.probe_url + "/readyz", timeout=2).status == 200

    def document(self) -> dict[str, Any]:
        """Its entry in the ready file."""
        return {
            "name": self.name,
            "id": self.node_id,
            "pid": self.pid,
            "frontend": self.home,
            "data_dir": str(self.data_dir),
            "models_dir": str(self.models_dir),
            "log": str(self.log),
            "probe_url": self.probe_url,
            **_by_hand(self),
        }


def _by_hand(child: Child) -> dict[str, Any]:
    """What starts it again by hand."""
    return {"argv": child.argv, "env": child.env, "cwd": str(child.cwd)}
