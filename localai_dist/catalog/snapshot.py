"""All model files of a folder at one moment: what is served, and what is wrong with the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from localai_dist.catalog.errors import BadModelFile
from localai_dist.catalog.model import ModelConfig
from localai_dist.catalog.parse import parse_model
from localai_dist.ids import ModelName


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    The served models and the files that can't be.

    Attributes:
        models: by name, in the order of their names.
        problems: YAML file name -> what is wrong with it.
    """

    models: Mapping[ModelName, ModelConfig] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)


def read_snapshot(texts: Mapping[str, str]) -> Snapshot:
    """
    The snapshot of a folder whose YAML files are ``texts`` (file name -> content).

    One bad file costs only itself. Two files with one model name: the first by file name serves, the other is a
    problem.
    """
    models: dict[ModelName, ModelConfig] = {}
    problems: dict[str, str] = {}
    for source in sorted(texts):
        try:
            model = parse_model(texts[source], source=source)
        except BadModelFile as error:
            problems[source] = error.reason
            continue
        if model.name in models:
            problems[source] = f"the name {model.name} is taken by {models[model.name].source}"
        else:
            models[model.name] = model
    return Snapshot(dict(sorted(models.items())), problems)
