"""
What came of trying to reach a node: one closed sum, and what may be done about each.

The four conditions that are never reported as each other (no route, reconnecting, peer unreachable, the worker's own
answer) and their neighbours. Every deletion, demotion and eviction asks exactly one predicate of this module. A new
outcome does not type-check until every predicate has decided (``assert_never``).

Source: design §2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias, assert_never

from localai_dist.errors import LocalAIDistError, without_coordinates


class Answer(Enum):
    """What a worker's own answer said."""

    SUCCESS = "success"
    ERROR = "error"
    BACKEND_UNAVAILABLE = "backend unavailable"
    MODEL_NOT_LOADED = "model not loaded"
    PROCESS_ABSENT = "process absent"


@dataclass(frozen=True, slots=True)
class Answered:
    """Condition 4: bytes from the worker itself. ``text`` is passed on as the worker said it."""

    answer: Answer
    text: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker refused *our* request (``unknown-tag``, ``bad-request``): a fact about this frontend's build."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class NotServed:
    """The worker's own trouble, an unknown code, garbage, or an end before any reply: a fact about nothing."""

    text: str


@dataclass(frozen=True, slots=True)
class VerbNotServed:
    """An older worker's control plane has no such verb."""

    verb: str


@dataclass(frozen=True, slots=True)
class NoRoute:
    """
    Condition 1, read from PostgreSQL: no live frontend holds the tunnel.

    Attributes:
        departed: the loss outlived the grace; False means the node never dialled.
        name: what people call the node; empty while it is not known.
    """

    node: str
    departed: bool
    name: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Reconnecting:
    """Condition 2, read from PostgreSQL: the tunnel was lost and is still inside the grace (``seconds_left`` of it)."""

    node: str
    seconds_left: float | None = None
    name: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class PeerUnreachable:
    """
    Condition 3: the owner is live in PostgreSQL but its peer link failed.

    Attributes:
        rejected: it refused us.
        address: where it was dialled; empty when it was not.
    """

    peer: str
    text: str
    rejected: bool = False
    address: str = ""


@dataclass(frozen=True, slots=True)
class RegistryUnknown:
    """The database query that would have told failed."""

    text: str


@dataclass(frozen=True, slots=True)
class DeadlineExceeded:
    """The caller's own deadline passed; tested before anything else, never the peer's or the worker's fault."""

    text: str = "the caller's deadline passed"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller went away."""


Outcome: TypeAlias = (
    Answered
    | Refused
    | NotServed
    | VerbNotServed
    | NoRoute
    | Reconnecting
    | PeerUnreachable
    | RegistryUnknown
    | DeadlineExceeded
    | Cancelled
)


class Unreached(LocalAIDistError):
    """
    Raised by whoever tried to reach a node and did not get what it wanted.

    Attributes:
        outcome: which of the closed sum it was.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(describe(outcome))
        self.outcome: Final = outcome

    @property
    def told(self) -> str:
        """What a client may be told of the outcome."""
        return tell(self.outcome)


class Retry(Enum):
    """Whether the same request may be tried again."""

    NEVER = "never"
    ONCE_FRESH = "once, on a fresh stream"
    ROUTE_WAIT = "until the route wait is over"
    FREELY = "yes"


def may_reap(outcome: Outcome) -> bool:
    """Whether the row of the replica that was asked may be deleted (and only that row)."""
    match outcome:
        case Answered(answer):
            return answer in (Answer.BACKEND_UNAVAILABLE, Answer.MODEL_NOT_LOADED, Answer.PROCESS_ABSENT)
        case NoRoute(departed=departed):
            return departed
        case (
            Refused()
            | NotServed()
            | VerbNotServed()
            | Reconnecting()
            | PeerUnreachable()
            | RegistryUnknown()
            | DeadlineExceeded()
            | Cancelled()
        ):
            return False
        case _:
            assert_never(outcome)


def may_demote(outcome: Outcome) -> bool:
    """Whether the *node* may be marked unhealthy: only once its route is gone for longer than the grace."""
    match outcome:
        case NoRoute(departed=departed):
            return departed
        case (
            Answered()
            | Refused()
            | NotServed()
            | VerbNotServed()
            | Reconnecting()
            | PeerUnreachable()
            | RegistryUnknown()
            | DeadlineExceeded()
            | Cancelled()
        ):
            return False
        case _:
            assert_never(outcome)


def may_retry(outcome: Outcome) -> Retry:
    """Whether, and for how long, the request may be tried again."""
    match outcome:
        case NotServed():
            return Retry.ONCE_FRESH
        case Reconnecting() | PeerUnreachable():
            return Retry.ROUTE_WAIT
        case RegistryUnknown():
            return Retry.FREELY
        case Answered() | Refused() | VerbNotServed() | NoRoute() | DeadlineExceeded() | Cancelled():
            return Retry.NEVER
        case _:
            assert_never(outcome)


@dataclass(frozen=True, slots=True)
class ClientAnswer:
    """
    How an outcome is told to an HTTP client.

    Attributes:
        status: HTTP status.
        code: the envelope's ``code``; also the ``x-localai-condition`` header for the conditions of design §2.
        retry_after: seconds for ``Retry-After``, or None for no such header.
    """

    status: int
    code: str
    retry_after: int | None = None


def client_answer(outcome: Outcome) -> ClientAnswer:
    """The HTTP answer for ``outcome`` (design §2, last column, and §8: every 503 says when to come back)."""
    match outcome:
        case Answered():
            return ClientAnswer(500, "worker_error")
        case Refused():
            return ClientAnswer(502, "worker_refused")
        case NotServed():
            return ClientAnswer(503, "worker_unavailable", 1)
        case VerbNotServed():
            return ClientAnswer(501, "verb_not_served")
        case NoRoute():
            return ClientAnswer(503, "no_route", 10)
        case Reconnecting():
            return ClientAnswer(503, "worker_reconnecting", 2)
        case PeerUnreachable():
            return ClientAnswer(503, "peer_unreachable", 2)
        case RegistryUnknown():
            return ClientAnswer(503, "registry_unavailable", 2)
        case DeadlineExceeded():
            return ClientAnswer(504, "deadline_exceeded")
        case Cancelled():
            return ClientAnswer(499, "cancelled")
        case _:
            assert_never(outcome)


def describe(outcome: Outcome) -> str:
    """One sentence for a person: what happened, to what, and what to do."""
    match outcome:
        case Answered(answer, text):
            return text or f"the worker answered: {answer.value}"
        case Refused(code, text):
            return f"the worker refused the request ({code}): {text}; the worker is probably older than this frontend"
        case NotServed(text):
            return f"the worker did not serve the stream: {text}"
        case VerbNotServed(verb):
            return f"the worker does not know the verb {verb}: it is older than this frontend; upgrade the worker"
        case NoRoute(node, departed, name):
            return f"no route to node {name or node}: " + (
                "its tunnel was lost and did not come back within the reconnect grace; check that its worker runs"
                if departed
                else "it has never opened a tunnel; check that its worker is approved and can reach a frontend"
            )
        case Reconnecting(node, name=name):
            back = "is expected back within the reconnect grace; try again shortly"
            return f"node {name or node} lost its tunnel and {back}"
        case PeerUnreachable(peer, text, rejected, address):
            where = f"{peer} at {address}" if address else peer
            return f"the frontend that holds the tunnel ({where}) {_peer_trouble(rejected)}: {text}"
        case RegistryUnknown(text):
            return f"the registry database did not answer, so the route is not known: {text}"
        case DeadlineExceeded(text):
            return text
        case Cancelled():
            return "the caller went away"
        case _:
            assert_never(outcome)


def tell(outcome: Outcome) -> str:
    """
    The sentence for a client: the same cause without where the database and the frontends are.

    What a backend answered is passed on as it said it.
    """
    match outcome:
        case Answered(Answer.SUCCESS | Answer.ERROR | Answer.MODEL_NOT_LOADED) | VerbNotServed():
            return describe(outcome)
        case PeerUnreachable(peer, _, rejected):
            return f"the frontend that holds the tunnel ({peer}) {_peer_trouble(rejected)}"
        case RegistryUnknown():
            return "the registry database can't be reached, so the route is not known; try again shortly"
        case Answered() | Refused() | NotServed() | NoRoute() | Reconnecting() | DeadlineExceeded() | Cancelled():
            return without_coordinates(describe(outcome))
        case _:
            assert_never(outcome)


def _peer_trouble(rejected: bool) -> str:
    return "refused our credentials (are all frontends upgraded?)" if rejected else "can't be reached from here"
