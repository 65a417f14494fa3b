"""What a request that needs a model may be told instead of a replica."""

from __future__ import annotations

from localai_dist.errors import LocalAIDistError
from localai_dist.loads.budget import retry_after
from localai_dist.loads.status import LoadStatus


class LoadFailed(LocalAIDistError):
    """
    The load failed; the text is the real cause, in the worker's or the backend's own words where they said it.

    Args:
        told: the text for clients, where they must not see all of it.
    """

    def __init__(self, text: str, told: str = "") -> None:
        super().__init__(text)
        self._told = told or text

    @property
    def told(self) -> str:
        """As it was given: own words are passed on as they were said."""
        return self._told


class LoadCancelled(LoadFailed):
    """Somebody cancelled the load, or took its model away; the text says who or what. Nothing of it is left."""


class StillLoading(LocalAIDistError):
    """
    The load goes on, but the caller's wait is over (503 ``model_loading``).

    Attributes:
        status: what is known about the load: the ``loading`` object of the answer.
        retry_after: whole seconds for ``Retry-After``.
    """

    def __init__(self, status: LoadStatus) -> None:
        super().__init__(status.sentence())
        self.status = status
        self.retry_after = retry_after(status.eta_seconds)

    @property
    def told(self) -> str:
        """The same sentence for clients."""
        return self.status.sentence_told()


class UnloadFailed(LocalAIDistError):
    """A replica is not gone, or nobody can say so; its row stays. The text is the worker's reason."""


class TakenOver(LocalAIDistError):
    """The job belongs to another frontend by now: this one stops, and touches neither rows nor workers."""


class Marked(LocalAIDistError):
    """The job carries the cancel mark: this frontend clears away what it did. The text is the reason."""


class Offered(LocalAIDistError):
    """This frontend lacks what the load needs and left the job to the others; the text says what it lacks."""
