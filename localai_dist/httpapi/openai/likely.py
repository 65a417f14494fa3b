"""How likely each token was (pure): a backend's JSON -> OpenAI's ``logprobs``."""

from __future__ import annotations

import msgspec

from localai_dist.reach import Answer, Answered, Unreached


class Likely(msgspec.Struct):
    """A token that was, or could have been, said."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLikely(Likely):
    """A token that was said, and others in its place."""

    top_logprobs: list[Likely] = []


class _Told(msgspec.Struct):
    content: list[TokenLikely] | None = None


def tokens_of(told: bytes, others: int) -> tuple[TokenLikely, ...]:
    """
    The tokens in what a backend told.

    Args:
        others: how many others are told of each token.

    Raises:
        Unreached: it is not what the contract says.
    """
    if not told:
        return ()
    try:
        tokens = msgspec.json.decode(told, type=_Told | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreached(Answered(Answer.ERROR, f"the backend's logprobs can't be read: {error}")) from error
    found = (tokens.content if tokens is not None else None) or []
    for token in found:
        del token.top_logprobs[others:]
    return tuple(found)
