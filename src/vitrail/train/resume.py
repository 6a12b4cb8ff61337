"""Resume a run: what must not have changed since it was stopped, and, if it is given, its new length.

A resumed run is bit-identical to one that was never stopped, on the same number of processes and the same libraries.
The schedules of an extended run are those of the longer run from the current step on, so the result is close to that of
a longer run from the start, but not bit-identical to it: the learning rate was annealed in between.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import floor
from pathlib import Path
from time import monotonic
from typing import Any

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.base.machine import restore_threads
from vitrail.base.text import AMERICAN_NAMES, format_count, format_duration
from vitrail.checkpoint.run_files import is_run_finished
from vitrail.distributed import join_process_group
from vitrail.recipes.request import Request
from vitrail.tasks import PRETRAINING_TASKS
from vitrail.tasks.teacher_cache import check_recorded_cache
from vitrail.train.plan import Plan, Runtime
from vitrail.train.restore import read_newest_checkpoint_and_damage
from vitrail.train.run import keep_freed_memory, prepare_plan, train_and_save
from vitrail.train.run_folder import RunFolder, step_from_file_name
from vitrail.train.run_list import extract_name_or_empty
from vitrail.train.speed_choice import (
    choose_asked_or_recorded_threads,
    choose_recorded_precision,
    describe_slow_resume,
    use_threads,
)
from vitrail.train.throughput import measure_throughput

UNCHANGED_PARTS = ("model", "data", "teacher")  # of run.json
BIT_IDENTITY_PARTS = ("torch", "simplejpeg", "world", "threads", "precision")
NEW_PARTS = {"threads": "", "precision": ", since this CPU has no instructions for it"}  # old runs do not record them


def resume_run(
    folder: Path,
    runtime: Runtime | None = None,
    code: Sequence[str] = (),
    *,
    epochs: float | None = None,
    minutes: float | None = None,
) -> bool:
    """Resume a run from its newest checkpoint, or from its beginning if there is none yet.

    `code` is the code named by the user: an external model in run.json is imported only if it is listed there.
    `epochs` or `minutes`, both in all, are a new length: a finished run is extended. Returns whether it was trained.
    """
    start, runtime = monotonic(), runtime or Runtime()
    keep_freed_memory()
    run, longer = RunFolder(folder), epochs is not None or minutes is not None
    with join_process_group() as ranks, restore_threads():
        runtime = runtime.for_rank(ranks)
        if not longer and is_training_complete(run):
            verb = "probe" if extract_name_or_empty(run.load_plan().get("task")) in PRETRAINING_TASKS else "eval"
            runtime.report_lines(
                f"run    {folder} is finished; evaluate it with: vitrail {verb} {folder}",
                f"       train it longer with: vitrail train `resume` {folder} `epochs` N",
            )
            return False
        with run.hold_lock() if ranks.is_first else nullcontext():
            recorded = run.load_plan()
            request = Request.from_json(recorded.get("request"), str(folder)).with_trusted_code(code, str(folder))
            check_recorded_cache(request.teacher_cache, folder)
            steps = recorded.get("steps")
            if type(steps) is not int or steps < 1:
                raise CheckpointError(f"{folder} has {steps!r} steps; expected a number, as `vitrail train` wrote it")
            threads = choose_asked_or_recorded_threads(recorded, runtime.threads, str(folder))
            plan = use_threads(prepare_plan(request, runtime, ranks).with_steps(steps), threads)
            plan = choose_recorded_precision(plan, recorded, str(folder))
            if slow := describe_slow_resume(plan):
                runtime.report(slow)
            now = plan.to_json()
            if request.trusted is not None:  # the user may name the same code by another path
                now["model"]["name"] = extract_name_or_empty(recorded.get("model"))
            for note in check_unchanged_and_list_warnings(recorded, now, folder):
                runtime.report(f"note   {note}")
            if longer:
                before = plan
                plan = extend_run(run, plan, recorded, Length(epochs=epochs, minutes=minutes, start=start))
                runtime.report(describe_extension(before, plan))
            plan.task.initialize(plan.source, plan.recipe)
            train_and_save(run, plan, runtime, resumed=True)
    return True


def is_training_complete(run: RunFolder) -> bool:
    states, steps = run.list_checkpoints(), run.load_plan().get("steps")
    return bool(states) and step_from_file_name(states[-1]) == steps and is_run_finished(run.folder)


def check_unchanged_and_list_warnings(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> list[str]:
    """Refuse to resume if model, data or teacher have changed; return why the result will not be bit-identical."""
    for part in UNCHANGED_PARTS:
        if differences := find_differences(before.get(part), now[part]):
            raise CheckpointError(
                f"cannot resume {folder}: the {part} has changed ({differences[0]}); restore it, or start a new run"
            )
    return [
        f"{part} was {before.get(part)} and is {now[part]}{NEW_PARTS.get(part, '')}: resuming, but not bit-identical"
        for part in BIT_IDENTITY_PARTS
        if before.get(part) != now[part] and not (part in NEW_PARTS and part not in before)
    ]


def find_differences(before: Any, now: Any, name: str = "") -> list[str]:
    """The parts that differ from run.json, where fields may have a British spelling."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        before = {AMERICAN_NAMES.get(key, key): value for key, value in before.items()}
        return [each for key in now for each in find_differences(before.get(key), now[key], str(key))]
    same = before == now or (isinstance(before, str) and AMERICAN_NAMES.get(before) == now)
    return [] if same else [f"{name} {shorten_text(before)}, now {shorten_text(now)}"]


def shorten_text(value: object) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}…"


@dataclass(frozen=True, kw_only=True)
class Length:
    """The new length of a run, in all: epochs, or minutes, of which the current ones count from `start`."""

    epochs: float | None = None
    minutes: float | None = None
    start: float = 0.0  # a value of `monotonic()`

    def __post_init__(self) -> None:
        if self.epochs is not None and self.minutes is not None:
            raise ConfigError("pass either `minutes` or `epochs`, not both")

    def to_settings(self) -> dict[str, float | None]:
        """The settings of the recipe that change."""
        return {"minutes": self.minutes} if self.epochs is None else {"epochs": self.epochs, "minutes": None}


def extend_run(run: RunFolder, plan: Plan, recorded: Mapping[str, Any], length: Length) -> Plan:
    """The plan with its new length, which run.json records before training; the old one is kept in `lengths`."""
    recipe = plan.recipe.with_settings(length.to_settings())
    assert plan.request is not None
    longer = replace(plan, recipe=recipe, request=replace(plan.request, recipe=recipe))
    longer = longer.with_steps(compute_steps(run, longer, length))
    if longer.steps < plan.steps or (longer.steps == plan.steps and is_last_step_done(run, plan)):
        given = f"`epochs` is {length.epochs}" if length.epochs else f"`minutes` is {length.minutes}"
        new, old = (format_count(each.steps, "step") for each in (longer, plan))
        epochs = format_count(round(plan.epochs, 2), "epoch")
        raise ConfigError(f"{given}: {new}, but {run.folder} has {old} ({epochs}); expected more, to extend it")
    if plan.ranks.is_first and longer.steps > plan.steps:
        run.write_plan(record_length(recorded, longer, length))
    return longer


def compute_steps(run: RunFolder, plan: Plan, length: Length) -> int:
    """The steps of the longer run, in all."""
    if length.epochs is not None:
        return max(floor(length.epochs * plan.steps_per_epoch), 1)
    assert length.minutes is not None
    state, _ = read_newest_checkpoint_and_damage(run)
    done, seconds = (0, 0.0) if state is None else (int(state.metadata["step"]), float(state.metadata["seconds"]))
    if length.minutes * 60 <= seconds:
        raise ConfigError(
            f"`minutes` is {length.minutes}, but {run.folder} has taken {format_duration(seconds)}; expected more"
        )
    speed = measure_throughput(plan)
    left = plan.ranks.broadcast_object(length.minutes * 60 - seconds - (monotonic() - length.start))
    return done + speed.steps_within(left, plan.steps_per_epoch, plan.recipe.loop.eval_every)


def is_last_step_done(run: RunFolder, plan: Plan) -> bool:
    state, _ = read_newest_checkpoint_and_damage(run)
    return state is not None and state.metadata["step"] == plan.steps


def record_length(recorded: Mapping[str, Any], plan: Plan, length: Length) -> dict[str, Any]:
    """The contents of run.json with the new length."""
    recipe = {**recorded["recipe"], **length.to_settings()}
    before = {"steps": recorded["steps"], "epochs": recorded.get("epochs")}
    changed = {"until": datetime.now(UTC).isoformat(timespec="seconds")}
    return {
        **recorded,
        "request": {**recorded["request"], "recipe": {**recorded["request"]["recipe"], **length.to_settings()}},
        "recipe": recipe,
        "epochs": plan.epochs,
        "steps": plan.steps,
        "lengths": [*recorded.get("lengths", ()), {**before, **changed}],
    }


def describe_extension(before: Plan, plan: Plan) -> str:
    """One line about a new length."""
    old, new = (format_count(round(each.epochs, 2), "epoch") for each in (before, plan))
    return (
        f"length {old}, now {new} ({format_count(plan.steps, 'step')}): from here on, the schedules are those of "
        f"the longer run, so the result is not bit-identical to a run of {new} from the start"
    )
