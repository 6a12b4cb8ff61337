"""Measure speed and memory on a copy of the model before training; compute the steps that fit into a time budget."""

import resource
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, floor
from time import monotonic

import torch

from vitrail.base.errors import ConfigError
from vitrail.data.batch import Batch, wrap_dead_worker_errors
from vitrail.distributed import Ranks
from vitrail.train.plan import Plan
from vitrail.train.trainer import Trainer

MIN_TIMED_SECONDS = 4.0  # of steps
BUDGET_SHARE = 0.97  # of a time budget is planned; the rest is a reserve


@dataclass(frozen=True)
class Throughput:
    step_seconds: float
    evaluation_seconds: float  # of all validation examples
    peak_bytes: float  # of the process, or on the GPU
    units_per_step: float = 0.0  # images or tokens, over all processes

    def estimate_seconds(self, steps: int, steps_per_epoch: int, eval_every: int) -> float:
        """Total seconds of a run with its evaluations."""
        evaluations = 1 + (steps // (steps_per_epoch * eval_every) if eval_every else 0)
        return steps * self.step_seconds + evaluations * self.evaluation_seconds

    def steps_within(self, seconds: float, steps_per_epoch: int, eval_every: int) -> int:
        """How many steps fit into a budget, with their evaluations."""
        left = seconds * BUDGET_SHARE - self.evaluation_seconds
        each = self.step_seconds + (self.evaluation_seconds / (steps_per_epoch * eval_every) if eval_every else 0.0)
        if left < each:
            missing = (each + self.evaluation_seconds) / BUDGET_SHARE - seconds
            raise ConfigError(
                f"{max(seconds, 0):.0f} s are left for training, but one step with the evaluation at the end takes "
                f"{each + self.evaluation_seconds:.1f} s; add at least {ceil(missing / 6) / 10} to `minutes`"
            )
        return floor(left / each)


@contextmanager
def start_trial(plan: Plan) -> Generator[tuple[Trainer, Iterator[Batch]]]:
    """A trainer with a copy of the model, and its batches; the plan and torch's random state do not change."""
    random_state = torch.get_rng_state()
    try:
        with wrap_dead_worker_errors(plan.workers):
            trainer = Trainer(replace(plan, task=plan.task.copy(), fixed_steps=10**6))
            yield trainer, plan.load_batches(range(10**6))
    finally:
        torch.set_rng_state(random_state)


def measure_throughput(plan: Plan) -> Throughput:
    """Time a few steps on a copy of the model and an evaluation of a few examples."""
    recipe, validation_count, seconds = plan.recipe, plan.source.validation_count, 0.0
    with start_trial(plan) as (trainer, batches):
        step = measure_step_seconds(trainer, batches)
        units = trainer.units_since_log / trainer.steps_done
        if share := trainer.task.early_share:  # both parts of progressive resizing
            trainer.steps_done = trainer.steps - 1000
            step = share * step + (1 - share) * measure_step_seconds(trainer, batches)
        if validation_count:
            some = min(validation_count, max(recipe.loop.batch, 64))
            batch = max(recipe.loop.batch // recipe.loop.accumulate, 1)
            trainer.task.ranks = trainer.trained_task.ranks = Ranks()  # each process measures on its own
            start = monotonic()
            trainer.trained_task.evaluate(plan.source, trainer.clock, batch=batch, device=plan.device, limit=some)
            seconds = (monotonic() - start) * validation_count / some / plan.ranks.world_size
    gpu = plan.device.type == "cuda"
    memory = torch.cuda.max_memory_allocated(plan.device) if gpu else get_peak_memory()
    return plan.ranks.broadcast_object(Throughput(step, seconds, memory, units))


def fix_steps_by_minutes(plan: Plan, start: float, speed: Throughput | None = None) -> Plan:
    """The plan with the steps that fit into the recipe's `minutes` from `start` on; unchanged if it has no budget."""
    minutes = plan.recipe.loop.minutes
    if minutes is None:
        return plan
    speed = speed or measure_throughput(plan)
    left = plan.ranks.broadcast_object(minutes * 60 - (monotonic() - start))
    return plan.with_steps(speed.steps_within(left, plan.steps_per_epoch, plan.recipe.loop.eval_every))


def measure_step_seconds(trainer: Trainer, batches: Iterator[Batch]) -> float:
    """Seconds per step, once the model is compiled and caches are full."""
    for _ in range(2):
        trainer.step(batches)
    start, steps = monotonic(), 0
    more = torch.ones(1)
    while more.item():  # all processes must take the same number of steps
        trainer.step(batches)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        steps += 1
        more = trainer.ranks.all_reduce_max(
            torch.tensor([float(steps < 3 or (monotonic() - start < MIN_TIMED_SECONDS and steps < 400))])
        )
    return (monotonic() - start) / steps


def get_peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)
