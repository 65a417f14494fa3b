"""All model files of a folder at one moment: what is served, and what is wrong with the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from localai_dist.catalog.errors import BadModelFile
from localai_dist.catalog.model import ModelConfig
from localai_dist.catalog.parse import parse_model
from localai_dist.catalog.words import name_in
from localai_dist.ids import ModelName


@dataclass(frozen=True, slots=True)
class ModelProblem:
    """
    What is wrong with one model file.

    Attributes:
        file: its name.
        model: the model it would serve; empty when that one is served from another file.
        served: it serves all the same, and the reason is only odd.
    """

    file: str
    model: str
    reason: str
    served: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    The served models and the files that can't be.

    Attributes:
        models: by name, in the order of their names.
        problems: YAML file name -> what is wrong with it.
        broken: YAML file name -> the model it would serve, for those that can't be read.
        names: YAML file name -> the model it names, for those that can, also if another file serves that one.
    """

    models: Mapping[ModelName, ModelConfig] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def all_problems(self) -> list[ModelProblem]:
        """Files that are not served and those that are odd, by file name."""
        refused = [ModelProblem(source, self.broken.get(source, ""), text) for source, text in self.problems.items()]
        odd = [ModelProblem(one.source, one.name, "; ".join(one.hints), True) for one in self.models.values()]
        return sorted([*refused, *(one for one in odd if one.reason)], key=lambda one: one.file)


def read_snapshot(texts: Mapping[str, str]) -> Snapshot:
    """
    The snapshot of a folder whose YAML files are ``texts`` (file name -> content).

    One bad file costs only itself. Two files with one model name: the first by file name serves, the other is a
    problem.
    """
    models: dict[ModelName, ModelConfig] = {}
    problems: dict[str, str] = {}
    broken: dict[str, str] = {}
    names: dict[str, str] = {}
    for source in sorted(texts):
        try:
            model = parse_model(texts[source], source=source)
        except BadModelFile as error:
            problems[source] = error.reason
            broken[source] = name_in(texts[source], source)
            continue
        names[source] = model.name
        if model.name in models:
            problems[source] = f"the name {model.name} is taken by {models[model.name].source}"
        else:
            models[model.name] = model
    return Snapshot(dict(sorted(models.items())), problems, broken, names)
