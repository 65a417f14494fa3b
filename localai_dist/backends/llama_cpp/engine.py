"""llama.cpp, as the xllamacpp wheel offers it. Every method blocks and is called in a thread."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import xllamacpp

from localai_dist.backends.llama_cpp.asked import EngineSettings

_ERROR_LINE = re.compile(r"^[\d.]+ E (.*)")
_REASONS = 3
_TOO_LONG = "is too large to process"
"""In what the engine says of an embedding's input that does not fit into a batch; it calls that an error of its own."""
_LOAD_MODES = {  # (mapped, locked)
    (False, False): xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE,
    (True, False): xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP,
    (False, True): xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MLOCK,
    (True, True): xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP_MLOCK,
}


class EngineError(Exception):
    """
    What the engine refused.

    Attributes:
        code: its HTTP-like code; 400 and the like are the caller's fault.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Engine:
    """One loaded model with its slots."""

    def __init__(self, settings: EngineSettings) -> None:
        """
        Load the model.

        Raises:
            EngineError: it can't be loaded; the text is what the engine wrote about it.
        """
        self._key = secrets.token_hex(16)
        self._abilities: dict[str, Any] | None = None
        if not os.path.isfile(settings.model_file):
            raise EngineError(404, f"no such model file: {settings.model_file}")
        with _ErrorLines() as lines:
            try:
                self._server = xllamacpp.Server(self._parameters(settings))
            except RuntimeError as error:
                raise EngineError(500, f"{settings.model_file}: {lines.reason() or error}") from error

    def close(self) -> None:
        """Free the memory; no other method may run or be called afterwards."""
        del self._server

    def generate(self, chat: bool, body: dict[str, Any], on_chunk: Callable[[dict[str, Any]], bool]) -> None:
        """
        Generate, calling ``on_chunk`` for each piece until it returns True or all is said.

        Raises:
            EngineError: the request was refused, or generating failed.
        """
        if chat:
            self._check_tools(body)
        failed: list[dict[str, Any]] = []

        def take(chunk: dict[str, Any]) -> bool:
            if "error" in chunk:
                failed.append(chunk["error"])
                return True
            return on_chunk(chunk)

        ask = self._server.handle_chat_completions if chat else self._server.handle_completions
        try:
            ask(body, take)
        except ValueError as error:  # how the wheel says that it does not take the request
            raise EngineError(400, str(error)) from error
        except RuntimeError as error:
            raise EngineError(500, str(error)) from error
        if failed:
            raise EngineError(int(failed[0].get("code", 500)), str(failed[0].get("message", failed[0])))

    def embed(self, given: str | list[int]) -> tuple[list[float], int]:
        """
        The embedding of a text or of token ids, and how many tokens that was.

        Raises:
            EngineError: the input is too long, or the model can't embed.
        """
        answer = self._server.handle_embeddings({"input": given})
        if "error" in answer:
            text = str(answer["error"].get("message"))
            raise EngineError(400 if _TOO_LONG in text else int(answer["error"].get("code", 500)), text)
        return answer["data"][0]["embedding"], answer.get("usage", {}).get("prompt_tokens", 0)

    def tokenize(self, text: str) -> list[int]:
        """
        The tokens of ``text``.

        Raises:
            EngineError: the engine refused.
        """
        return self._over_http("POST", "/tokenize", {"content": text})["tokens"]

    def _check_tools(self, body: dict[str, Any]) -> None:
        """
        Refuse tools that the model would not hear of: the engine leaves out what a chat template has no place for.

        Raises:
            EngineError: 400.
        """
        offered = body.get("tools") and body.get("tool_choice") != "none"
        told = any(message.get("tool_calls") or message["role"] == "tool" for message in body["messages"])
        if not offered and not told:
            return
        if self._abilities is None:
            self._abilities = self._over_http("GET", "/props").get("chat_template_caps") or {}
        # An older wheel says nothing of its templates: then they are believed to have a place.
        if offered and not self._abilities.get("supports_tools", True):
            raise EngineError(400, "this model can't call tools: the chat template in its file has no place for them")
        if told and not self._abilities.get("supports_tool_calls", True):
            raise EngineError(
                400, "this model knows no tool calls: the chat template in its file has no place for them"
            )

    def _over_http(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """
        What the wheel offers only over the engine's loopback HTTP.

        Raises:
            EngineError: the engine refused.
        """
        address = self._server.listening_address.removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=30)
        try:
            headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineError(500, f"{path}: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise EngineError(response.status, str(answer.get("error", answer)))
        return answer

    def _parameters(self, settings: EngineSettings) -> Any:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = settings.model_file
        parameters.n_parallel = settings.slots
        parameters.n_ctx = settings.context_size * settings.slots
        parameters.n_batch = parameters.n_ubatch = settings.batch
        if settings.threads:
            parameters.cpuparams.n_threads = settings.threads
            parameters.cpuparams_batch.n_threads = settings.threads
        parameters.load_mode = _LOAD_MODES[settings.mmap, settings.mlock]
        if settings.gpu_layers is not None:
            parameters.n_gpu_layers = settings.gpu_layers
        if settings.mmproj:
            parameters.mmproj.path = settings.mmproj
        parameters.embedding = True
        parameters.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
        # The engine opens an HTTP API of its own on a free loopback port; nobody but us shall use it.
        parameters.api_keys = [self._key]
        parameters.ui = False
        parameters.endpoint_slots = False
        parameters.warmup = False
        return parameters


class _ErrorLines:
    """
    Collects what the engine writes to stderr while a model loads, and passes it on.

    llama.cpp gives the reason of a failed load nowhere else. A child (``tee``) does the reading: the wheel holds the
    interpreter's lock while it loads, so a thread of ours could not, and a full pipe would stop the load for good.
    """

    def __enter__(self) -> Self:
        self._kept = tempfile.NamedTemporaryFile(prefix="llama-cpp-")
        self._saved = os.dup(2)
        self._tee = subprocess.Popen(["tee", self._kept.name], stdin=subprocess.PIPE, stdout=self._saved)
        assert self._tee.stdin is not None
        os.dup2(self._tee.stdin.fileno(), 2)
        self._tee.stdin.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        os.close(self._saved)
        self._kept.close()

    def reason(self) -> str:
        """The first error lines, without their timestamps."""
        time.sleep(0.05)  # the engine's log has a thread of its own
        self._restore()
        found: dict[str, None] = {}
        for line in self._kept.read().decode(errors="replace").splitlines():
            match = _ERROR_LINE.match(line)
            if match:
                found[match[1].strip()] = None
        return "; ".join(list(found)[:_REASONS])

    def _restore(self) -> None:
        """Give stderr back; with that ``tee`` has seen all of it and ends."""
        os.dup2(self._saved, 2)
        self._tee.wait()
