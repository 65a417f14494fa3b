"""
Every error a client can see, as one value; and what each exception of the lower folders becomes.

A client learns the cause; where the database, the folders and the other frontends are is for operators alone.

Source: design §8 (the table of statuses, codes and types) and §2 (the four conditions).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from localai_dist.catalog.snapshot import ModelProblem
from localai_dist.errors import InvalidName, InvalidQuantity, LocalAIDistError, without_coordinates
from localai_dist.loads.errors import LoadCancelled, LoadFailed, StillLoading, UnloadFailed
from localai_dist.reach import Unreached, client_answer
from localai_dist.registry.errors import NotPending, RegistryError, UnknownNode
from localai_dist.registry.records import BadRegistration, BadScheduling
from localai_dist.scheduler.placement import NoPlace
from localai_dist.serving.errors import DiskFull, RequestRefused
from localai_dist.staging.errors import NoSpace
from localai_dist.store.errors import StoreUnavailable

CONDITION_HEADER = "x-localai-condition"

CAPACITY_RETRY = 5
"""Retry-After when no node has room (s)."""


class ApiError(LocalAIDistError):
    """
    An answer that is an error.

    Attributes:
        status: HTTP status.
        code: the envelope's ``code``.
        message: for whoever asks.
        detail: the same for operators, with addresses and folders; the message unless given.
        type: the envelope's ``type``; by the status unless given.
        param: the request's field that is at fault.
        retry_after: whole seconds for ``Retry-After``.
        headers: further response headers.
        extra: members beside ``error`` in the body, like ``loading``.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, object] | None = None,
        detail: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.detail = detail or message
        self.type = type or type_of(status)
        self.param = param
        self.retry_after = retry_after
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    def body(self) -> dict[str, object]:
        """The JSON envelope."""
        error = {"message": self.message, "type": self.type, "code": self.code, "param": self.param}
        return {"error": error, **self.extra}


def told(error: LocalAIDistError, status: int, code: str, **more: Any) -> ApiError:
    """``error`` as an answer: what a client may be told of it, and its whole text for operators; ``more``: as there."""
    return ApiError(status, code, error.told, detail=str(error), **more)


def type_of(status: int) -> str:
    """The envelope's ``type`` for a status."""
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A request the client must change: 400."""
    return ApiError(400, "invalid_request", message, param=param)


def too_large(limit: int) -> ApiError:
    """A body over the limit: 413."""
    return ApiError(413, "request_too_large", f"the body is over {limit} bytes")


def not_found(message: str) -> ApiError:
    """Something that is not there: 404."""
    return ApiError(404, "not_found", message)


def node_not_found(node: str) -> ApiError:
    """No node has that id or name: 404."""
    return not_found(f"node not found: {node}")


def model_not_found(name: str, served: Iterable[str], problems: Iterable[ModelProblem]) -> ApiError:
    """
    A model nobody serves: 404, as OpenAI words it; with the reason if its file is broken, else with names like it.

    Args:
        served: the models there are.
        problems: what is wrong with model files.
    """
    broken = next((one for one in problems if one.model == name and not one.served), None)
    if broken is not None:
        text = f"the model {name!r} can't be served: its file {broken.file} is wrong: "
        why = without_coordinates(broken.reason)
        return ApiError(404, "model_not_found", text + why, param="model", detail=text + broken.reason)
    near = difflib.get_close_matches(name, list(served), n=3)
    text = f"the model {name!r} does not exist" + (f"; did you mean {', '.join(near)}?" if near else "")
    return ApiError(404, "model_not_found", text, param="model")


def unauthorized(message: str, code: str = "invalid_api_key") -> ApiError:
    """No credential, or a wrong one: 401."""
    return ApiError(401, code, message, headers={"WWW-Authenticate": "Bearer"})


def forbidden(message: str) -> ApiError:
    """A good credential that does not reach this far: 403."""
    return ApiError(403, "forbidden", message)


def no_capacity(error: LocalAIDistError) -> ApiError:
    """No room for a model, or for a request's file, that others may leave in a moment: 503."""
    return told(error, 503, "capacity", retry_after=CAPACITY_RETRY)


def of_unreached(error: Unreached) -> ApiError:
    """One of design §2's outcomes."""
    answer = client_answer(error.outcome)
    headers = {CONDITION_HEADER: answer.code}
    return told(error, answer.status, answer.code, retry_after=answer.retry_after, headers=headers)


def of_loading(error: StillLoading) -> ApiError:
    """A load that goes on after the request's wait is over: 503 with the ``loading`` object."""
    return ApiError(
        503,
        "model_loading",
        error.told,
        type="model_loading",
        retry_after=error.retry_after,
        extra={"loading": error.status.as_json()},
        detail=str(error),
    )


def of_no_place(error: NoPlace) -> ApiError:
    """No node can take the model: the condition its nodes are in, or that there is no room."""
    if error.outcome is not None:
        return of_unreached(Unreached(error.outcome))
    return no_capacity(error)


def api_error_of(error: BaseException | None) -> ApiError | None:
    """What a client is told about ``error``; None when it is nothing foreseen."""
    match error:
        case ApiError():
            return error
        case Unreached():
            return of_unreached(error)
        case StillLoading():
            return of_loading(error)
        case LoadCancelled():
            # The clients' own retry would start the very load that somebody has just cancelled.
            return told(error, 500, "model_load_cancelled", headers={"x-should-retry": "false"})
        case LoadFailed():
            return told(error, 500, "model_load_failed")
        case UnloadFailed():
            return told(error, 500, "unload_failed")
        case NoPlace():
            return of_no_place(error)
        case NoSpace() | DiskFull():
            return no_capacity(error)
        case StoreUnavailable():
            code = "registry_unavailable"
            return told(error, 503, code, retry_after=2, headers={CONDITION_HEADER: code})
        case UnknownNode():
            return not_found(error.told)
        case RegistryError() if not isinstance(error, NotPending):
            return told(error, 409, "conflict")
        case BadRegistration() | BadScheduling():
            return bad_request(error.told, _field_of(error.told))
        case RequestRefused() | NotPending() | InvalidName() | InvalidQuantity():
            return told(error, 400, "invalid_request")
        case _:
            return None


def _field_of(text: str) -> str | None:
    """The field a registry refusal begins with: ``name: want ...``."""
    field, colon, _ = text.partition(":")
    return field.partition(",")[0] if colon else None
