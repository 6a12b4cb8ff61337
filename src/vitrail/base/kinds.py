"""The kinds of models, found by name. What differs between them is one file each in `vitrail.kinds`.

What lies below the kinds knows only their names: a model is opened, evaluated or explained by its kind.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from vitrail.base.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from vitrail.base.table import Table

KINDS = {"image": "vitrail.kinds.image", "text": "vitrail.kinds.text", "caption": "vitrail.kinds.caption"}  # modules


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a kind of models can do.

    `commands` has, as "module:function", what each command calls with the name of the model and its options; those that
    the function does not take are refused. `predict`, `embed`, `translate` and `caption` return a RowSource of
    `vitrail.predict.job`, and `evaluate` an OpenEvaluation.
    """

    name: str  # in config.json
    does: str  # reads images
    use: str  # the command that a model of this kind is used with
    commands: Mapping[str, str]
    open: Callable[..., Any]  # (name, run, options of `open_model`) → Opened
    open_source: Callable[..., Any]  # (task, data, recipe, options of `fit`) → the data that a task is trained on
    describe_next_steps: Callable[..., str]  # (run folder, model folder, plan) → what a run reports at its end


class ModelScores(Protocol):
    """The result of an evaluation; `str()` is its report."""

    @property
    def table(self) -> "Table": ...
    def to_json(self) -> dict[str, Any]: ...
    def write(self, report: Mapping[str, Any], folder: Path) -> list[Path]: ...


class OpenEvaluation(Protocol):
    """A model, and the data that it is evaluated on."""

    @property
    def data(self) -> str: ...  # its name
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def examples(self) -> int: ...  # for the progress
    @property
    def files(self) -> Sequence[str]: ...  # that the result writes to a folder
    def run(self, progress: Callable[[int], object] = ...) -> ModelScores: ...


@dataclass(frozen=True, kw_only=True)
class Messages:
    """What a command of any kind is told while it works, and where it reads from."""

    on_result: Callable[[object], object]
    on_note: Callable[[str], object]
    on_error: Callable[[DataError], object]  # of an input that is skipped
    progress: Callable[..., AbstractContextManager[Callable[[int], object]]]  # (total, title)
    stdin: BinaryIO | None = None


def find_kind(name: str, where: str = "a model") -> Kind:
    """The kind of this name, which the config.json of `where` states."""
    if name not in KINDS:
        raise CheckpointError(
            f"{where} is of the kind {name[:40]!r}, which this vitrail does not know; expected one of "
            f"{', '.join(KINDS)}"
        )
    try:
        return import_module(KINDS[name]).KIND
    except ModuleNotFoundError as error:
        raise ConfigError(f"{where} is of the kind {name!r}, which needs {error.name}; install this package") from None


def check_kind(name: str, expected: str, where: str) -> None:
    """Refuse a model of another kind, and say what to use it with."""
    if name != expected:
        raise wrong_kind_error(where, find_kind(name, where), find_kind(expected).does)


def wrong_kind_error(where: str, kind: Kind, expected: str) -> ConfigError:
    return ConfigError(f"{where} {kind.does}; expected a model that {expected}: use {kind.use}")


def call_command(kind: Kind, command: str, model: str, options: Mapping[str, Any]) -> Any:
    """What a command does with a model of this kind; an error if the kind, or an option that is given, does not fit."""
    if command not in kind.commands:
        fitting = next(each for each in map(find_kind, KINDS) if command in each.commands)
        raise wrong_kind_error(model, kind, fitting.does)
    module, _, name = kind.commands[command].partition(":")
    function = getattr(import_module(module), name)  # a test imports all of them
    return function(model=model, **check_options(function, options, model, kind))


def check_options(function: Callable[..., Any], given: Mapping[str, Any], where: str, kind: Kind) -> dict[str, Any]:
    """The options that are given, all that are not None; an error for one that the function does not take."""
    known, found = signature(function).parameters, {name: value for name, value in given.items() if value is not None}
    for name in found:
        if name not in known:
            raise ConfigError(f"`{name}` is not for this model, since {where} {kind.does}; remove it", (name,))
    return found
