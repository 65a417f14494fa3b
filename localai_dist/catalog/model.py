"""
One served model: its configuration as the operator wrote it, and the files that belong to it.

Source: reference/surface.md §4.1 for the keys; our subset is what the gRPC contract can carry to a backend.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from localai_dist.catalog.revision import revision_of
from localai_dist.ids import ModelName

_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)")


@dataclass(frozen=True, slots=True)
class Parameters:
    """
    What a request means when it does not say; None is "as this build's default has it".

    Attributes:
        model: the weights file, relative to the models folder; also the identity a backend is asked for.
        max_tokens: tokens generated at most; None is "until the model stops".
    """

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Template:
    """
    How chat messages become a prompt.

    Attributes:
        use_tokenizer_template: the engine applies the template inside the weights file; False sends the messages'
            texts joined by line breaks.
    """

    use_tokenizer_template: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """
    One model YAML, understood.

    Attributes:
        name: what clients ask for.
        backend: the backend that runs it.
        context_size: tokens of context; 0 leaves it to the backend.
        threads: CPU threads; 0 leaves it to the backend.
        gpu_layers: layers put on the GPU; None leaves it to the backend.
        options: free ``key:value`` settings handed to the backend.
        source: the YAML file's name; no part of the meaning.
        hints: what is odd about the file though it serves: unknown keys that are nearly known ones; likewise.
    """

    name: ModelName
    backend: str
    parameters: Parameters
    context_size: int = 0
    threads: int = 0
    batch: int = 0
    f16: bool = False
    gpu_layers: int | None = None
    mmap: bool = True
    mmlock: bool = False
    embeddings: bool = False
    reranking: bool = False
    mmproj: str = ""
    draft_model: str = ""
    tokenizer: str = ""
    lora_base: str = ""
    lora_adapters: tuple[str, ...] = ()
    lora_scales: tuple[float, ...] = ()
    template: Template = field(default_factory=Template)
    options: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    stopwords: tuple[str, ...] = ()
    system_prompt: str = ""
    disabled: bool = False
    source: str = field(default="", compare=False)
    hints: tuple[str, ...] = field(default=(), compare=False)

    @property
    def model_file(self) -> str:
        """The weights file a backend is told to load, relative to the models folder."""
        return self.parameters.model

    @property
    def identity(self) -> str:
        """What requests carry as ``ModelIdentity``, so that a backend holding another model refuses them."""
        return self.parameters.model

    @property
    def revision(self) -> str:
        """The hash of this config's meaning: layout, comments and the file's name do not count."""
        return revision_of(self)

    def files(self) -> tuple[str, ...]:
        """Every file a worker needs for this model, relative to the models folder, the weights first, each once."""
        companions = (self.mmproj, self.draft_model, self.tokenizer, self.lora_base, *self.lora_adapters)
        named = [shard for path in (self.parameters.model, *companions) if path for shard in shards_of(path)]
        return tuple(dict.fromkeys(named))

    def option_values(self) -> tuple[str, ...]:
        """What follows the key in each ``key:value`` of options and overrides: some of it may be paths."""
        pairs = (option.partition(":") for option in (*self.options, *self.overrides))
        return tuple(dict.fromkeys(value for _, _, value in pairs if value))


def shards_of(path: str) -> tuple[str, ...]:
    """
    ``path`` and, when it is the first piece of a split GGUF, all its pieces in order.

    Source: llama.cpp's naming, ``NAME-00001-of-00007.gguf``.
    """
    found = _SHARD.fullmatch(path)
    if found is None or int(found["index"]) != 1:
        return (path,)
    count = found["count"]
    return tuple(f"{found['stem']}-{piece:05}-of-{count}{found['suffix']}" for piece in range(1, int(count) + 1))
