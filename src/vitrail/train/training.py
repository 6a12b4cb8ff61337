"""A model in training: one step of it, and everything that a step changes, to be saved and restored."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from math import isfinite
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.draws import keys
from vitrail.data.loader import Batch
from vitrail.data.mixing import erase, mix, normalise
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError, DataError, VitrailError
from vitrail.models.checks import pair
from vitrail.train.distributed import Team
from vitrail.train.losses import Inputs, Objective
from vitrail.train.optim import Average, freeze, keep_statistics, optimizers, set_lr
from vitrail.train.recipe import Recipe
from vitrail.train.schedule import share
from vitrail.train.state import (
    State,
    named,
    optimizer_tensors,
    random_state,
    restore_optimizers,
    restore_random_state,
)

MIXING = 2**31 - 1  # stands for the picture in the key that a whole batch is mixed by


class Training:
    """`step` by step from the model's starting weights; `model` and `average` are always the plain modules."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        steps: int,
        steps_per_epoch: int,
        classes: int,
        preprocessing: Preprocessing,
        objective: Objective,
        device: torch.device,
        team: Team,
        log_every: int,
    ) -> None:
        settings, loop = recipe.optimization, recipe.loop
        self.model, self.recipe, self.steps, self.classes = model.to(device), recipe, steps, classes
        self.steps_per_epoch, self.log_every = steps_per_epoch, log_every
        self.preprocessing, self.objective, self.device, self.team = preprocessing, objective, device, team
        freeze(self.model, settings.train_blocks)
        self.optimizers = optimizers(self.model, settings)
        self.average = Average(self.model, deepcopy(self.model), loop.ema) if loop.ema else None
        self.scaler = torch.GradScaler(device.type, enabled=loop.precision == "float16")
        self.warmup = min(
            round(settings.warmup * steps_per_epoch), steps // 2
        )  # a short training must come to its peak
        self.peak = settings.lr * (loop.batch / settings.lr_batch if settings.lr_batch else 1)
        self.window = dict[str, Tensor]()  # loss and metrics of each step since the last log
        compiled = torch.compile(self.model) if loop.compile else self.model
        self.forward = team.shared(cast(nn.Module, compiled), device)
        self.done = 0  # steps

    @property
    def result(self) -> nn.Module:
        """The weights that count: their average where one is kept."""
        return self.average.average if self.average else self.model

    @property
    def lr(self) -> float:
        """Of the step to come."""
        return self.peak * share(self.done, self.steps, self.warmup, self.recipe.optimization)

    @property
    def is_early(self) -> bool:
        """Whether the step to come is one of those with smaller pictures (progressive resizing)."""
        return bool(self.recipe.loop.early_size) and self.done < self.recipe.loop.early_share * self.steps

    def step(self, batches: Iterator[Batch]) -> set[str]:
        """Takes its micro-batches from `batches` and moves the weights once; gives why pictures were skipped."""
        accumulate, skipped = self.recipe.loop.accumulate, set[str]()
        self.forward.train(self.recipe.optimization.train_blocks != 0)  # what is frozen whole is not to be random
        keep_statistics(self.model)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for part in range(accumulate):
            batch = next(batches)
            skipped.update(batch.skipped)
            if not len(batch.labels):
                raise DataError(f"no picture of a batch can be read, for instance {min(skipped)}")
            last = part == accumulate - 1
            waiting = nullcontext() if last or self.team.world == 1 else cast(Any, self.forward).no_sync()
            with waiting:
                with self.autocast():
                    loss, metrics = self.objective(self.forward, self.inputs(batch))
                self.scaler.scale(loss / accumulate).backward()
            self.note({"loss": loss.detach(), **metrics}, 1 / accumulate)
        self.move()
        self.done += 1
        if self.average:
            self.average.update(self.done)
        return skipped

    def move(self) -> None:
        set_lr(self.optimizers, self.lr)
        if self.recipe.optimization.clip:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            trained = [weight for weight in self.model.parameters() if weight.grad is not None]
            nn.utils.clip_grad_norm_(trained, self.recipe.optimization.clip)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def inputs(self, batch: Batch) -> Inputs:
        """Normalised, erased and mixed on the device; by what the seed and the step say, whatever the process."""
        augmentation, seed = self.recipe.augmentation, self.recipe.loop.seed
        images = batch.images.to(self.device, non_blocking=True)
        labels = batch.labels.to(self.device, non_blocking=True)
        images = normalise(images, self.preprocessing)
        if self.is_early:
            rows, columns = pair(self.preprocessing.image_size)
            side = self.recipe.loop.early_size
            images = F.interpolate(images, (side, side * columns // rows), mode="bilinear", antialias=True)
        if augmentation.erase:
            images = erase(images, batch.keys, augmentation.erase)
        images, targets = mix(images, labels, self.classes, augmentation, int(keys(seed, self.done, MIXING, 0)[0]))
        return Inputs(images, targets, labels, batch.indices)

    def autocast(self) -> Any:
        if self.recipe.loop.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.recipe.loop.precision))

    def note(self, values: Mapping[str, Tensor], weight: float) -> None:
        place = self.done % self.log_every
        for name, value in values.items():
            if name not in self.window:
                exact = torch.float32 if self.device.type == "mps" else torch.float64  # which has no other
                self.window[name] = torch.zeros(self.log_every, dtype=exact, device=self.device)
            self.window[name][place] += value.to(self.window[name].dtype) * weight

    def observed(self) -> dict[str, float]:
        """Means since the last log, over all processes; a loss that is no number ends the training."""
        count = (self.done - 1) % self.log_every + 1
        rows = torch.stack([values[:count] for values in self.window.values()])
        rows = self.team.total(rows) / self.team.world
        for place, loss in enumerate(rows[list(self.window).index("loss")].tolist()):
            if not isfinite(loss):
                raise DivergedError(self.done - count + place + 1, loss)
        return dict(zip(self.window, rows.mean(1).tolist(), strict=True))

    def check_weights(self) -> None:
        """A finite loss may have an infinite gradient, and be the last that is finite."""
        if not all(weight.isfinite().all() for weight in self.model.parameters()):
            raise DivergedError(self.done, float("nan"))

    def state(self, numbers: Mapping[str, Any]) -> State:
        ranks = self.team.gathered(random_state(self.device)["cpu"])
        tensors = {
            **named("model", self.model.state_dict()),
            **named("optimizer", optimizer_tensors(self.model, self.optimizers)),
            **named("window", self.window),
            **{f"random/{rank}/cpu": state for rank, state in enumerate(ranks)},
        }
        if self.device.type == "cuda":
            states = self.team.gathered(random_state(self.device)["cuda"].to(self.device))
            tensors |= {f"random/{rank}/cuda": state for rank, state in enumerate(states)}
        if self.average:
            tensors |= named("average", self.average.average.state_dict())
        return State(tensors, {"step": self.done, "scale": self.scaler.state_dict(), **numbers})

    def restore(self, state: State) -> None:
        targets = [("model", self.model), *([("average", self.average.average)] if self.average else [])]
        for name, module in targets:
            given, expected = state.part(name), module.state_dict()
            wrong = [key for key in {**given, **expected} if shape(given.get(key)) != shape(expected.get(key))]
            if wrong:
                raise CheckpointError(
                    f"the run's checkpoint does not fit its model, for instance {wrong[0]!r} is "
                    f"{shape(given.get(wrong[0]))}; expected {shape(expected.get(wrong[0]))}"
                )
            module.load_state_dict(given)
        restore_optimizers(self.model, self.optimizers, state.part("optimizer"))
        window = state.part("window")
        if any(each.shape != (self.log_every,) for each in window.values()) or (window and "loss" not in window):
            raise ValueError(f"its losses do not cover {self.log_every} steps")
        self.window = {name: each.to(self.device) for name, each in window.items()}
        random = state.part(f"random/{self.team.rank}")
        if random:
            restore_random_state(random, self.device)
        done = state.numbers["step"]
        if type(done) is not int or not 0 <= done <= self.steps:
            raise ValueError(f"its step is {done!r}; expected 0 to {self.steps}")
        self.done = done
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(dict(state.numbers["scale"]))


class DivergedError(VitrailError):
    """The loss is no number any more."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(
            f"the loss is {loss} at step {step}; expected a number: lower lr, set clip to 1, or use float32"
        )
        self.step = step


def shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else "×".join(map(str, tensor.shape)) or "one number"
