"""Extend a run: a new length for a run that is finished, or that was stopped.

The schedules are those of the longer run from the current step on, so the result is close to that of a longer run from
the start, but not bit-identical to it: the learning rate was annealed in between.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import floor
from time import monotonic
from typing import Any

from vitrail.base.errors import ConfigError
from vitrail.base.text import format_count, format_duration
from vitrail.train.plan import Plan
from vitrail.train.resume import read_newest_checkpoint_and_damage
from vitrail.train.run_folder import RunFolder
from vitrail.train.throughput import measure_throughput


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
