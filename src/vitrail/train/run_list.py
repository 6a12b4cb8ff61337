"""List run folders with model, data, progress and results, even if a run was killed or is damaged."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from vitrail.base.errors import DataError, describe_error
from vitrail.base.locks import LOCK_FILE_NAME
from vitrail.base.table import Column, Shown, Table
from vitrail.base.text import format_duration
from vitrail.checkpoint.run_files import (
    CHECKPOINTS_FOLDER,
    LOG_FILE,
    MODEL_FOLDER,
    PLAN_FILE,
    is_run_finished,
    try_read_plan,
)
from vitrail.models import FAMILIES
from vitrail.models.catalog.families import load_family
from vitrail.tasks.metric import CLASSIFICATION_METRICS, COLLAPSED, LOSS_METRIC, Metric
from vitrail.train.run_folder import LogRecord, ParsedLog, is_step

MAX_CELL_LENGTH = 40  # characters
MAIN_FIELDS = ("width", "depth", "heads", "patch_size", "image_size")  # of a config, named first
DATA_FIELDS = ("classes", "channels")  # of a config, that follow from the data
METRIC_FIELD_TYPES = {each.name: type(each.default) for each in fields(Metric) if each.default is not MISSING}


@dataclass(frozen=True, kw_only=True)
class RecordedTask:
    """The task of a run as recorded in run.json. Old runs do not record it: their task is classification."""

    name: str = "classification"
    unit: str = "images"  # of the speed
    metrics: tuple[Metric, ...] = CLASSIFICATION_METRICS  # the first one counts

    @property
    def metric(self) -> Metric:
        return self.metrics[0]

    @property
    def is_classification(self) -> bool:
        """Whether its metrics are those of classification; distillation has the same."""
        return self.metric.name == CLASSIFICATION_METRICS[0].name


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Summary of a run; unknown values are empty or None."""

    name: str
    folder: Path
    state: str  # "finished" or "stopped at step k", and "collapsed at step k"; or "damaged: reason"
    model: str = ""  # a preset and the fields that differ from it
    data: str = ""
    recipe: str = ""
    init: str = ""  # the checkpoint of the initial weights
    teacher: str = ""  # of a distilled model
    task: RecordedTask = field(default_factory=RecordedTask)
    created: str = ""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the model
    step: int = 0  # last logged step
    steps: int | None = None  # planned
    records: tuple[LogRecord, ...] = ()

    def last_value(self, name: str) -> float | None:
        values = self.list_values(name)
        return values[-1] if values else None

    def best_value(self, name: str) -> float | None:
        """The best value of a metric, by its direction; `name` as in the log."""
        metric = next((each for each in self.task.metrics if f"val_{each.name}" == name), None)
        return (metric or self.task.metric).choose_best(self.list_values(name))

    @property
    def last_metric(self) -> float | None:
        """The metric that counts, in the last evaluation."""
        return self.last_value(f"val_{self.task.metric.name}")

    @property
    def best_metric(self) -> float | None:
        return self.best_value(f"val_{self.task.metric.name}")

    def list_values(self, name: str) -> list[float]:
        return [row[name] for row in self.records if name in row]

    def to_json(self) -> dict[str, Any]:
        """Runs of tasks other than classification also have `task`, `metric` and `unit`."""
        plain = ("name", "state", "model", "data", "recipe", "init", "teacher", "created", "config", "step", "steps")
        task, other = self.task, not self.task.is_classification
        metrics = [each.name for each in task.metrics if each.name != "loss"]
        return {
            "folder": str(self.folder),
            **{name: vars(self)[name] for name in plain},
            **({"task": task.name, "metric": asdict(task.metric), "unit": task.unit} if other else {}),
            "epoch": self.last_value("epoch"),
            f"best_val_{task.metric.name}": self.best_metric,
            **{f"val_{name}": self.last_value(f"val_{name}") for name in (*metrics, "loss")},
            "train_loss": self.last_value("loss"),
            **({} if other else {"train_accuracy": self.last_value("accuracy")}),
            "seconds": self.last_value("seconds"),
        }


def make_run_table(runs: Sequence[RunSummary]) -> Table:
    """One row per run; teachers have a column if there are any.

    With runs of other tasks than classification, each row names its metric.
    """
    names = ["run", "model", *["teacher"] * any(run.teacher for run in runs), "data", "recipe"]
    mixed = any(not run.task.is_classification for run in runs)
    label = CLASSIFICATION_METRICS[0].label
    results = ("last", "best") if mixed else (f"val {label}", f"best {label}")
    return Table(
        columns=(
            *(Column(name=name, max_length=MAX_CELL_LENGTH) for name in names),
            Column(name="steps", align="r"),
            *[Column(name="metric", max_length=MAX_CELL_LENGTH)] * mixed,
            *(Column(name=name, align="r") for name in (*results, "val loss", "train loss", "time")),
            Column(name="state", max_length=100),
        ),
        rows=[
            (
                *(run.name if name == "run" else vars(run)[name] for name in names),
                Shown(run.step, f"{run.step}/{'?' if run.steps is None else run.steps}"),
                *([run.task.metric.label] if mixed else []),
                *(Shown(value, run.task.metric.format_value(value)) for value in (run.last_metric, run.best_metric)),
                *(
                    Shown(value, LOSS_METRIC.format_value(value))
                    for value in (run.last_value("val_loss"), run.last_value("loss"))
                ),
                Shown(run.last_value("seconds"), format_duration(run.last_value("seconds"))),
                run.state,
            )
            for run in runs
        ],
    )


def read_run_summaries(folder: Path) -> tuple[RunSummary, ...]:
    """The runs in a folder, sorted by name; if the folder is a run itself, only that one."""
    try:
        places = (
            [folder]
            if (folder / PLAN_FILE).exists()
            else sorted(each for each in folder.iterdir() if may_be_run_folder(each))
        )
    except OSError as error:
        hint = "expected a folder of runs, as written by vitrail train"
        raise DataError(f"{folder} cannot be read: {describe_error(error)}; {hint}") from None
    if not places:
        raise DataError(f"{folder} has no runs; expected folders with a {PLAN_FILE}, as written by vitrail train")
    return tuple(map(read_run_summary, places))


def may_be_run_folder(folder: Path) -> bool:
    """Whether it has files of a run, or none at all: a run may be killed before it writes any."""
    try:
        names = {each.name for each in folder.iterdir()}
    except OSError:  # a file, or a folder without read permission
        return False
    return names <= {LOCK_FILE_NAME} or not names.isdisjoint((PLAN_FILE, LOG_FILE, CHECKPOINTS_FOLDER))


def read_run_summary(folder: Path) -> RunSummary:
    """Summarize a run. Never fails: problems are reported in `state`."""
    log, damage = try_read_log(folder)
    plan, fault = try_read_plan(folder)
    rows = log.records
    step = int(rows[-1]["step"]) if rows else 0
    steps = plan["steps"] if is_step(plan.get("steps")) else None
    extended = "lengths" in plan and steps is not None and step < steps  # its model/ is that of the shorter run
    state = "finished" if is_run_finished(folder) and not extended else f"stopped at step {step}"
    if collapsed := [row["step"] for row in rows if COLLAPSED in row]:
        state += f", collapsed at step {collapsed[0]:.0f}"
    return RunSummary(
        name=folder.resolve().name,
        folder=folder,
        state=f"damaged: {fault or damage}" if fault or damage else state,
        model=describe_model(plan),
        data=extract_name_or_empty(plan.get("data")),
        recipe=extract_name_or_empty(plan.get("recipe")),
        init=shorten_path(extract_name_or_empty(plan.get("init"))),
        teacher=shorten_path(extract_name_or_empty(plan.get("teacher"))),
        task=read_recorded_task(plan),
        created=extract_name_or_empty(plan.get("created")),
        config=get_mapping(get_mapping(plan, "model"), "config"),
        step=step,
        steps=steps,
        records=tuple(rows),
    )


def read_recorded_task(plan: Mapping[str, Any]) -> RecordedTask:
    """The task of a plan; metrics that are damaged are left out."""
    about = get_mapping(plan, "task")
    given = about.get("metrics")
    metrics = tuple(map(read_metric, filter(is_recorded_metric, given))) if isinstance(given, list) else ()
    if not metrics:
        return RecordedTask()
    unit = extract_name_or_empty(about.get("unit")) or RecordedTask.unit
    return RecordedTask(name=extract_name_or_empty(about), unit=unit, metrics=metrics)


def is_recorded_metric(part: object) -> bool:
    return isinstance(part, dict) and all(isinstance(part.get(name), str) for name in ("name", "label"))


def read_metric(part: Mapping[str, Any]) -> Metric:
    """A metric as recorded; fields that it lacks take their defaults."""
    known = {name: part[name] for name, kind in METRIC_FIELD_TYPES.items() if isinstance(part.get(name), kind)}
    return Metric(name=part["name"], label=part["label"], **known)


def try_read_log(folder: Path) -> tuple[ParsedLog, str]:
    """The log of a run, and a problem with it or ""."""
    try:
        log = ParsedLog.read(folder / LOG_FILE)
    except (OSError, ValueError) as error:
        return ParsedLog(), f"{LOG_FILE}: {describe_error(error)}"
    return log, f"{log.damaged_lines} damaged lines in {LOG_FILE}" if log.damaged_lines else ""


def describe_model(plan: Mapping[str, Any]) -> str:
    """The preset of a run's model and the fields that differ from it: vit_tiny_patch16_224, depth 6."""
    about, recipe = get_mapping(plan, "model"), get_mapping(plan, "recipe")
    name, family = extract_name_or_empty(plan.get("model")), about.get("family")
    changed: Mapping[str, Any] = get_mapping(recipe, "fields")
    if name == family and name in FAMILIES:  # started from a checkpoint, which has a config but no name
        name, changed = find_nearest_preset(name, get_mapping(about, "config"))
    names = [*filter(changed.__contains__, MAIN_FIELDS), *(key for key in changed if key not in MAIN_FIELDS)]
    fields = [f"{key} {changed[key]}" for key in names if key not in DATA_FIELDS]
    return ", ".join([shorten_path(name), *fields])


def find_nearest_preset(family: str, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The preset of this width and depth that differs in the fewest fields, and these; else the family and its size."""
    presets: Mapping[str, Any] = load_family(family).presets
    sizes = {key: config[key] for key in ("width", "depth", "stages") if key in config}
    found = list[tuple[str, Mapping[str, Any]]]()
    for name, preset in presets.items():
        fields = json.loads(json.dumps(asdict(preset)))
        changed = {
            key: value for key, value in config.items() if as_pair(value) != as_pair(fields.get(key)) and key in fields
        }
        if not changed.keys() & sizes:
            found.append((name, {key: value for key, value in changed.items() if key not in DATA_FIELDS}))
    return min(found, key=lambda each: len(each[1]), default=(family, sizes))


def as_pair(value: Any) -> Any:
    """A size as rows and columns, so that 224 equals [224, 224]."""
    return [value, value] if type(value) is int else value


def get_mapping(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of a plan; empty if it is missing or of another kind."""
    found = part.get(name)
    return found if isinstance(found, dict) else {}


def shorten_path(name: str) -> str:
    """The last part of a path; of the model in a run, the name of the run."""
    path = Path(name)
    return (
        path.parent.name
        if path.name == MODEL_FOLDER and path.parent.name
        else path.name
        if path.is_absolute()
        else name
    )


def extract_name_or_empty(part: object) -> str:
    """The name of the model, data or recipe in a plan; empty if missing."""
    name = part.get("name") if isinstance(part, dict) else part
    return name if isinstance(name, str) else ""
