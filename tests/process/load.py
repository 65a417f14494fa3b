"""A steady load of chat requests, every second one streamed, and what came of it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Self
from urllib.parse import urlsplit

ANSWER = " ".join(f"token{number}" for number in range(10))
PATIENCE = 60.0
"""How long one answer may stay silent (s)."""


class Trouble(Exception):
    """What a client saw instead of a whole answer."""


def said(
    url: str, key: str, model: str, begun: threading.Semaphore | None = None, *, headers: dict[str, str] | None = None
) -> str:
    """
    The text of one streamed chat; its end must be the protocol's own.

    Args:
        begun: released once the first token is here.

    Raises:
        Trouble: another status, an error in the stream, a stream that was cut.
    """
    text, done = "", False
    for event in _events(url, key, model, headers or {}):
        if event == "[DONE]":
            done = True
            continue
        frame = json.loads(event)
        if "error" in frame:
            raise Trouble(f"in the stream: {frame['error']['code']}: {frame['error']['message']}")
        piece = frame["choices"][0]["delta"].get("content") or "" if frame["choices"] else ""
        if piece and not text and begun is not None:
            begun.release()
        text += piece
    if not done:
        raise Trouble(f"the stream was cut after {text[-40:]!r}")
    return text


def whole(url: str, key: str, model: str, *, headers: dict[str, str] | None = None) -> str:
    """The text of one chat that is not streamed; raises ``Trouble``."""
    with _Answer(url, key, model, False, headers or {}) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])


def _events(url: str, key: str, model: str, headers: dict[str, str]) -> Iterator[str]:
    with _Answer(url, key, model, True, headers) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield line[6:].decode().strip()


class _Answer:
    """The answer to one chat request, which must be 200."""

    def __init__(self, url: str, key: str, model: str, stream: bool, headers: dict[str, str]) -> None:
        where = urlsplit(url)
        self._connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE)
        self._body = json.dumps({"model": model, "stream": stream, "messages": [{"role": "user", "content": "go"}]})
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}

    def __enter__(self) -> http.client.HTTPResponse:
        """Ask."""
        try:
            self._connection.request("POST", "/v1/chat/completions", self._body, self._headers)
            answer = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise Trouble(f"no answer: {error!r}") from error
        if answer.status != 200:
            text = answer.read().decode(errors="replace")
            self._connection.close()
            raise Trouble(f"{answer.status}: {text[:300]}")
        return answer

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        """Close; a connection that broke is a trouble."""
        self._connection.close()
        if isinstance(error, OSError | http.client.HTTPException):
            raise Trouble(f"the answer broke: {error!r}") from error


class Load:
    """
    Requests at a steady rate, whatever the answers take; use it around what must not disturb them.

    Attributes:
        troubles: what went wrong, one line a request.
        asked: how many requests were made.
        lasted: for how long they were made (s).
        answered, streamed: whole answers, and how many of them were streamed.
        texts: every distinct answer.
    """

    def __init__(self, url: str, key: str, models: list[str], *, rate: float) -> None:
        self.troubles: list[str] = []
        self.asked = 0
        self.lasted = 0.0
        self.answered = 0
        self.streamed = 0
        self.texts: set[str] = set()
        self._url = url
        self._key = key
        self._models = models
        self._rate = rate
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(200)
        self._pace = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self._began = time.monotonic()
        self._pace.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ask no more; every answer under way is waited for."""
        self.lasted = time.monotonic() - self._began
        self._over.set()
        self._pace.join(10)
        self._pool.shutdown()

    @property
    def steady(self) -> bool:
        """Whether requests came all the time, at half the rate at least on a busy machine, and each was answered."""
        return self.asked >= 0.5 * self._rate * self.lasted and self.answered == self.asked

    def _run(self) -> None:
        while not self._over.wait(max(0.0, self._began + self.asked / self._rate - time.monotonic())):
            self._pool.submit(self._one, self.asked)
            self.asked += 1

    def _one(self, number: int) -> None:
        model, streamed = self._models[number // 2 % len(self._models)], number % 2 == 0
        began = time.monotonic() - self._began
        try:
            text = (said if streamed else whole)(self._url, self._key, model)
        except Trouble as trouble:
            with self._lock:
                self.troubles.append(f"{number} at {began:.2f} s ({model}): {trouble}")
            return
        with self._lock:
            self.answered += 1
            self.streamed += streamed
            self.texts.add(text)
