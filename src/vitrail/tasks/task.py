"""The contract of a task: what is trained, how it is evaluated, and what is saved. Read classification.py next."""

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, get_type_hints, runtime_checkable

import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, describe_error, unknown_name_error
from vitrail.base.figures import CaptionedFigure
from vitrail.checkpoint.writing import write
from vitrail.data.batch import Batch
from vitrail.distributed import Ranks
from vitrail.evaluation.evaluate import temporary_eval_mode
from vitrail.models.base.checks import check_fields
from vitrail.recipes.recipe import DistillationSettings, Recipe
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import Clock, Schedule, parse_if_numeric_text, parse_schedule
from vitrail.tasks.metric import LOSS_METRIC, CollapseSign, Metric


@runtime_checkable
class EvaluationResult(Protocol):
    """The result of an evaluation, for the log."""

    @property
    def metrics(self) -> Mapping[str, float]: ...  # by the names that the task declares
    @property
    def skipped(self) -> tuple[str, ...]: ...  # why examples could not be read
    def format_headline(self) -> str: ...


class Source(Protocol):
    """Training and validation examples. A batch is a function of the seed and the step alone."""

    @property
    def name(self) -> str: ...
    @property
    def example_count(self) -> int: ...  # for training
    @property
    def validation_count(self) -> int: ...
    @property
    def steps_per_epoch(self) -> int: ...
    @property
    def in_memory(self) -> bool: ...  # then no workers are needed
    @property
    def notes(self) -> tuple[str, ...]: ...
    def load_batches(
        self, steps: range, *, accumulate: int, workers: int, ranks: Ranks, pin: bool
    ) -> Iterator[Batch]: ...
    def load_validation_batches(
        self, *, batch: int, workers: int, ranks: Ranks, limit: int | None
    ) -> Iterator[Batch]: ...
    def describe(self) -> str: ...  # one line
    def to_json(self) -> dict[str, Any]: ...  # for run.json
    def describe_model_input(
        self, model: Any
    ) -> dict[str, Any]: ...  # what is saved with a model: preprocessing, labels


def is_source(data: Any) -> bool:
    """Whether data are batches of examples already; the properties of a source may read files."""
    return hasattr(type(data), "load_validation_batches")  # data may be of any class


class CopyError(ConfigError):
    """A task that cannot be copied."""


class Task(nn.Module):
    """What is trained: a backbone and everything that is trained or averaged with it, and its loss.

    A subclass sets `backbone` and writes `forward`. Every parameter and buffer is saved in checkpoints and restored;
    a momentum teacher is a submodule without gradients that `after_step` updates. The trainer calls `forward` once per
    micro-batch. Random choices must be functions of `batch.keys`, so that processes and resumed runs agree.
    """

    unit: ClassVar[str] = "images"  # of the speed
    kind: ClassVar[str] = "image"  # of the model that it trains: a name in `vitrail.base.kinds`
    example: ClassVar[str] = "image"  # what a batch has several of, for messages
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS_METRIC,)  # of an evaluation; the first one selects the best model
    shares: ClassVar[tuple[str, ...]] = ("accuracy",)  # metrics of `forward` from 0 to 1, shown in per cent
    averages_itself: ClassVar[bool] = False  # has a moving average of its own: the recipe's `ema` is refused
    collapse_signs: ClassVar[tuple[CollapseSign, ...]] = ()  # reported by the loop, once
    no_accumulation_reason: str = ""  # why a batch cannot be split into micro-batches; empty if it can
    backbone: Any  # a module; layer decay, freezing and Muon apply to it
    ranks: Ranks = Ranks()  # set before training; for tasks that compare the examples of all processes
    not_copied: tuple[object, ...] = ()  # objects that `copy` shares with the original, such as a frozen teacher

    def __init_subclass__(cls) -> None:
        if "initialise" in vars(cls):  # the former name of the hook, in tasks outside the package
            warnings.warn(f"{cls.__name__}.initialise is now called initialize", DeprecationWarning, stacklevel=2)
            cls.initialize = vars(cls)["initialise"]

    @property
    def early_share(self) -> float:
        """Share of the steps, the first ones, that take less time than the others: progressive resizing."""
        return 0.0

    @property
    def result(self) -> nn.Module:
        """The model to save."""
        return self.backbone

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        """Raise an error if the backbone, the data or the recipe lack something that the task needs."""

    def initialize(self, source: Source, recipe: Recipe) -> None:
        """Set weights that depend on the data, before a run; called before `setup`."""

    def setup(self, source: Source, recipe: Recipe) -> None:
        """Take what the task needs from the data and the recipe; called once, before the first step."""

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss and the metrics of a micro-batch, which are averaged over micro-batches and processes."""
        raise NotImplementedError

    def before_step(self, clock: Clock) -> None:
        """Called between the backward pass and the update of the weights: change or remove gradients here."""

    def after_step(self, clock: Clock) -> None:
        """Called after each update of the weights: update a momentum teacher here."""

    def describe(self) -> str:
        """The size of the model, for the report of a run."""
        return f"{sum(weight.numel() for weight in self.backbone.parameters()) / 1e6:.2f} M parameters"

    def write_result(self, model: nn.Module, folder: Path, **options: Any) -> None:
        """Write the `result`, as a model folder; the options are those of `vitrail.save`."""
        write(model, folder, **options)

    def draw_figures(self, source: Source, device: torch.device) -> list[CaptionedFigure]:  # noqa: ARG002  # for subclasses
        """Figures of the trained task, which a run writes at its end: for example reconstructions."""
        return []

    def list_compiled_modules(self) -> list[nn.Module]:
        """The modules that `forward` calls and that take most of its time."""
        return [self.backbone]

    def compile_backbone(self) -> None:
        """Compile what `forward` calls; undone by `restore_eager`."""
        for module in self.list_compiled_modules():
            module.compile()

    def restore_eager(self) -> None:
        for module in self.list_compiled_modules():
            module._compiled_call_impl = None  # torch has no public way

    def count_units(self, batch: Batch) -> int:
        """Images or tokens in a batch, for the speed."""
        return batch.size

    @torch.no_grad()
    def evaluate(
        self,
        source: Source,
        clock: Clock,
        *,
        batch: int,
        workers: int = 0,
        device: torch.device,
        limit: int | None = None,
    ) -> EvaluationResult:
        """Evaluate on the validation examples, or the first `limit`: by default the mean of what `forward` returns."""
        sums, skipped = dict[str, Tensor](), list[str]()
        count = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        with temporary_eval_mode(self):
            for each in source.load_validation_batches(batch=batch, workers=workers, ranks=self.ranks, limit=limit):
                skipped += each.skipped
                if each.size:
                    loss, metrics = self(each.to(device), clock)
                    for name, value in {"loss": loss, **metrics}.items():
                        mean = torch.as_tensor(value, dtype=count.dtype, device=device).reshape(())
                        sums[name] = sums.get(name, torch.zeros_like(count)) + mean * each.size
                    count += each.size
        gathered = self.ranks.all_gather_objects(list(sums))
        names = list(dict.fromkeys(name for each in gathered for name in each))  # in the same order on all processes
        rows = torch.stack([count, *(sums.get(name, torch.zeros_like(count)) for name in names)])
        total, *values = self.ranks.all_reduce_sum(rows).tolist()
        metrics = {name: value / max(total, 1) for name, value in zip(names, values, strict=True)}
        return MeanMetrics(metrics=metrics, skipped=tuple(skipped), examples=int(total))

    def copy(self) -> Self:
        """A deep copy with its own weights; the objects in `not_copied` are shared."""
        try:
            return deepcopy(self, {id(each): each for each in self.not_copied})
        except (TypeError, RuntimeError) as error:  # an open file, a lock, a generator; a tensor with a history
            raise CopyError(
                f"{type(self).__name__} cannot be copied for `ema` or `minutes`: {describe_error(error)}; expected "
                "objects that can be copied, or the others in its not_copied"
            ) from None


@dataclass(frozen=True, kw_only=True)
class MeanMetrics:
    """Metrics averaged over the validation examples."""

    metrics: Mapping[str, float]
    skipped: tuple[str, ...] = ()
    examples: int = 0

    def format_headline(self) -> str:
        return ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())


def check_evaluation_result(task: str, found: object) -> None:
    """Raise an error if `evaluate` returned something else than metrics with their names."""
    if not isinstance(found, EvaluationResult):
        raise ConfigError(
            f"evaluate of {task} returned a {type(found).__name__}; expected an EvaluationResult, for example "
            "MeanMetrics(metrics={name: value}) of vitrail.tasks.task"
        )


@dataclass(frozen=True, kw_only=True)
class TaskSetup:
    """A task with its data, and where its model comes from."""

    task: Task
    source: Source
    model_name: str
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for run.json
    write_options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for writing the model
    started_from: str | None = None  # checkpoint of the initial weights


@contextmanager
def no_progress_bar(_total: int | None, _title: str) -> Generator[Callable[[int], object]]:
    yield lambda _count: None


def ignore_line(_line: str) -> None:
    """The default of `report`: nothing is printed."""


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """The process in which a task is built."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009  # immutable
    ranks: Ranks = Ranks()  # noqa: RUF009  # immutable
    report: Callable[[str], object] = ignore_line  # receives notes about the data and the teacher
    progress: Callable[[int | None, str], AbstractContextManager[Callable[[int], object]]] = no_progress_bar
    dry_run: bool = False  # nothing is written


@dataclass(frozen=True, kw_only=True)
class TaskKind:
    """The last line of every task file: its name in recipes, its settings, and how a request becomes a task."""

    name: str
    settings: type[Any] | None  # a dataclass; the keys of `task` in a recipe
    build: Callable[[Request, BuildContext], TaskSetup]
    needs_classes: bool = True  # False: the images need no classes, and the model has no head


def parse_task_settings(kind: TaskKind, recipe: Recipe) -> Any:
    """The settings of a task, from `task` in the recipe: an instance of `kind.settings`, None if it has none.

    A field of the type Schedule takes a number, or a mapping such as {start: 0.996, end: 1}.
    """
    ignored = () if kind.settings is DistillationSettings else recipe.distillation_names  # of recipes without `task`
    given = {name: value for name, value in recipe.task.items() if name != "name" and name not in ignored}
    known = {} if kind.settings is None else get_type_hints(kind.settings)
    for name, value in given.items():
        if not known:
            raise ConfigError(f"`task` sets {name}, but {kind.name} has no settings; remove it")
        if name not in known:
            raise unknown_name_error(f"setting of the task {kind.name}", name, known)
        given[name] = parse_schedule(value, name) if known[name] is Schedule else parse_if_numeric_text(value)
    if kind.settings is None:
        return None
    settings = kind.settings(**given)
    check_fields(settings)
    return settings


def check_declarations(task: Task) -> None:
    """Raise an error if a task lacks what every task has."""
    name = type(task).__name__
    try:
        backbone = task.backbone
    except AttributeError:
        raise ConfigError(f"{name} has no backbone; expected a module: set self.backbone in its constructor") from None
    if not isinstance(backbone, nn.Module):
        raise ConfigError(f"the backbone of {name} is a {type(backbone).__name__}; expected a module")
    metrics = task.metrics
    if not isinstance(metrics, tuple) or not metrics or not all(isinstance(each, Metric) for each in metrics):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"metrics of {name} is {metrics!r}; expected a tuple of at least one Metric")
    try:
        signature(task.forward).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"forward of {name} cannot be called: {error}; expected forward(self, batch, clock)"
        ) from None


def check_task(task: Task, source: Source, recipe: Recipe, ranks: Ranks) -> None:
    """Raise an error if the task cannot be trained on this data by this recipe."""
    check_declarations(task)
    task.check(source, recipe, ranks)
    name = type(task).__name__
    batch, parts = recipe.loop.batch, ranks.world_size * recipe.loop.accumulate
    if batch > source.example_count:
        raise ConfigError(
            f"`batch` {batch} is more than the {source.example_count} training {task.example}s; "
            f"use {source.example_count} or less"
        )
    if batch % parts:
        raise ConfigError(
            f"`batch` {batch} over {ranks.world_size} processes of {recipe.loop.accumulate} micro-batches; "
            f"expected equal parts: a multiple of {parts}"
        )
    if task.no_accumulation_reason and recipe.loop.accumulate > 1:
        raise ConfigError(
            f"`accumulate` is {recipe.loop.accumulate}; expected 1 for {name}, since {task.no_accumulation_reason}"
        )
    if task.averages_itself and recipe.loop.ema:
        raise ConfigError(f"`ema` is {recipe.loop.ema}; expected 0, since {name} has a moving average of its own")
