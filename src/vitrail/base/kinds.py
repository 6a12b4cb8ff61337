"""The kinds of models, found by name. What differs between them is one file each in `vitrail.kinds`.

What lies below the kinds knows only their names: a model is opened, evaluated or explained by its kind.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from shlex import quote
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
    `vitrail.predict.job`, `evaluate` an OpenEvaluation, `serve` a ServedModel and `explore` an Explorer.
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
class ServedTensor:
    """An input or output of a served model, in the terms of the Open Inference Protocol."""

    name: str
    datatype: str  # UINT8, FP32, BYTES
    shape: tuple[int, ...] = ()  # of one item, without the batch
    labels: Sequence[str] | None = None  # of the values of an output
    text: bool = False  # BYTES that are a text in UTF-8, not a file: JSON has it as it is, not in base64


class ServedModel(Protocol):
    """A model that `vitrail serve` runs: an item is one photo or one text.

    Built once as `Class(model=name, …)` by the command serve of its kind. Worker threads call `prepare` and `run`,
    several at once; the event loop calls the others, which are quick.
    """

    @property
    def opened(self) -> Any: ...  # an Opened
    @property
    def facts(self) -> Mapping[str, Any]: ...  # for people, as JSON: kind, classes, labels, precision, engine, digest
    @property
    def inputs(self) -> Sequence[ServedTensor]: ...  # a request has one of them; the first takes bytes as they came
    @property
    def outputs(self) -> Sequence[ServedTensor]: ...  # the first is the prediction
    @property
    def features(self) -> str | None: ...  # the output that is an embedding, None if there is none
    @property
    def example(self) -> bytes: ...  # for the first input: a photo or a text of the package, run once at the start
    @property
    def streams(self) -> int: ...  # calls of `run` at the same time
    @property
    def item_bytes(self) -> int: ...  # memory that preparing and running one item takes at most

    def parse_settings(self, given: Mapping[str, Any]) -> Any:
        """The parameters of a request, such as top_k, checked; a VitrailError says what was expected."""
        ...

    def prepare(self, name: str, value: Any, settings: Any) -> Any:
        """An item for `run`, from the bytes or the array of an input; a DataError if it cannot be read."""
        ...

    def run(self, item: Any, outputs: Sequence[str]) -> Mapping[str, Any]:
        """The outputs of these names: an array for each, or a list of bytes for BYTES, of the shape of one item."""
        ...

    def to_json(self, found: Mapping[str, Any], settings: Any) -> Any:
        """A prediction as clients of Hugging Face expect it."""
        ...


class Explorer(Protocol):
    """What the page of `vitrail serve` asks a model for. Built once as `Class(model=name, opened=Opened)` by the
    command explore of its kind; one worker thread calls `explore`."""

    def describe(self) -> dict[str, Any]:
        """What the page has to know before the first photo, as JSON."""
        ...

    def explore(self, body: bytes, query: Mapping[str, str]) -> bytes:
        """The figures of a photo, or of a text in UTF-8, as one safetensors file; a VitrailError says what is wrong."""
        ...


@dataclass(frozen=True, kw_only=True)
class Messages:
    """What a command of any kind is told while it works, and where it reads from."""

    on_result: Callable[[object], object]
    on_note: Callable[[str], object]
    on_error: Callable[[DataError], object]  # of an input that is skipped
    progress: Callable[..., AbstractContextManager[Callable[[int], object]]]  # (total, title)
    stdin: BinaryIO | None = None


def parse_number(name: str, text: str) -> int:
    """A layer or head."""
    try:
        return int(text)
    except ValueError:
        expected = "a number from 0, or -1 for the last" + "; or mean" * (name == "head")
        raise ConfigError(f"`{name}` {text!r} for this model; expected {expected}") from None


def name_run_and_code(run: Path, code: str | None) -> tuple[str, str]:
    """A run as commands name it, and what Python adds: a family from outside the package is run only if it is named."""
    if code is None:
        return quote(str(run)), ""
    return f"{quote(str(run))} `trust_code` {quote(code)}", f", trust_code={code!r}"


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
            raise ConfigError(f"`{name}` does not apply, since {where} {kind.does}; remove it", (name,))
    return found
