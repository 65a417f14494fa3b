"""What the contract asks, as what the engine takes (pure)."""

from __future__ import annotations

import json
import os.path
from dataclasses import dataclass
from typing import Any

from localai_dist.rpc import backend_pb2 as pb

_CHOICES = ("auto", "none", "required")


class BadRequest(Exception):
    """A request this backend can't take; the text says why."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """
    How to start the engine.

    Attributes:
        model_file: absolute path of the model, or of its first shard.
        context_size: tokens of context of each slot; 0 takes the model's own.
        slots: requests generated at the same time (option ``parallel:N``, default 1).
        threads: 0 leaves it to the engine.
        batch: tokens decoded at once; an embedding's input must fit in.
        gpu_layers: None leaves it to the engine.
        mmproj: vision projector, or empty.
        mlock, mmap: how the file is held in memory.
    """

    model_file: str
    context_size: int
    slots: int
    threads: int
    batch: int
    gpu_layers: int | None
    mmproj: str
    mlock: bool
    mmap: bool


def engine_settings(options: pb.ModelOptions) -> EngineSettings:
    """
    The settings ``options`` ask for.

    Raises:
        BadRequest: no model file, slots that are no number or have no context, or what would have to be ignored.
    """
    file = options.ModelFile or options.Model
    if not file:
        raise BadRequest("LoadModel names no model file")
    if options.LoraAdapter or options.LoraAdapters:
        raise BadRequest("this backend applies no LoRA adapters")
    batch = options.NBatch if options.NBatch > 0 else 512
    extra = dict(option.partition(":")[::2] for option in options.Options)
    slots = extra.get("parallel") or extra.get("n_parallel") or "1"
    if not slots.isascii() or not slots.isdigit() or int(slots) < 1:
        raise BadRequest(f"option parallel:{slots} is not a number of slots")
    if int(slots) > 1 and options.ContextSize <= 0:
        raise BadRequest(f"option parallel:{slots} needs context_size, the context of each slot")
    return EngineSettings(
        model_file=_under(options.ModelPath, file),
        context_size=max(0, options.ContextSize),
        slots=int(slots),
        threads=max(0, options.Threads),
        # Mean pooling aborts the whole process when a batch does not divide evenly among the slots.
        batch=-(-batch // int(slots)) * int(slots),
        gpu_layers=options.NGPULayers if options.NGPULayers > 0 else None,
        mmproj=_under(options.ModelPath, options.MMProj) if options.MMProj else "",
        mlock=options.MLock,
        mmap=options.MMap,
    )


def _under(root: str, path: str) -> str:
    return path if os.path.isabs(path) or not root else os.path.join(root, path)


def generation(options: pb.PredictOptions) -> tuple[bool, dict[str, Any]]:
    """
    Whether to ask for a chat completion (else a plain one), and the engine's request.

    Raises:
        BadRequest: media, or JSON that is none.
    """
    if options.Images or options.Videos or options.Audios:
        raise BadRequest("this backend takes text only")
    body = _sampling(options)
    body.update(stream=True, timings_per_token=True, stream_options={"include_usage": True})
    chat = options.UseTokenizerTemplate and len(options.Messages) > 0
    if chat:
        body["messages"] = [_message(message) for message in options.Messages]
        body.update(_tools(options))
        if "enable_thinking" in options.Metadata:
            wanted = options.Metadata["enable_thinking"].lower() == "true"
            body["chat_template_kwargs"] = {"enable_thinking": wanted}
        if options.Logprobs > 0:
            body.update(logprobs=True, top_logprobs=options.TopLogprobs or options.Logprobs)
    else:
        body["prompt"] = options.Prompt
        if options.Logprobs > 0:
            body["logprobs"] = options.Logprobs
    return chat, body


def embedding_input(options: pb.PredictOptions) -> str | list[int]:
    """What to embed: token ids, or text."""
    return list(options.EmbeddingTokens) or options.Embeddings or options.Prompt


def _sampling(options: pb.PredictOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": options.Tokens if options.Tokens > 0 else -1,
        "temperature": options.Temperature,
        "cache_prompt": True,
    }
    # proto3 has no "unset": for these a zero means that the caller leaves it to the engine.
    given = {
        "top_k": options.TopK,
        "top_p": options.TopP,
        "min_p": options.MinP,
        "typical_p": options.TypicalP,
        "repeat_penalty": options.Penalty,
        "repeat_last_n": options.Repeat,
        "frequency_penalty": options.FrequencyPenalty,
        "presence_penalty": options.PresencePenalty,
        "seed": options.Seed,
        "n_keep": options.NKeep,
        "mirostat": options.Mirostat,
        "grammar": options.Grammar,
        "stop": list(options.StopPrompts),
        "ignore_eos": options.IgnoreEOS,
    }
    body.update({name: value for name, value in given.items() if value})
    if options.Mirostat:
        body.update(mirostat_eta=options.MirostatETA, mirostat_tau=options.MirostatTAU)
    if options.LogitBias:
        body["logit_bias"] = _parsed("LogitBias", options.LogitBias)
    return body


def _message(message: pb.Message) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name):
            told[name] = getattr(message, name)
    if message.tool_calls:
        told["tool_calls"] = _parsed("tool_calls", message.tool_calls)
    return told


def _tools(options: pb.PredictOptions) -> dict[str, Any]:
    """The engine knows no choice by name: it must call one of the tools, and is told of that one alone."""
    if not options.Tools:
        return {}
    tools, choice = _parsed("Tools", options.Tools), _choice(options.ToolChoice)
    if not isinstance(tools, list) or not all(_name_of(tool) for tool in tools):
        raise BadRequest("Tools: want a list of functions with names")
    if isinstance(choice, dict):
        name, choice = _name_of(choice), "required"
        tools = [tool for tool in tools if _name_of(tool) == name]
        if not tools:
            raise BadRequest(f"ToolChoice: no tool is named {name!r}")
    asked: dict[str, Any] = {"tools": tools, "tool_choice": choice}
    if options.Metadata.get("parallel_tool_calls") == "false":
        asked["parallel_tool_calls"] = False
    return asked


def _choice(text: str) -> str | dict[str, Any]:
    """``text`` is a word, bare or as JSON, or an object that names a function."""
    choice = text if text in _CHOICES else _parsed("ToolChoice", text) if text else "auto"
    if isinstance(choice, dict) or choice in _CHOICES:
        return choice
    raise BadRequest(f"ToolChoice: want {', '.join(_CHOICES)}, or a function by its name")


def _name_of(tool: Any) -> str:
    """The name of the function in a tool or a choice; empty where there is none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _parsed(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadRequest(f"{field} is not JSON: {error}") from error
