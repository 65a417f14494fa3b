"""
What graphics cards a node has, from what the drivers tell: NVIDIA's own program, and the kernel's files for AMD's.

An Intel or an unknown card is not counted: nothing says how much of its memory is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localai_dist.units import MiB

NVIDIA_QUERY = ("--query-gpu=memory.total,memory.free,compute_cap", "--format=csv,noheader,nounits")
"""The arguments of nvidia-smi whose answer ``parse_nvidia_smi`` reads."""

_DRM = "sys/class/drm"
_NVIDIA = "proc/driver/nvidia/version"
_AMD_ID = "0x1002"


@dataclass(frozen=True, slots=True)
class Gpu:
    """Graphics memory of all cards together (bytes), who made them, and the first one's compute capability."""

    total_vram: int
    available_vram: int
    vendor: str
    compute_capability: str = ""


def parse_nvidia_smi(text: str) -> Gpu | None:
    """All cards of an ``nvidia-smi`` answer (MiB per line), or None if there is none that can be read."""
    total = free = 0
    capability = ""
    for line in text.strip().splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 2 or not (fields[0].isdecimal() and fields[1].isdecimal()):
            continue
        total += int(fields[0]) * MiB
        free += int(fields[1]) * MiB
        capability = capability or (fields[2] if len(fields) > 2 else "")
    return Gpu(total, free, "nvidia", capability) if total else None


def amd_gpu(root: Path = Path("/")) -> Gpu | None:
    """
    All of AMD's cards together, or None without one that can be read. Reads a few small files of the kernel.

    Args:
        root: where ``sys`` is mounted.

    Source: the amdgpu driver's ``mem_info_vram_total`` and ``mem_info_vram_used`` (bytes).
    """
    total = free = 0
    for card in sorted((root / _DRM).glob("card[0-9]*/device")):
        if _word(card / "vendor") != _AMD_ID:
            continue
        size, used = _word(card / "mem_info_vram_total"), _word(card / "mem_info_vram_used")
        if size.isdecimal() and used.isdecimal():
            total += int(size)
            free += max(0, int(size) - int(used))
    return Gpu(total, free, "amd") if total else None


def nvidia_driver(root: Path = Path("/")) -> int | None:
    """The first number of the version of NVIDIA's loaded driver, or None without one."""
    try:
        words = (root / _NVIDIA).read_text("ascii", "replace").splitlines()[0].split()
    except (OSError, IndexError):
        return None
    numbers = [word.partition(".")[0] for word in words if word.replace(".", "").isdecimal() and "." in word]
    return int(numbers[0]) if numbers else None


def _word(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""
