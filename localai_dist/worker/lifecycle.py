"""
The states of one backend process, as a table.

Drawing::

    STARTING ──came up──▶ SERVING ──told to end──▶ ENDING ──survived──▶ SURVIVING
        └────────────told to end───────────────▶ ENDING ◀──told to end─────┘
    any of them ──ended──▶ GONE
"""

from __future__ import annotations

from enum import Enum

from localai_dist.errors import LocalAIDistError


class State(Enum):
    """Where a process is; it holds its key and its port until ``GONE``, also when it survived being killed."""

    STARTING = "starting"
    SERVING = "serving"
    ENDING = "ending"
    SURVIVING = "surviving"
    GONE = "gone"


class Input(Enum):
    """What happens to a process."""

    CAME_UP = "came up"
    TOLD_TO_END = "told to end"
    SURVIVED = "survived"
    ENDED = "ended"


class IllegalInput(LocalAIDistError):
    """The table has no such transition."""


TRANSITIONS: dict[tuple[State, Input], State] = {
    (State.STARTING, Input.CAME_UP): State.SERVING,
    (State.STARTING, Input.TOLD_TO_END): State.ENDING,
    (State.STARTING, Input.ENDED): State.GONE,
    (State.SERVING, Input.TOLD_TO_END): State.ENDING,
    (State.SERVING, Input.ENDED): State.GONE,
    (State.ENDING, Input.TOLD_TO_END): State.ENDING,
    (State.ENDING, Input.SURVIVED): State.SURVIVING,
    (State.ENDING, Input.ENDED): State.GONE,
    (State.SURVIVING, Input.TOLD_TO_END): State.ENDING,
    (State.SURVIVING, Input.ENDED): State.GONE,
    (State.GONE, Input.TOLD_TO_END): State.GONE,
    (State.GONE, Input.SURVIVED): State.GONE,
    (State.GONE, Input.ENDED): State.GONE,
}


def step(state: State, input_: Input) -> State:
    """
    The state after ``input_``.

    Raises:
        IllegalInput: the table has no such transition; the state is what it was.
    """
    try:
        return TRANSITIONS[state, input_]
    except KeyError:
        raise IllegalInput(f"a process that is {state.value} can't have {input_.value}") from None
