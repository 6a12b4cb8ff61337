"""How fast a training would go and what memory it would take, measured on a copy of the model before it begins."""

import resource
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import floor
from time import monotonic

import torch

from vitrail.data.datasets import Subset
from vitrail.data.loader import Batch, report_dead_workers
from vitrail.errors import ConfigError
from vitrail.train.evaluate import evaluate
from vitrail.train.setup import Setup
from vitrail.train.training import Training

TRIED = 4.0  # seconds of steps, at least
MARGIN = 0.97  # of a budget is planned for


@dataclass(frozen=True)
class Speed:
    step: float  # seconds
    evaluation: float  # seconds, of the whole validation part
    memory: float  # bytes at the peak, of the process or on the GPU

    def seconds(self, steps: int, steps_per_epoch: int, eval_every: int) -> float:
        """Of a whole training."""
        evaluations = 1 + (steps // (steps_per_epoch * eval_every) if eval_every else 0)
        return steps * self.step + evaluations * self.evaluation

    def steps_within(self, seconds: float, steps_per_epoch: int, eval_every: int) -> int:
        """As many as fit into a budget, with its evaluations."""
        left = seconds * MARGIN - self.evaluation
        each = self.step + (self.evaluation / (steps_per_epoch * eval_every) if eval_every else 0.0)
        if left < each:
            raise ConfigError(
                f"a budget of {max(seconds, 0):.0f} s is left, and one step with the evaluation at the end takes "
                f"{each + self.evaluation:.1f} s; expected more --minutes"
            )
        return floor(left / each)


def measure(setup: Setup) -> Speed:
    """Takes a few steps on a copy, and evaluates on a few pictures; nothing of it is left afterwards."""
    before, recipe, data = torch.get_rng_state(), setup.recipe, setup.data
    training = setup.with_model(deepcopy(setup.model)).training(10**6)
    with report_dead_workers(setup.workers):
        batches = setup.batches(range(2000))
        step = timed(training, batches)
        if training.is_early:  # both halves of a training with growing pictures
            training.done = training.steps - 1000
            share = recipe.loop.early_share
            step = share * step + (1 - share) * timed(training, batches)
    seconds = 0.0
    if data.val is not None and len(data.val):
        some = min(len(data.val), max(recipe.loop.batch, 64))
        start = monotonic()
        evaluate(
            training.result,
            Subset(data.val, range(some)),
            setup.preprocessing,
            batch=max(recipe.loop.batch // recipe.loop.accumulate, 1),
            device=setup.device,
        )
        seconds = (monotonic() - start) * len(data.val) / some / setup.team.world
    torch.set_rng_state(before)
    gpu = setup.device.type == "cuda"
    memory = torch.cuda.max_memory_allocated(setup.device) if gpu else peak_memory()
    return setup.team.from_first(Speed(step, seconds, memory))


def timed(training: Training, batches: Iterator[Batch]) -> float:
    """Seconds a step, once it is compiled and caches are full."""
    for _ in range(2):
        training.step(batches)
    start, steps = monotonic(), 0
    more = torch.ones(1)
    while more.item():  # as long as any process wants to, since all must take the same steps
        training.step(batches)
        if training.device.type == "cuda":
            torch.cuda.synchronize(training.device)
        steps += 1
        more = training.team.largest(torch.tensor([float(steps < 3 or (monotonic() - start < TRIED and steps < 400))]))
    return (monotonic() - start) / steps


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)
