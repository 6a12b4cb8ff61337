"""The models of the service by name. A model is opened, run once, and only then visible."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from vitrail.base.errors import ConfigError, VitrailError
from vitrail.base.kinds import Explorer, ServedModel, call_command, find_kind
from vitrail.opening import detect_kind, refuse_models_without_layers
from vitrail.serve.request_errors import unknown_model_error

DEFAULT_MODEL = "cct_cifar10"  # of the package
NUMBERS = count()
NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


@dataclass(frozen=True, eq=False)
class HostedModel:
    """A model that answers requests. Reloading makes a new one; requests that wait keep theirs."""

    name: str
    source: str
    served: ServedModel
    explorer: Explorer | None
    no_explorer_reason: str | None
    description: Mapping[str, Any] | None  # of the explorer
    seconds: float  # of the warm item
    number: int  # of this opening, which differs after each reload

    def describe(self) -> dict[str, Any]:
        """The model as the page and clients see it."""
        return {
            "name": self.name,
            "kind": self.served.facts.get("kind"),
            "facts": dict(self.served.facts),
            "explore": None if self.description is None else dict(self.description),
            "reason": self.no_explorer_reason,
        }


def parse_names(models: Iterable[str]) -> dict[str, str]:
    """NAME=MODEL, or a model whose name is the last part of its path."""
    found = dict[str, str]()
    for given in models or (DEFAULT_MODEL,):
        name, equals, source = given.partition("=")
        if not equals:
            name, source = suggest_name(given), given
        if not source or not name or set(name) - NAME_CHARACTERS or name.startswith("."):
            raise ConfigError(f"{given!r}; expected NAME=MODEL with a name of letters, digits, '.', '_' and '-'")
        if name in found:
            raise ConfigError(f"{found[name]} and {source} both have the name {name}; name one of them: other={source}")
        found[name] = source
    return found


def suggest_name(source: str) -> str:
    """vit_fashion of runs/vit_fashion; the folder above if the last part says nothing."""
    path = Path(source.rstrip("/"))
    stem = path.name.removesuffix(".onnx").removesuffix(".safetensors").removesuffix(".pth")
    if stem in ("model", "best", "last", "checkpoint") and path.parent.name:
        stem = path.parent.name
    stem = "".join(each if each in NAME_CHARACTERS else "-" for each in stem.partition(":")[2] or stem)
    return stem.strip("-.") or "model"


def host_model(name: str, source: str, options: Mapping[str, Any]) -> HostedModel:
    """Open a model and its explorer by the kind of the model, and run it once."""
    kind = find_kind(detect_kind(source)[0], source)
    served: ServedModel = call_command(kind, "serve", source, options)
    seconds = warm_up(served)
    explorer, description, reason = None, None, f"vitrail has no figures for a model that {kind.does}"
    if "explore" in kind.commands:
        try:
            refuse_models_without_layers(source)  # before torch is imported
            explorer = call_command(kind, "explore", source, {"opened": served.opened})
            description, reason = explorer.describe(), None
        except VitrailError as error:  # the model predicts, but cannot be looked into
            explorer, reason = None, str(error)
    return HostedModel(name, source, served, explorer, reason, description, seconds, next(NUMBERS))


def warm_up(served: ServedModel) -> float:
    """Run an example, so that the first request is not slower than others; seconds of the second run."""
    settings = served.parse_settings({})
    first = served.inputs[0]
    outputs = [each.name for each in served.outputs]
    start = perf_counter()
    for _ in range(2):
        start = perf_counter()
        served.run(served.prepare(first.name, served.example, settings), outputs)
    return perf_counter() - start


class ModelTable:
    """The models by name; the first is the one that is meant by no name."""

    def __init__(self, models: Iterable[HostedModel]) -> None:
        self.models = {each.name: each for each in models}

    def __iter__(self) -> Iterator[HostedModel]:
        return iter(self.models.values())

    @property
    def names(self) -> list[str]:
        return list(self.models)

    def find(self, name: str | None) -> HostedModel:
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise unknown_model_error(name, self.names)
        return self.models[name]

    def replace(self, model: HostedModel) -> None:
        self.models[model.name] = model
