"""The producer that fills a transport's queue: when it is paused, resumed, asked and stopped."""

from __future__ import annotations

from typing import Any, Final

from localai_dist.units import KiB

HIGH_WATER: Final = 64 * KiB
"""A push producer is paused above this many queued bytes, as by a TCP transport."""

BULK_HIGH_WATER: Final = 256 * KiB
"""The same for a bulk stream, whose frames are as long as that on a fast link."""


class Feed:
    """
    A transport's registered producer, if any.

    Attributes:
        producer: it, or None.
        high_water: above this many queued bytes a push producer is paused, and at half of it resumed.
    """

    __slots__ = ("_paused", "_streaming", "high_water", "producer")

    def __init__(self) -> None:
        self.producer: Any = None
        self.high_water = HIGH_WATER
        self._streaming = False
        self._paused = False

    def register(self, producer: Any, streaming: bool) -> None:
        """Take ``producer``, asking a pull producer at once; raises ``RuntimeError`` when there is one."""
        if self.producer is not None:
            raise RuntimeError(f"{self.producer!r} is registered already")
        self.producer, self._streaming, self._paused = producer, streaming, False
        if not streaming:
            producer.resumeProducing()

    def unregister(self) -> None:
        """The producer is done."""
        self.producer = None
        self._paused = False

    def stop(self) -> None:
        """The transport is gone: tell the producer."""
        if self.producer is not None:
            producer, self.producer = self.producer, None
            producer.stopProducing()

    def queue_grew(self, queued: int) -> None:
        """Bytes were written; ``queued`` wait now."""
        if queued > self.high_water and self.producer is not None and self._streaming and not self._paused:
            self._paused = True
            self.producer.pauseProducing()

    def queue_shrank(self, queued: int) -> None:
        """Bytes were sent; ``queued`` wait now."""
        if self.producer is None:
            return
        if not self._streaming:
            if not queued:
                self.producer.resumeProducing()
        elif self._paused and 2 * queued <= self.high_water:
            self._paused = False
            self.producer.resumeProducing()
