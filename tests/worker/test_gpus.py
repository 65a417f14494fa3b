"""Graphics cards, as a made-up file system has them, and what a node can run for it."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.units import GiB, MiB
from localai_dist.worker.capability import capabilities
from localai_dist.worker.gpus import Gpu, amd_gpu, nvidia_driver, parse_nvidia_smi

NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Sep 23 15:13:08 UTC 2023\nGCC version: 12.2.0\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (builder)\n"


class GpuTests(SynchronousTestCase):
    """A folder that looks like the root of a machine."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.root.mkdir()

    def put(self, path: str, text: str) -> None:
        """One of the machine's files."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def card(self, number: int, vendor: str, total: str, used: str) -> None:
        """A card as the kernel shows it."""
        for name, text in (("vendor", vendor), ("mem_info_vram_total", total), ("mem_info_vram_used", used)):
            self.put(f"sys/class/drm/card{number}/device/{name}", text + "\n")

    def test_nvidia(self) -> None:
        """NVIDIA's cards are added up; an answer that is no list of cards is no card."""
        self.assertEqual(parse_nvidia_smi("100, 40, 8.9\n100, 60, 8.9\n"), Gpu(200 * MiB, 100 * MiB, "nvidia", "8.9"))
        self.assertIsNone(parse_nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate"))

    def test_amd(self) -> None:
        """AMD's cards are added up from the kernel's files; other makers' and unreadable ones are left out."""
        self.assertIsNone(amd_gpu(self.root))
        self.card(0, "0x8086", str(8 * GiB), "0")
        self.card(1, "0x1002", "", "")
        self.assertIsNone(amd_gpu(self.root))
        self.card(2, "0x1002", str(16 * GiB), str(6 * GiB))
        self.card(10, "0x1002", str(8 * GiB), str(9 * GiB))
        self.assertEqual(amd_gpu(self.root), Gpu(24 * GiB, 10 * GiB, "amd"))

    def test_driver(self) -> None:
        """The driver's version is found in both of its ways to tell it, and in no other text."""
        self.assertIsNone(nvidia_driver(self.root))
        for text, number in ((NVRM.format("535.104.05"), 535), (OPEN.format("580.65"), 580), ("", None), ("x", None)):
            self.put("proc/driver/nvidia/version", text)
            self.assertEqual(nvidia_driver(self.root), number)

    def test_capabilities_of_nvidia(self) -> None:
        """A newer driver runs the builds of older CUDA releases too, and a driver without CUDA 12 only plain ones."""
        wanted = {
            "470.1": ("nvidia", "default"),
            "525.60": ("nvidia-cuda-12", "nvidia", "default"),
            "580.65": ("nvidia-cuda-13", "nvidia-cuda-12", "nvidia", "default"),
        }
        for version, words in wanted.items():
            self.put("proc/driver/nvidia/version", NVRM.format(version))
            self.assertEqual(capabilities("", self.root), words)
        self.put("etc/nv_tegra_release", "# R36")
        self.assertEqual(capabilities("", self.root)[0], "nvidia-l4t-cuda-13")

    def test_capabilities_of_others(self) -> None:
        """AMD's cards count; a machine without a card, or with one that nobody can measure, takes the default build."""
        self.assertEqual(capabilities("", self.root), ("default",))
        self.card(0, "0x1002", str(16 * GiB), "0")
        self.assertEqual(capabilities("", self.root), ("amd", "default"))

    def test_forced(self) -> None:
        """The operator's word goes before the image's, and both before what is found."""
        self.put("proc/driver/nvidia/version", NVRM.format("580.65"))
        self.put("run/localai/capability", "vulkan\n")
        self.assertEqual(capabilities("", self.root), ("vulkan", "default"))
        self.assertEqual(capabilities("amd", self.root), ("amd", "default"))
        self.assertEqual(capabilities("default", self.root), ("default",))
