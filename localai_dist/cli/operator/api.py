"""One question to a frontend's HTTP API, and what its refusals mean for the operator."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from localai_dist.errors import LocalAIDistError


class ApiFailure(LocalAIDistError):
    """The frontend could not be asked, or refused; one sentence (exit code 1)."""


class NotFound(ApiFailure):
    """What was asked for is not there (exit code 4)."""


class StillLoading(ApiFailure):
    """
    The model's load goes on.

    Attributes:
        loading: the load status as the API tells it.
        retry_after: how long to wait before the next question (s).
    """

    def __init__(self, text: str, loading: dict[str, Any], retry_after: float) -> None:
        super().__init__(text)
        self.loading = loading
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Answer:
    """What a frontend answered, whatever the status."""

    status: int
    text: bytes
    retry_after: str = ""

    def json(self) -> Any:
        """The body, decoded; None when it is not JSON."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    def seconds_to_wait(self) -> float:
        """Its ``Retry-After`` (s), from 1 to 60."""
        try:
            return max(1.0, min(60.0, float(self.retry_after)))
        except ValueError:
            return 5.0


@dataclass(frozen=True, slots=True)
class Api:
    """
    A frontend as the operator reaches it.

    Attributes:
        server: its address, without a trailing slash.
        key: the admin key; empty: none is sent.
    """

    server: str
    key: str = ""

    def get(self, path: str) -> Any:
        """The decoded answer to a GET; raises as ``call`` does."""
        return self.call("GET", path)

    def call(self, method: str, path: str, body: Any = None, *, timeout: float = 30.0) -> Any:
        """
        The decoded answer; None for an empty one.

        Args:
            method: HTTP method.
            path: from the root, already quoted.
            body: sent as JSON; None: no body.
            timeout: of each wait on the socket (s).

        Raises:
            NotFound: 404.
            StillLoading: 503 ``model_loading``.
            ApiFailure: nobody answers, or any other refusal.
        """
        answer = self.ask(method, path, body, timeout=timeout)
        if answer.status >= 400:
            raise _refused(answer, has_key=bool(self.key))
        if not answer.text.strip():
            return None
        decoded = answer.json()
        if decoded is None:
            raise ApiFailure(f"{self.server}{path} did not answer JSON: is that a localai-dist frontend?")
        return decoded

    def ask(self, method: str, path: str, body: Any = None, *, timeout: float = 30.0) -> Answer:
        """
        The answer whatever its status; arguments as for ``call``.

        Raises:
            ApiFailure: nobody answers.
        """
        headers = {"Accept": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        sent = None if body is None else json.dumps(body).encode()
        if sent is not None:
            headers["Content-Type"] = "application/json"
        try:
            request = urllib.request.Request(self.server + path, data=sent, headers=headers, method=method)
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return Answer(response.status, response.read(), response.headers.get("Retry-After", ""))
        except urllib.error.HTTPError as refusal:
            with refusal:
                return Answer(refusal.code, refusal.read(), refusal.headers.get("Retry-After", ""))
        except (OSError, http.client.HTTPException, ValueError) as problem:
            why = getattr(problem, "reason", None) or problem
            raise ApiFailure(f"can't ask {self.server}: {getattr(why, 'strerror', None) or why}") from problem


def model_problems(api: Api) -> list[dict[str, Any]]:
    """The model files that the frontend finds wrong; none from a release that does not tell."""
    try:
        answer = api.get("/api/models/problems")
    except NotFound:
        return []
    return list((answer or {}).get("problems", []))


def part(text: str) -> str:
    """``text`` as one part of a path."""
    return quote(text, safe="")


def _refused(answer: Answer, *, has_key: bool) -> ApiFailure:
    message, code, envelope = _envelope(answer)
    if answer.status == 404:
        return NotFound(message or "not found")
    if answer.status == 401 and "LOCALAI_API_KEY" in message:
        return ApiFailure(f"the frontend admits no operator: {message}")
    if answer.status == 401:
        hint = "the key in LOCALAI_CLI_API_KEY is not known there" if has_key else "set LOCALAI_CLI_API_KEY"
        return ApiFailure(f"the frontend wants a key: {hint}")
    if answer.status == 503 and code == "model_loading":
        loading = envelope.get("loading")
        return StillLoading(message, loading if isinstance(loading, dict) else {}, answer.seconds_to_wait())
    return ApiFailure(f"{message or 'the frontend refused'} ({answer.status}{' ' + code if code else ''})")


def _envelope(answer: Answer) -> tuple[str, str, dict[str, Any]]:
    """Message, code and whole ``error`` object of an error body; empty where it has none."""
    body = answer.json()
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, str):
        return error, "", {}
    if not isinstance(error, dict):
        return " ".join(answer.text.decode("utf-8", "replace").split())[:300], "", {}
    found = {**({"loading": body["loading"]} if "loading" in body else {}), **error}
    code = error.get("code")
    return str(error.get("message", "")), code if isinstance(code, str) else "", found
