"""Run folders as trainings left them, also where one was killed or damaged: what each says of itself."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.checkpoint.contents import CONFIG
from vitrail.errors import ConfigError, DataError, one_line
from vitrail.locks import LOCK
from vitrail.train import run as runs
from vitrail.train.run import LOG, MODEL, PLAN, STATES, Record, count_damaged


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run at a glance; what its folder does not say is empty or None."""

    name: str
    folder: Path
    state: str  # finished, stopped at step k, or damaged: why
    model: str = ""
    data: str = ""
    recipe: str = ""
    step: int = 0  # the last one that was logged
    steps: int | None = None  # planned
    rows: tuple[Record, ...] = ()

    def last(self, name: str) -> float | None:
        values = self.all_of(name)
        return values[-1] if values else None

    def best(self, name: str) -> float | None:
        return max(self.all_of(name), default=None)

    def all_of(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]

    def to_json(self) -> dict[str, Any]:
        told = ("name", "state", "model", "data", "recipe", "step", "steps")
        return {
            "folder": str(self.folder),
            **{name: getattr(self, name) for name in told},
            "best_val_top1": self.best("val_top1"),
            **{name: self.last(name) for name in ("val_top1", "val_top5", "val_loss", "loss", "accuracy", "seconds")},
        }


def read_runs(folder: Path) -> tuple[RunSummary, ...]:
    """The runs in a folder, by name, or the one that it is itself."""
    try:
        places = [folder] if (folder / PLAN).exists() else sorted(each for each in folder.iterdir() if is_run(each))
    except OSError as error:
        hint = "expected a folder of runs, as vitrail train makes"
        raise DataError(f"{folder} cannot be read: {one_line(error)}; {hint}") from None
    if not places:
        raise DataError(f"{folder} holds no runs; expected folders with a {PLAN}, as vitrail train makes")
    return tuple(map(read_run, places))


def is_run(folder: Path) -> bool:
    """Holds something of a run, or nothing at all: one that was killed as it began."""
    try:
        names = {each.name for each in folder.iterdir()}
    except OSError:  # a file, or not ours to read
        return False
    return names <= {LOCK} or not names.isdisjoint((PLAN, LOG, STATES))


def read_run(folder: Path) -> RunSummary:
    """Never fails: what is wrong stands in `state`."""
    rows, damage = read_log(folder / LOG)
    plan, fault = read_plan(folder / PLAN)
    step = int(rows[-1]["step"]) if rows else 0
    state = "finished" if is_finished(folder) else f"stopped at step {step}"
    steps = plan.get("steps")
    return RunSummary(
        name=folder.resolve().name,
        folder=folder,
        state=f"damaged: {fault or damage}" if fault or damage else state,
        model=name_of(plan.get("model")),
        data=name_of(plan.get("data")),
        recipe=name_of(plan.get("recipe")),
        step=step,
        steps=steps if type(steps) is int else None,
        rows=rows,
    )


def read_plan(path: Path) -> tuple[dict[str, Any], str]:
    """What the run was told, and what is damaged."""
    try:
        plan = runs.read_plan(path)
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path.name}: {one_line(error)}"
    return (plan, "") if plan else ({}, f"{path.name}: it is not a run's plan")


def read_log(path: Path) -> tuple[tuple[Record, ...], str]:
    """The finite numbers of each line, and what is damaged; a last line that was cut off is no damage, but a kill."""
    try:
        lines = list(runs.read_log(path))
    except FileNotFoundError:
        return (), ""
    except (OSError, ValueError) as error:
        return (), f"{path.name}: {one_line(error)}"
    broken = count_damaged(lines)
    rows = tuple(record for _, record in lines if record is not None)
    return rows, f"{broken} broken lines in {path.name}" if broken else ""


def name_of(part: object) -> str:
    """Of the model, the data or the recipe in a plan."""
    name = part.get("name") if isinstance(part, dict) else part
    return name if isinstance(name, str) else ""


def is_finished(folder: Path) -> bool:
    return (folder / MODEL / CONFIG).is_file()  # which `save` writes last


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The model of a finished run, and which pictures it was not trained on."""

    model: Path
    data: str | None = None
    seed: int = 0
    val_share: float = 0.2


def finished_run(folder: Path) -> Finished | None:
    """None where it is no run's folder; a run that has no model yet is refused."""
    if not (folder / PLAN).is_file():
        return None
    if not is_finished(folder):
        hint = f"go on with it: vitrail train --resume {folder}"
        raise ConfigError(f"{folder} is a run that has not finished; expected one with its {MODEL}/ inside: {hint}")
    plan, fault = read_plan(folder / PLAN)
    if fault:
        warnings.warn(f"{folder}: {fault}; its validation images are unknown", stacklevel=2)
    asked, recipe = (part if isinstance(part, dict) else {} for part in (plan.get("request"), plan.get("recipe")))
    data, seed, share = asked.get("data"), recipe.get("seed"), asked.get("val_share")
    return Finished(
        model=folder / MODEL,
        data=data if isinstance(data, str) else None,
        seed=seed if isinstance(seed, int) else 0,
        val_share=share if isinstance(share, float) else 0.2,
    )
