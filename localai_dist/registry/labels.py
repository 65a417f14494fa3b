"""Labels a node gets by itself, beside those its operator gives it."""

from __future__ import annotations

from localai_dist.registry.records import Registration
from localai_dist.units import GiB

_VRAM_CLASSES = ((80, "80GB+"), (48, "48GB"), (24, "24GB"), (16, "16GB"), (8, "8GB"))


def vram_label(total: int) -> str:
    """The class of a node's VRAM, like ``24GB``; below 8 GB the number itself."""
    gigabytes = round(total / GiB)
    return next((label for least, label in _VRAM_CLASSES if gigabytes >= least), f"{gigabytes}GB")


def labels_of(registration: Registration) -> dict[str, str]:
    """
    The labels a registration sets: its own, and ``node.name``, ``node.replica-slots``, ``gpu.vendor``, ``gpu.vram``.

    Source: surface §5.1.
    """
    own = {"node.name": registration.name, "node.replica-slots": str(max(1, registration.max_replicas_per_model))}
    if registration.gpu_vendor:
        own["gpu.vendor"] = registration.gpu_vendor
    if registration.total_vram:
        own["gpu.vram"] = vram_label(registration.total_vram)
    return {**registration.labels, **own}
