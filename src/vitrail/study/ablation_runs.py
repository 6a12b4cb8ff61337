"""The runs of an ablation or a study of positions: their state on disk, and training the unfinished ones."""

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, Literal, Protocol

import torch

from vitrail.base.errors import CheckpointError, ConfigError, VitrailError
from vitrail.base.table import Table
from vitrail.checkpoint.run_files import PLAN_FILE, is_run_finished
from vitrail.distributed import join_process_group
from vitrail.recipes.request import Request
from vitrail.tasks.teacher import Teacher
from vitrail.train.loop import StoppedError
from vitrail.train.plan import Runtime
from vitrail.train.resume import resume_run
from vitrail.train.run import start_run
from vitrail.train.run_folder import RUNS_FOLDER, RunFolder
from vitrail.train.trainer import DivergedError


@dataclass(frozen=True, kw_only=True)
class AblationVariant:
    """A row of the table: training runs that differ in the seed alone."""

    name: str
    request: Request  # with the first seed
    # differences by name: the value of the full row and its own
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    unchanged_text: str = "the full recipe"  # description without differences

    def request_for_seed(self, seed: int) -> Request:
        return replace(self.request, recipe=self.request.recipe.with_settings({"seed": seed}))

    @property
    def description(self) -> str:
        changed = [
            f"{name} {format_value(before)} → {format_value(now)}" for name, (before, now) in self.changes.items()
        ]
        return ", ".join(changed) or self.unchanged_text


def format_value(value: object) -> str:
    if isinstance(value, bool | None):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def json_round_trip(value: Any) -> Any:
    """The value as read back from a JSON file."""
    return json.loads(json.dumps(value))


class OtherSettingsError(ConfigError):
    """The folder of a run holds one that was trained with other settings."""


@dataclass(frozen=True, kw_only=True)
class AblationRun:
    row: AblationVariant
    seed: int
    folder: Path
    request: Request
    state: Literal["new", "stopped", "finished"]


def find_study_folder(
    name: str, rows: Sequence[AblationVariant], seeds: Sequence[int], teacher: Teacher | None = None
) -> Path:
    """The first of runs/NAME, runs/NAME-2, … without runs of other settings, so that the same command resumes."""
    folders = (RUNS_FOLDER / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(folder for folder in folders if not has_other_settings(folder, rows, seeds, teacher))


def has_other_settings(
    folder: Path, rows: Sequence[AblationVariant], seeds: Sequence[int], teacher: Teacher | None
) -> bool:
    try:
        list_ablation_runs(rows, seeds, folder, teacher)
    except OtherSettingsError:
        return True
    return False


def list_ablation_runs(
    rows: Sequence[AblationVariant], seeds: Sequence[int], folder: Path, teacher: Teacher | None = None
) -> list[AblationRun]:
    """All training runs, row by row, with their state on disk."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected a folder for the runs")
    if (folder / PLAN_FILE).exists():
        raise CheckpointError(f"{folder} is a run itself; expected a folder for several runs")
    runs = list[AblationRun]()
    for row in rows:
        for seed in seeds:
            place, request = folder / f"{row.name}-{seed}", row.request_for_seed(seed)
            state = find_run_state(place, request)
            if state != "new" and request.teacher is not None and teacher is not None:
                check_run_teacher_unchanged(place, teacher)
            runs.append(AblationRun(row=row, seed=seed, folder=place, request=request, state=state))
    return runs


def find_run_state(folder: Path, request: Request) -> Literal["new", "stopped", "finished"]:
    """State of a run's folder; an error if it has trained with other settings."""
    if not (folder / PLAN_FILE).exists():
        RunFolder.check_folder_is_free(folder)
        return "new"
    run = RunFolder(folder)
    before = Request.from_json(run.load_plan().get("request"), str(folder))
    difference = describe_difference(before, request)
    if difference and not (run.list_checkpoints() or run.read_records() or is_run_finished(folder)):
        return "new"
    if difference:
        raise OtherSettingsError(
            f"{folder} was trained with other settings: {difference}; use the same, or another `out`"
        )
    return "finished" if is_run_finished(folder) else "stopped"


def check_run_teacher_unchanged(folder: Path, teacher: Teacher) -> None:
    """Check that all rows have the same teacher, also if its file has changed since."""
    before: Any = RunFolder(folder).load_plan().get("teacher")
    if isinstance(before, dict) and before.get("fingerprint") != teacher.fingerprint():
        raise OtherSettingsError(f"{folder} was trained with another teacher; restore it, or use another `out`")


def describe_difference(before: Request, now: Request) -> str:
    """The first difference between two requests; empty if there is none."""
    old, new = flatten_request(before), flatten_request(now)
    for name in dict.fromkeys((*new, *old)):
        if old.get(name) != new.get(name):
            return f"{name} {format_value(old.get(name))}, now {format_value(new.get(name))}"
    return ""


def flatten_request(request: Request) -> dict[str, Any]:
    flat = json_round_trip(request.to_json())
    recipe = flat.pop("recipe")
    preprocessing = {f"preprocessing {name}": value for name, value in recipe.pop("preprocessing").items()}
    fields = recipe.pop("fields")
    for size in [name for name in ("image_size", "patch_size") if isinstance(fields.get(name), int)]:
        fields[size] = 2 * [fields[size]]  # as from the command line
    return {**flat, **fields, **preprocessing, **recipe}


class StudyResults(Protocol):
    """The results of a study: a table, everything behind it as JSON, and both with a figure in a folder."""

    @property
    def table(self) -> Table: ...

    def to_json(self) -> dict[str, Any]: ...

    def write(self, folder: Path) -> list[Path]: ...


@dataclass(frozen=True)
class FinishedStudy:
    """The results of a study, the files that they were written to, and the runs that diverged."""

    results: StudyResults
    written: list[Path]
    failed: Mapping[str, DivergedError]
    runs: int

    def raise_if_failed(self) -> None:
        for name, error in self.failed.items():
            message = f"{len(self.failed)} of {self.runs} runs failed: {name}: {error}"
            raise VitrailError(message, fields=error.fields)


class StudyStoppedError(VitrailError):
    """A run was stopped; the same command resumes the study."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(f"{message}; run the same command again to resume")
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class TrainingStudy:
    """Rows that are trained with each seed and compared in a table."""

    title: str
    rows: Sequence[AblationVariant]
    runs: Sequence[AblationRun]
    folder: Path
    read_results: Callable[
        [Sequence[AblationRun], Mapping[str, str]], StudyResults
    ]  # from the runs and why some failed

    def describe(self) -> list[str]:
        states, width = [run.state for run in self.runs], max(len(row.name) for row in self.rows)
        known = [("finished", "finished"), ("stopped", "to resume")]
        some = ", ".join(f"{count} {words}" for state, words in known if (count := states.count(state)))
        counts = f"{len(self.runs)} runs" + (f" ({some})" if some else "")
        rows = [f"  {row.name.ljust(width)}  {row.description}" for row in self.rows]
        return [f"{self.title}: {counts} in {self.folder}", *rows]

    def run(self, runtime: Runtime, *, dry_run: bool = False) -> FinishedStudy | None:
        """Train what is left to train and write the table; None in every process but the first.

        A dry run only reports the rows.
        """
        with join_process_group() as ranks:
            runtime = runtime.for_rank(ranks)
            if runtime.threads == "auto" and ranks.world_size == 1:  # the same for all runs, whatever else is running
                runtime = replace(runtime, threads=torch.get_num_threads())
            runtime.report_lines(*self.describe())
            failed = {} if dry_run else self.train(runtime)
        if not ranks.is_first:
            return None
        runs = () if dry_run else self.runs
        results = self.read_results(runs, {name: str(error) for name, error in failed.items()})
        return FinishedStudy(results, [] if dry_run else results.write(self.folder), failed, len(self.runs))

    def train(self, runtime: Runtime) -> dict[str, DivergedError]:
        """Finish every run; return those that diverged, since they are results as well."""
        failed = dict[str, DivergedError]()
        for number, run in enumerate(self.runs, 1):
            if run.state == "finished":
                continue
            name = run.folder.name
            runtime.report(f"\n── {number}/{len(self.runs)} {name}: {run.row.description}")
            try:
                if run.state == "stopped":
                    resume_run(run.folder, runtime, run.request.trusted_code)
                else:
                    start_run(run.request, run.folder, runtime, start=monotonic())
            except StoppedError as error:
                raise StudyStoppedError(f"{name} {error.reason}", error.exit_code) from None
            except KeyboardInterrupt:
                raise StudyStoppedError(f"{name} stopped by SIGINT", 128 + signal.SIGINT) from None
            except DivergedError as error:
                failed[name] = error
                runtime.report(f"failed {error}")
        return failed
