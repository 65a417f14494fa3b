"""
Control verbs: one request to a worker's control server, its answer as a value.

A verb's own failure is an answer (its ``error`` field), returned like any other. Everything else is ``Unreached``.

Source: wire contract §6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.web.iweb import IResponse

from localai_dist.ids import NodeId
from localai_dist.mux.classes import TrafficClass
from localai_dist.reach import NotServed, Outcome, Refused, Unreached, VerbNotServed
from localai_dist.relay.body import BodyBroken, BodyTooLarge, BytesBody, read_beginning, read_body, read_lines
from localai_dist.relay.deadline import before
from localai_dist.relay.http import NodeHttp
from localai_dist.units import format_duration
from localai_dist.wire.verbs import MAX_BODY_BYTES, MAX_LINE_BYTES, InvalidBody, StreamLine, Verb, VerbKind

Q = TypeVar("Q")
R = TypeVar("R")

QUOTED_BYTES: Final = 512
"""How much of an unexpected answer is quoted. Source: wire contract §6."""


class VerbClient:
    """
    Calls verbs of nodes.

    Args:
        http: HTTP to nodes.
        clock: times the budgets.
    """

    log = Logger()

    def __init__(self, http: NodeHttp, *, clock: IReactorTime) -> None:
        self._http = http
        self._clock = clock

    async def call(
        self,
        node: NodeId,
        verb: Verb[Q, R],
        request: Q,
        *,
        timeout: float | None = None,
        on_progress: Callable[[StreamLine[R]], None] | None = None,
    ) -> R:
        """
        The worker's answer.

        Cancelling it drops the stream; what the worker does then is the verb's (``survives_caller``).

        Args:
            timeout: seconds for all of it; the verb's budget if None.
            on_progress: given each progress line of a streaming verb.

        Raises:
            Unreached: ``VerbNotServed`` for 404, ``Refused`` for another 4xx, ``NotServed`` for any other status, an
                answer that can't be read, or an end before the reply, ``DeadlineExceeded``, and whatever kept the
                request from the worker.
        """
        budget = verb.budget if timeout is None else timeout
        deadline = self._clock.seconds() + budget
        text = f"the worker did not answer {verb.path} within {format_duration(budget)}"
        return await before(deadline, self._call(node, verb, request, on_progress), clock=self._clock, text=text)

    async def _call(
        self, node: NodeId, verb: Verb[Q, R], request: Q, on_progress: Callable[[StreamLine[R]], None] | None
    ) -> R:
        response = await self._http.request(
            node,
            "POST",
            verb.path,
            headers={"Content-Type": "application/json"},
            body=BytesBody(verb.encode_request(request)),
            traffic=TrafficClass.CONTROL,
        )
        if response.code not in (200, 204):
            raise Unreached(await _not_an_answer(response, verb.path))
        try:
            if response.code == 200 and verb.kind is VerbKind.STREAM:
                return await _reply_of(response, verb, on_progress)
            return verb.decode_reply(await read_body(response, MAX_BODY_BYTES))
        except (InvalidBody, BodyTooLarge, BodyBroken) as error:
            raise Unreached(NotServed(f"the answer to {verb.path} can't be read: {error}")) from error


async def _reply_of(response: IResponse, verb: Verb[Any, R], on_progress: Callable[[StreamLine[R]], None] | None) -> R:
    """The reply line; the progress lines before it go to ``on_progress``, nothing after it is read."""
    replies: list[R] = []

    def take(raw: bytes) -> bool:
        line = verb.decode_line(raw)
        if line.reply is not None:
            replies.append(line.reply)
        elif on_progress is not None:
            on_progress(line)
        return line.reply is not None

    await read_lines(response, MAX_LINE_BYTES, take)
    if not replies:
        raise BodyBroken("it ended before the reply line")
    return replies[0]


async def _not_an_answer(response: IResponse, path: str) -> Outcome:
    """What a status other than 200 and 204 means; never a verdict on what was asked."""
    quoted = (await read_beginning(response, QUOTED_BYTES)).decode("utf-8", "replace")
    if response.code == 404:
        return VerbNotServed(path)
    text = f"{path} was answered with {response.code}: {quoted}"
    if 400 <= response.code < 500:
        return Refused(f"http-{response.code}", text)
    return NotServed(text)
