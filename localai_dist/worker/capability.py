"""
What a node can run, in the words of backend galleries: which of a meta backend's builds is taken.

Source: surface §4.3.
"""

from __future__ import annotations

from pathlib import Path

from localai_dist.worker.gallery import DEFAULT_CAPABILITY
from localai_dist.worker.gpus import amd_gpu, nvidia_driver

FORCED_FILE = "run/localai/capability"
"""What an image's maker puts here counts as if it were set."""

_CUDA = ((580, "13"), (525, "12"))
"""The first driver that runs programs of a CUDA release, newest first. Source: NVIDIA's CUDA compatibility table."""

_TEGRA = "etc/nv_tegra_release"


def capabilities(forced: str, root: Path = Path("/")) -> tuple[str, ...]:
    """
    This node's capabilities, the most particular one first; ``default`` is always the last.

    Args:
        forced: the operator's word, which goes before everything that is found; empty: none.
        root: of the file system that is looked at.
    """
    words = forced or _forced_by_file(root)
    found = (words,) if words else _nvidia(root) or _amd(root)
    return tuple(dict.fromkeys((*found, DEFAULT_CAPABILITY)))


def _nvidia(root: Path) -> tuple[str, ...]:
    driver = nvidia_driver(root)
    if driver is None:
        return ()
    releases = [release for first, release in _CUDA if driver >= first]
    kind = "nvidia-l4t" if (root / _TEGRA).exists() else "nvidia"
    return (*(f"{kind}-cuda-{release}" for release in releases), kind)


def _amd(root: Path) -> tuple[str, ...]:
    return ("amd",) if amd_gpu(root) is not None else ()


def _forced_by_file(root: Path) -> str:
    try:
        return (root / FORCED_FILE).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
