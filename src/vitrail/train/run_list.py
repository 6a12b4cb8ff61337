"""List run folders with model, data, progress and results, even if a run was killed or is damaged."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.checkpoint.run_files import CHECKPOINTS_FOLDER, LOG_FILE, PLAN_FILE, is_run_finished, try_read_plan
from vitrail.errors import DataError, describe_error
from vitrail.locks import LOCK_FILE_NAME
from vitrail.text import TableCells, format_duration, make_printable
from vitrail.train.log import LogRecord, ParsedLog

COLUMNS = ("run", "model", "data", "recipe", "steps", "best", "last", "loss", "time", "state")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Summary of a run; unknown values are empty or None."""

    name: str
    folder: Path
    state: str  # "finished", "stopped at step k" or "damaged: reason"
    model: str = ""
    data: str = ""
    recipe: str = ""
    step: int = 0  # last logged step
    steps: int | None = None  # planned
    records: tuple[LogRecord, ...] = ()

    def last_value(self, name: str) -> float | None:
        values = self.list_values(name)
        return values[-1] if values else None

    def best_value(self, name: str) -> float | None:
        return max(self.list_values(name), default=None)

    def list_values(self, name: str) -> list[float]:
        return [row[name] for row in self.records if name in row]

    def to_json(self) -> dict[str, Any]:
        told = ("name", "state", "model", "data", "recipe", "step", "steps")
        return {
            "folder": str(self.folder),
            **{name: getattr(self, name) for name in told},
            "best_val_top1": self.best_value("val_top1"),
            **{
                name: self.last_value(name)
                for name in ("val_top1", "val_top5", "val_loss", "loss", "accuracy", "seconds")
            },
        }


def list_run_cells(runs: Sequence[RunSummary]) -> TableCells:
    """The cells of a table with one row per run."""
    rows = [
        (
            *(make_printable(text, 40) for text in (run.name, run.model, run.data, run.recipe)),
            f"{run.step}/{'?' if run.steps is None else run.steps}",
            format_percent(run.best_value("val_top1")),
            format_percent(run.last_value("val_top1")),
            "" if (loss := run.last_value("loss")) is None else f"{loss:.4f}",
            format_duration(run.last_value("seconds")),
            make_printable(run.state, 100),
        )
        for run in runs
    ]
    return COLUMNS, rows, "llllrrrrrl"


def format_percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


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
    """Summarise a run. Never fails: problems are reported in `state`."""
    log, damage = try_read_log(folder)
    plan, fault = try_read_plan(folder)
    rows = log.records
    step = int(rows[-1]["step"]) if rows else 0
    state = "finished" if is_run_finished(folder) else f"stopped at step {step}"
    steps = plan.get("steps")
    return RunSummary(
        name=folder.resolve().name,
        folder=folder,
        state=f"damaged: {fault or damage}" if fault or damage else state,
        model=extract_name_or_empty(plan.get("model")),
        data=extract_name_or_empty(plan.get("data")),
        recipe=extract_name_or_empty(plan.get("recipe")),
        step=step,
        steps=steps if type(steps) is int else None,
        records=tuple(rows),
    )


def try_read_log(folder: Path) -> tuple[ParsedLog, str]:
    """The log of a run, and a problem with it or ""."""
    try:
        log = ParsedLog.read(folder / LOG_FILE)
    except (OSError, ValueError) as error:
        return ParsedLog(), f"{LOG_FILE}: {describe_error(error)}"
    return log, f"{log.damaged_lines} damaged lines in {LOG_FILE}" if log.damaged_lines else ""


def extract_name_or_empty(part: object) -> str:
    """The name of the model, data or recipe in a plan; empty if missing."""
    name = part.get("name") if isinstance(part, dict) else part
    return name if isinstance(name, str) else ""
