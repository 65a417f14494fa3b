"""
What the node has: VRAM, RAM, and the disk of the models folder, as registration and heartbeat tell it.

A reading that can't be had is left out, never told as zero.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twisted.internet.error import ProcessExitedAlready
from twisted.internet.utils import getProcessOutputAndValue
from twisted.logger import Logger

from localai_dist.units import KiB
from localai_dist.worker.gpus import NVIDIA_QUERY, Gpu, amd_gpu, parse_nvidia_smi
from localai_dist.worker.timing import TooLate, bounded

ASK_WITHIN = 5.0
"""Seconds nvidia-smi may take; it hangs when a driver is broken."""

_log = Logger()


@dataclass(frozen=True, slots=True)
class Readings:
    """
    One look at the node.

    Attributes:
        gpu: None without one, or when it can't be asked.
        ram: total and available bytes, or None.
        disk: total and available bytes of the models folder's file system, or None.
    """

    gpu: Gpu | None = None
    ram: tuple[int, int] | None = None
    disk: tuple[int, int] | None = None

    def to_register(self) -> dict[str, Any]:
        """The fields of a registration."""
        fields = self.to_beat()
        if self.gpu is None:
            fields |= {"total_vram": 0, "available_vram": 0}
        else:
            fields["gpu_compute_capability"] = self.gpu.compute_capability
        return fields

    def to_beat(self) -> dict[str, Any]:
        """The fields of a heartbeat."""
        fields: dict[str, Any] = {}
        if self.gpu is not None:
            fields |= {"total_vram": self.gpu.total_vram, "available_vram": self.gpu.available_vram}
            fields["gpu_vendor"] = self.gpu.vendor
        if self.ram is not None:
            fields["total_ram"], fields["available_ram"] = self.ram
        if self.disk is not None:
            fields["total_disk"], fields["available_disk"] = self.disk
        return fields


TakeReadings = Callable[[], Awaitable[Readings]]


def parse_meminfo(text: str) -> tuple[int, int] | None:
    """Total and available bytes from ``/proc/meminfo``, or None if they aren't in it."""
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        total, available = (int(values[name].split()[0]) * KiB for name in ("MemTotal", "MemAvailable"))
    except (KeyError, ValueError, IndexError):
        return None
    return total, available


class NodeReadings:
    """
    Takes readings.

    Args:
        reactor: runs nvidia-smi.
        folder: the models folder; the nearest folder above it that exists is measured.
    """

    def __init__(self, *, reactor: Any, folder: Path) -> None:
        self._reactor = reactor
        self._folder = folder
        self._nvidia_smi = shutil.which("nvidia-smi")

    async def take(self) -> Readings:
        """One look. Cancelling it leaves nothing behind but an nvidia-smi that ends by itself."""
        return Readings(await self._gpu(), _ram(), _disk(self._folder))

    async def _gpu(self) -> Gpu | None:
        # With an NVIDIA card that is silent just now, the little one in the processor is not what the node has.
        return amd_gpu() if self._nvidia_smi is None else await self._ask_nvidia(self._nvidia_smi)

    async def _ask_nvidia(self, program: str) -> Gpu | None:
        asking = getProcessOutputAndValue(program, NVIDIA_QUERY, env=os.environ, reactor=self._reactor)
        try:
            output, _errors, status = await bounded(asking, ASK_WITHIN, self._reactor, "nvidia-smi hangs")
        except (TooLate, OSError, ProcessExitedAlready) as error:
            _log.warn("the GPU can't be asked: {error}", error=error)
            return None
        return parse_nvidia_smi(output.decode("utf-8", "replace")) if status == 0 else None


async def no_readings() -> Readings:
    """Of an agent worker: nothing that placement asks for."""
    return Readings()


def _ram() -> tuple[int, int] | None:
    try:
        return parse_meminfo(Path("/proc/meminfo").read_text("ascii"))
    except OSError:
        return None


def _disk(folder: Path) -> tuple[int, int] | None:
    for candidate in (folder, *folder.absolute().parents):
        try:
            usage = os.statvfs(candidate)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    return None
