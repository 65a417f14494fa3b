"""A model's configuration and its place on the node -> the message LoadModel wants. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from localai_dist.catalog.model import ModelConfig
from localai_dist.rpc import backend_pb2 as pb


def model_options(model: ModelConfig, root: str, present: Collection[str]) -> pb.ModelOptions:
    """
    The options that load ``model``.

    Args:
        root: the model's folder on the worker; every staged file lies below it under its relative name.
        present: relative names that were staged; a companion that is not among them is left out.

    Source: surface §4.4 (Model, ModelFile, ModelPath), §4.5 (field numbers).
    """
    remote = partial(_remote, root, present)
    adapters = _adapters(model, remote)
    options = pb.ModelOptions(
        Model=model.identity,
        ModelFile=f"{root}/{model.model_file}",
        ModelPath=root,
        ContextSize=model.context_size,
        Threads=model.threads,
        NBatch=model.batch,
        F16Memory=model.f16,
        MMap=model.mmap,
        MLock=model.mmlock,
        Embeddings=model.embeddings,
        Reranking=model.reranking,
        MMProj=remote(model.mmproj),
        DraftModel=remote(model.draft_model),
        Tokenizer=remote(model.tokenizer),
        LoraBase=remote(model.lora_base),
        LoraAdapters=[adapter for adapter, _ in adapters],
        LoraScales=[scale for _, scale in adapters],
        Options=model.options,
        Overrides=model.overrides,
    )
    if model.gpu_layers is not None:
        options.NGPULayers = model.gpu_layers
    if model.parameters.seed is not None:
        options.Seed = model.parameters.seed
    return options


def _adapters(model: ModelConfig, remote: Callable[[str], str]) -> list[tuple[str, float]]:
    """Each adapter that is there, with its scale; 1 where the model names none."""
    scales = [*model.lora_scales, *[1.0] * len(model.lora_adapters)]
    placed = zip(map(remote, model.lora_adapters), scales, strict=False)
    return [(adapter, scale) for adapter, scale in placed if adapter]


def _remote(root: str, present: Collection[str], relative: str) -> str:
    """Where a staged file or folder is on the worker; nothing if it is none."""
    staged = relative in present or any(name.startswith(f"{relative}/") for name in present)
    return f"{root}/{relative}" if relative and staged else ""
