"""
Model files onto nodes: all files of a model, one after the other, within the caller's hold or one of our own.

Source: surface §5.6, internals §4b, LOAD-4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from twisted.internet.interfaces import IReactorTime

from localai_dist.ids import NodeId
from localai_dist.staging.digests import Digests
from localai_dist.staging.errors import HoldExpired
from localai_dist.staging.hold_timer import HoldTimer
from localai_dist.staging.plan import SourceFile, StagedFile, total_size
from localai_dist.staging.progress import Progress
from localai_dist.staging.reader import InThread
from localai_dist.staging.source import Sources, list_sources
from localai_dist.staging.upload import HoldLike, NodeHttp, Upload
from localai_dist.units import HOUR
from localai_dist.wire.files import PIECE_BYTES

RETRY_BUDGET: float = 1 * HOUR
"""How long interruptions are outlived for a caller that has no deadline of its own (s)."""


class Stager:
    """
    Puts the files of models on nodes.

    Args:
        http: requests to nodes.
        models_dir: where this frontend's model files are.
        clock: for the pauses between attempts.
        in_thread: runs blocking file calls.
        chance: random numbers from 0 to 1, for the jitter.
        piece: the most bytes of one PUT.
        called: what people call a node.
    """

    def __init__(
        self,
        http: NodeHttp,
        models_dir: Path,
        *,
        clock: IReactorTime,
        in_thread: InThread,
        chance: Callable[[], float],
        piece: int = PIECE_BYTES,
        called: Callable[[NodeId], str] = str,
    ) -> None:
        self.http = http
        self.clock = clock
        self.in_thread = in_thread
        self.chance = chance
        self.piece = piece
        self.called = called
        self.digests = Digests(in_thread)
        self._models_dir = models_dir

    async def sources(self, model: str, relatives: Sequence[str], hints: Sequence[str] = ()) -> Sources:
        """
        The files named by ``relatives``, the first of them required, with directories walked; see ``list_sources``.

        Raises:
            SourceMissing: the required one is not in the models folder.
        """
        found: Sources = await self.in_thread(list_sources, self._models_dir, model, relatives, hints)
        return found

    async def stage(
        self, node: NodeId, files: Sequence[SourceFile], progress: Progress, hold: HoldLike | None = None
    ) -> tuple[StagedFile, ...]:
        """
        Have ``files`` on ``node``, whole and verified; those that are there already are not sent.

        Args:
            hold: the caller's deadline, for as long as which interruptions are outlived; None is ``RETRY_BUDGET``.

        Raises:
            StagingError: a source can't be read, or the worker refused a file.
            Unreached: the node can't be reached and no retry will change that.
            HoldExpired, CancelledError: from ``hold``.
        """
        if hold is not None:
            return await self._stage(node, files, progress, hold)
        began = self.clock.seconds()
        own = HoldTimer(self.clock, base=RETRY_BUDGET, stall=RETRY_BUDGET, cap=RETRY_BUDGET)
        try:
            return await own.run(self._stage(node, files, progress, own))
        except HoldExpired as error:
            raise HoldExpired(f"{error} ({progress.summary(self.clock.seconds() - began)})") from error

    async def _stage(
        self, node: NodeId, files: Sequence[SourceFile], progress: Progress, hold: HoldLike
    ) -> tuple[StagedFile, ...]:
        progress.begin(total_size(files), len(files))
        staged = []
        for file in files:
            progress.next_file(file.relative)
            staged.append(await self.upload(node, file, progress, hold).run())
            progress.file_done(file.size)
        return tuple(staged)

    def upload(self, node: NodeId, file: SourceFile, progress: Progress, hold: HoldLike) -> Upload:
        """One file on its way."""
        return Upload(self, node, file, progress, hold)
