"""
One model YAML -> one ``ModelConfig``.

Known keys of a wrong type are errors; unknown keys are ignored, because people bring their LocalAI model files along,
with a hint when one is nearly a known key.

Source: reference/surface.md §4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any

import msgspec
import yaml

from localai_dist.catalog import words
from localai_dist.catalog.errors import BadModelFile
from localai_dist.catalog.loader import read_yaml
from localai_dist.catalog.model import ModelConfig, Parameters, Template
from localai_dist.errors import InvalidName
from localai_dist.ids import ModelName, file_parts, folder_of

FLOAT32_MAX = 3.4028234663852886e38
"""The largest number of a ``float`` of the contract with backends."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Whole = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""An ``int32`` of the contract with backends."""
Real = Annotated[float, msgspec.Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]
"""A ``float`` of that contract; infinity and what is no number are none."""

NAME_LIMIT = 255
"""Characters of a model's and of a backend's name at most (the width of the registry's columns)."""


class _ParametersKeys(msgspec.Struct, kw_only=True):
    model: str = ""
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Whole | None = None
    min_p: Real | None = None
    max_tokens: Count | None = None
    seed: Whole | None = None
    repeat_penalty: Real | None = None
    frequency_penalty: Real | None = None
    presence_penalty: Real | None = None
    stop: list[str] | None = None


class _TemplateKeys(msgspec.Struct, kw_only=True):
    use_tokenizer_template: bool | None = None


class _ModelKeys(msgspec.Struct, kw_only=True):
    name: str = ""
    backend: str = ""
    parameters: _ParametersKeys = msgspec.field(default_factory=_ParametersKeys)
    context_size: Count | None = None
    threads: Count | None = None
    batch: Count | None = None
    f16: bool | None = None
    gpu_layers: Whole | None = None
    mmap: bool | None = None
    mmlock: bool | None = None
    embeddings: bool | None = None
    reranking: bool | None = None
    mmproj: str | None = None
    draft_model: str | None = None
    tokenizer: str | None = None
    lora_base: str | None = None
    lora_adapter: str | None = None
    lora_adapters: list[str] | None = None
    lora_scale: Real | None = None
    lora_scales: list[Real] | None = None
    template: _TemplateKeys | None = None
    options: list[str] | None = None
    overrides: list[str] | None = None
    stopwords: list[str] | None = None
    system_prompt: str | None = None
    disabled: bool | None = None


_KEYS = _ModelKeys.__struct_fields__
_PARAMETERS = _ParametersKeys.__struct_fields__


def parse_model(text: str, *, source: str) -> ModelConfig:
    """
    The model that the YAML ``text`` of the file ``source`` describes.

    Raises:
        BadModelFile: no YAML, a known key of a wrong type or with a value no backend can be told, no name, no
            backend, no weights file, or a name or path that leaves the models folder.
    """
    keys, hints = _read_keys(text, source)
    _demand(source, keys, hints)
    for path in _paths(keys):
        _refuse_outside(source, keys.name, path)
    return ModelConfig(
        name=ModelName(keys.name),
        backend=keys.backend,
        parameters=_parameters(keys.parameters),
        template=_template(keys.template),
        lora_adapters=tuple(_adapters(keys)),
        lora_scales=tuple(_scales(keys)),
        source=source,
        hints=hints,
        **_given(keys, "context_size threads batch f16 gpu_layers mmap mmlock embeddings reranking"),
        **_given(keys, "mmproj draft_model tokenizer lora_base system_prompt disabled"),
        **_given_lists(keys, "options overrides stopwords"),
    )


def _read_keys(text: str, source: str) -> tuple[_ModelKeys, tuple[str, ...]]:
    """The keys, and hints about those that are nearly known ones."""
    try:
        document = read_yaml(text)
    except yaml.YAMLError as error:
        raise BadModelFile(source, words.of_yaml(error)) from error
    except Exception as error:  # the library promises nothing else, and raises OverflowError, RecursionError, ...
        raise BadModelFile(source, f"can't be read as YAML: {_one_line(error)}") from error
    if not isinstance(document, dict):
        raise BadModelFile(source, "want a mapping of keys at the top, like name: tiny-facts")
    try:
        keys = msgspec.convert(document, _ModelKeys)
        msgspec.json.encode(keys)  # raises for text that is no text: half of a surrogate pair
    except msgspec.ValidationError as error:
        raise BadModelFile(source, words.of_shape(str(error))) from error
    except UnicodeEncodeError as error:
        raise BadModelFile(source, f"holds characters that are none: {_one_line(error)}") from error
    return keys, _hints(document)


def _hints(document: Mapping[Any, Any]) -> tuple[str, ...]:
    inner = document.get("parameters")
    parameters = words.slips(inner if isinstance(inner, dict) else {}, _PARAMETERS, inside="parameters.")
    return words.slips(document, _KEYS) + parameters


def _demand(source: str, keys: _ModelKeys, hints: tuple[str, ...]) -> None:
    for key, value, example in (
        ("name", keys.name, "name: tiny-facts"),
        ("backend", keys.backend, "backend: llama-cpp"),
        ("parameters.model", keys.parameters.model, "parameters: {model: tiny-facts.gguf}"),
    ):
        if not value:
            text = f"{key} is missing: want a line like {example}"
            raise BadModelFile(source, "; ".join([text, *hints]))
    if len(keys.name) > NAME_LIMIT or any(ord(character) < 0x21 or character == "#" for character in keys.name):
        raise BadModelFile(source, f"name: want at most {NAME_LIMIT} characters, no space and no #")
    if len(keys.backend) > NAME_LIMIT or any(ord(character) < 0x20 for character in keys.backend):
        raise BadModelFile(source, f"backend: want at most {NAME_LIMIT} characters, no control characters")
    try:
        folder_of(keys.name)  # it names a folder on the workers
    except InvalidName as error:
        raise BadModelFile(source, f"name: {error}") from error


def _paths(keys: _ModelKeys) -> list[str]:
    named = [keys.parameters.model, keys.mmproj, keys.draft_model, keys.tokenizer, keys.lora_base]
    return [path for path in (*named, *_adapters(keys)) if path]


def _refuse_outside(source: str, name: str, path: str) -> None:
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or "\\" in path or "\0" in path or path.endswith("/") or path == ".":
        raise BadModelFile(source, f"{path!r} is not a file below the models folder: want a relative path without ..")
    try:
        file_parts(str(PurePosixPath("models", folder_of(name), path)))  # where it will lie on a worker
    except InvalidName as error:
        raise BadModelFile(source, f"{path[:80]!r} can't be copied to a worker: {error}") from error


def _parameters(keys: _ParametersKeys) -> Parameters:
    plain = {name: getattr(keys, name) for name in keys.__struct_fields__ if name != "stop"}
    return Parameters(stop=tuple(keys.stop or ()), **plain)


def _template(keys: _TemplateKeys | None) -> Template:
    if keys is None or keys.use_tokenizer_template is None:
        return Template()
    return Template(use_tokenizer_template=keys.use_tokenizer_template)


def _adapters(keys: _ModelKeys) -> list[str]:
    return ([keys.lora_adapter] if keys.lora_adapter else []) + list(keys.lora_adapters or ())


def _scales(keys: _ModelKeys) -> list[float]:
    if keys.lora_scales is not None:
        return keys.lora_scales
    return [] if keys.lora_scale is None else [keys.lora_scale]


def _given(keys: _ModelKeys, names: str) -> dict[str, Any]:
    return {name: value for name in names.split() if (value := getattr(keys, name)) is not None}


def _given_lists(keys: _ModelKeys, names: str) -> dict[str, Any]:
    return {name: tuple(value) for name in names.split() if (value := getattr(keys, name)) is not None}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
