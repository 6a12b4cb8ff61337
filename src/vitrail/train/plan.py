"""A resolved training run: the task, data, recipe and device of a request. Its JSON is run.json.

What belongs to the process, and may differ when the run is resumed, is its `Runtime`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from math import floor
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from vitrail import __version__
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint.writing import find_model_family
from vitrail.data.batch import Batch
from vitrail.distributed import Ranks
from vitrail.models.catalog.external_families import trust
from vitrail.recipes.recipe import Precision, Recipe
from vitrail.recipes.request import Request
from vitrail.tasks import find_task
from vitrail.tasks.task import (
    BuildContext,
    EvaluationResult,
    Source,
    Task,
    TaskSetup,
    check_task,
    ignore_line,
    no_progress_bar,
    parse_task_settings,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a training run needs; checked on creation."""

    task: Task  # with its initial weights
    source: Source
    recipe: Recipe
    fixed_steps: int | None = None  # None: computed from the recipe's epochs
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # immutable
    ranks: Ranks = Ranks()  # noqa: RUF009  # immutable
    workers: int = 0
    threads: int | None = None  # None: torch's default
    precision: Precision | None = None  # None: the recipe's, float32 if that is `auto`
    strict: bool = False  # an unreadable example is an error
    request: Request | None = None  # None if `fit` received a model
    model_name: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of model and teacher, for run.json
    write_options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for writing the model
    started_from: str | None = None  # checkpoint of the initial weights

    def __post_init__(self) -> None:
        check_task(self.task, self.source, self.recipe, self.ranks)

    @property
    def chosen_precision(self) -> Precision:
        asked = self.recipe.loop.precision
        return self.precision or ("float32" if asked == "auto" else asked)

    @property
    def model(self) -> Any:
        return self.task.backbone

    @property
    def steps_per_epoch(self) -> int:
        return self.source.steps_per_epoch

    @property
    def steps(self) -> int:
        return self.fixed_steps or max(floor(self.recipe.loop.epochs * self.steps_per_epoch), 1)

    @property
    def epochs(self) -> float:
        return self.steps / self.steps_per_epoch

    def with_steps(self, steps: int | None) -> "Plan":
        return replace(self, fixed_steps=steps)

    def load_batches(self, steps: range) -> Iterator[Batch]:
        return self.source.load_batches(
            steps,
            accumulate=self.recipe.loop.accumulate,
            workers=self.workers,
            ranks=self.ranks,
            pin=self.device.type == "cuda",
        )

    def check_model_can_be_written(self) -> None:
        """Raise an error if the result of the task does not belong to a family."""
        try:
            _ = self.write_options.get("family") or find_model_family(self.task.result)
        except CheckpointError as error:
            raise ConfigError(f"`keep_best` is true, but the model cannot be saved: {error}") from None

    def write_model(self, model: nn.Module, folder: Path, evaluation: EvaluationResult | None) -> None:
        """Write the result of the task as a model folder."""
        metrics = evaluation and {name: value for name, value in evaluation.metrics.items() if name != "loss"}
        self.task.write_result(
            model,
            folder,
            **self.source.describe_model_input(model),
            provenance={
                **({"started from": self.started_from} if self.started_from else {}),
                "data": self.source.name,
                "recipe": self.recipe.name,
                "validation": metrics,
            },
            **self.write_options,
        )

    def describe_task(self) -> dict[str, Any]:
        """The unit of speed and the metrics, so that the log of a run can be shown."""
        return {"unit": self.task.unit, "metrics": [asdict(metric) for metric in self.task.metrics]}

    def to_json(self) -> dict[str, Any]:
        """The contents of run.json: the request and the resolved settings."""
        if self.request is None:
            raise ValueError("a plan without a request cannot be resumed from run.json")
        request = self.request.to_json()
        return {
            "vitrail": __version__,
            "torch": torch.__version__,
            "simplejpeg": find_spec("simplejpeg") is not None,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv[1:],
            "request": request,
            "task": {"name": self.request.task_name, **self.describe_task()},
            "data": self.source.to_json(),
            "model": self.facts["model"],
            "init": self.request.init,
            "teacher": self.facts.get("teacher"),
            "recipe": request["recipe"],
            "epochs": self.epochs,
            "steps": self.steps,
            "steps_per_epoch": self.steps_per_epoch,
            "world": self.ranks.world_size,
            "threads": self.threads or torch.get_num_threads(),
            "precision": self.chosen_precision,
        }


def plan_request(request: Request, context: BuildContext | None = None) -> Plan:
    """Open the data and build the task of a request, from its seed or a checkpoint; by default on the CPU."""
    context = context or BuildContext()
    kind = find_task(request.task_name)
    parse_task_settings(kind, request.recipe)  # an unknown setting is an error, also of tasks that have none
    torch.manual_seed(request.recipe.loop.seed)
    with trust(request.trusted_code):  # also for `init`
        return plan_from_setup(request, kind.build(request, context), context)


def plan_from_setup(request: Request, setup: TaskSetup, context: BuildContext) -> Plan:
    return Plan(
        task=setup.task,
        source=setup.source,
        recipe=request.recipe,
        device=context.device,
        ranks=context.ranks,
        request=request,
        model_name=setup.model_name,
        facts=setup.facts,
        write_options=setup.write_options,
        started_from=setup.started_from,
    )


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What belongs to this process and not to the run, so that it may differ when the run is resumed."""

    device: str = "auto"
    workers: int | None = None  # None: as many as help
    threads: int | Literal["auto"] = "auto"  # auto: measured at the start; a resumed run keeps its number
    strict: bool = False  # an unreadable example is an error
    report: Callable[[str], object] = ignore_line  # receives the lines that describe the run
    progress: Callable[[int | None, str], AbstractContextManager[Callable[[int], object]]] = no_progress_bar

    def for_rank(self, ranks: Ranks) -> "Runtime":
        """Only the first of several processes reports."""
        return self if ranks.is_first else replace(self, report=ignore_line, progress=no_progress_bar)

    def report_lines(self, *lines: str) -> None:
        for line in lines:
            self.report(line)
