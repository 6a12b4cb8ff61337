"""Training state and one optimizer step. The loop, logging and evaluation live in loop.py."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from math import isfinite
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.augment.batch_transforms import mixup_or_cutmix, normalise, random_erase
from vitrail.data.batch import Batch
from vitrail.data.rng import make_view_keys
from vitrail.errors import CheckpointError, DataError, VitrailError
from vitrail.models.checks import pair
from vitrail.tasks.losses import LossInputs
from vitrail.tasks.schedule import lr_factor
from vitrail.train.optim import (
    WeightEMA,
    create_optimizers,
    freeze_all_but_last_blocks,
    set_frozen_batch_norms_to_eval,
    set_scaled_lr,
)
from vitrail.train.plan import Plan
from vitrail.train.training_state import (
    TrainingState,
    add_prefix,
    get_optimizer_tensors,
    get_random_state,
    restore_optimizers,
    restore_random_state,
)

BATCH_MIXING_KEY = 2**31 - 1  # in place of an image index in the random key for mixing a batch


class Trainer:
    """The model of a plan in training. `model` is always the plain module, not its compiled or DDP wrapper."""

    def __init__(self, plan: Plan) -> None:
        self.recipe, self.preprocessing, self.objective = plan.recipe, plan.preprocessing, plan.objective
        self.device, self.ranks, self.classes = plan.device, plan.ranks, len(plan.data.classes)
        self.steps, self.steps_per_epoch = plan.steps, plan.steps_per_epoch
        self.log_every = max(1, min(50, plan.steps_per_epoch // 10))
        settings, loop = plan.recipe.optimization, plan.recipe.loop
        self.model: nn.Module = plan.model.to(plan.device)
        freeze_all_but_last_blocks(self.model, settings.train_blocks)
        self.optimizers = create_optimizers(self.model, settings)
        self.ema = WeightEMA(self.model, deepcopy(self.model), loop.ema) if loop.ema else None
        self.scaler = torch.GradScaler(plan.device.type, enabled=loop.precision == "float16")
        warmup = round(settings.warmup * self.steps_per_epoch)
        self.warmup_steps = min(warmup, self.steps // 2)  # a short run must reach its peak
        self.peak_lr = settings.lr * (loop.batch / settings.lr_batch if settings.lr_batch else 1)
        self.metric_window = dict[str, Tensor]()  # loss and metrics of each step since the last log
        compiled = torch.compile(self.model) if loop.compile else self.model
        self.forward = plan.ranks.wrap_in_ddp(cast(nn.Module, compiled), plan.device)
        self.steps_done = 0

    @property
    def trained_model(self) -> nn.Module:
        """The model to evaluate and save: the moving average of the weights if the recipe has one."""
        return self.ema.averaged_model if self.ema else self.model

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.peak_lr * lr_factor(self.steps_done, self.steps, self.warmup_steps, self.recipe.optimization)

    @property
    def uses_early_size(self) -> bool:
        """Whether the next step trains on smaller images (progressive resizing)."""
        return bool(self.recipe.loop.early_size) and self.steps_done < self.recipe.loop.early_share * self.steps

    def step(self, batches: Iterator[Batch]) -> set[str]:
        """Take the micro-batches of one step from `batches` and update the weights; return why images were skipped."""
        accumulate, skipped = self.recipe.loop.accumulate, set[str]()
        self.forward.train(self.recipe.optimization.train_blocks != 0)  # a frozen backbone has no dropout
        set_frozen_batch_norms_to_eval(self.model)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for part in range(accumulate):
            batch = next(batches)
            skipped.update(batch.skipped)
            if not batch.size:
                raise DataError(f"no image of a batch can be read, for instance {min(skipped)}")
            last = part == accumulate - 1
            waiting = nullcontext() if last or self.ranks.world_size == 1 else cast(Any, self.forward).no_sync()
            with waiting:
                with self.autocast():
                    loss, metrics = self.objective(self.forward, self.prepare_inputs(batch))
                self.scaler.scale(loss / accumulate).backward()
            self.record_metrics({"loss": loss.detach(), **metrics}, 1 / accumulate)
        self.update_weights()
        self.steps_done += 1
        if self.ema:
            self.ema.update(self.steps_done)
        return skipped

    def update_weights(self) -> None:
        set_scaled_lr(self.optimizers, self.lr)
        if self.recipe.optimization.clip:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            trained = [weight for weight in self.model.parameters() if weight.grad is not None]
            nn.utils.clip_grad_norm_(trained, self.recipe.optimization.clip)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def prepare_inputs(self, batch: Batch) -> LossInputs:
        """Normalise, erase and mix on the device. Random choices depend on the seed and the step alone."""
        augmentation, seed = self.recipe.augmentation, self.recipe.loop.seed
        images = batch["images"].to(self.device, non_blocking=True)
        labels = batch["labels"].to(self.device, non_blocking=True)
        images = normalise(images, self.preprocessing)
        if self.uses_early_size:
            rows, columns = pair(self.preprocessing.image_size)
            side = self.recipe.loop.early_size
            images = F.interpolate(images, (side, side * columns // rows), mode="bilinear", antialias=True)
        if augmentation.erase:
            images = random_erase(images, batch.keys["images"], augmentation.erase)
        images, targets = mixup_or_cutmix(
            images,
            labels,
            self.classes,
            augmentation,
            int(make_view_keys(seed, self.steps_done, BATCH_MIXING_KEY, 0)[0]),
        )
        return LossInputs(images, targets, labels, batch["indices"])

    def autocast(self) -> Any:
        if self.recipe.loop.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.recipe.loop.precision))

    def record_metrics(self, values: Mapping[str, Tensor], weight: float) -> None:
        place = self.steps_done % self.log_every
        for name, value in values.items():
            if name not in self.metric_window:
                exact = torch.float32 if self.device.type == "mps" else torch.float64  # MPS has no float64
                self.metric_window[name] = torch.zeros(self.log_every, dtype=exact, device=self.device)
            self.metric_window[name][place] += value.to(self.metric_window[name].dtype) * weight

    def compute_mean_metrics(self) -> dict[str, float]:
        """Mean metrics since the last log, over all processes; an error if the loss is not finite."""
        count = (self.steps_done - 1) % self.log_every + 1
        rows = torch.stack([values[:count] for values in self.metric_window.values()])
        rows = self.ranks.all_reduce_sum(rows) / self.ranks.world_size
        for place, loss in enumerate(rows[list(self.metric_window).index("loss")].tolist()):
            if not isfinite(loss):
                raise DivergedError(self.steps_done - count + place + 1, loss)
        return dict(zip(self.metric_window, rows.mean(1).tolist(), strict=True))

    def check_weights_finite(self) -> None:
        """The last finite loss may have an infinite gradient."""
        if not all(weight.isfinite().all() for weight in self.model.parameters()):
            raise DivergedError(self.steps_done, float("nan"))

    def get_state(self, metadata: Mapping[str, Any]) -> TrainingState:
        ranks = self.ranks.all_gather(get_random_state(self.device)["cpu"])
        tensors = {
            **add_prefix("model", self.model.state_dict()),
            **add_prefix("optimizer", get_optimizer_tensors(self.model, self.optimizers)),
            **add_prefix("window", self.metric_window),
            **{f"random/{rank}/cpu": state for rank, state in enumerate(ranks)},
        }
        if self.device.type == "cuda":
            states = self.ranks.all_gather(get_random_state(self.device)["cuda"].to(self.device))
            tensors |= {f"random/{rank}/cuda": state for rank, state in enumerate(states)}
        if self.ema:
            tensors |= add_prefix("average", self.ema.averaged_model.state_dict())
        return TrainingState(tensors, {"step": self.steps_done, "scale": self.scaler.state_dict(), **metadata})

    def restore_state(self, state: TrainingState) -> None:
        targets = [("model", self.model), *([("average", self.ema.averaged_model)] if self.ema else [])]
        for name, module in targets:
            given, expected = state.tensors_with_prefix(name), module.state_dict()
            wrong = [
                key for key in {**given, **expected} if format_shape(given.get(key)) != format_shape(expected.get(key))
            ]
            if wrong:
                raise CheckpointError(
                    f"the run's checkpoint does not fit its model, for instance {wrong[0]!r} is "
                    f"{format_shape(given.get(wrong[0]))}; expected {format_shape(expected.get(wrong[0]))}"
                )
            module.load_state_dict(given)
        restore_optimizers(self.model, self.optimizers, state.tensors_with_prefix("optimizer"))
        window = state.tensors_with_prefix("window")
        if any(each.shape != (self.log_every,) for each in window.values()) or (window and "loss" not in window):
            raise ValueError(f"its losses do not cover {self.log_every} steps")
        self.metric_window = {name: each.to(self.device) for name, each in window.items()}
        random = state.tensors_with_prefix(f"random/{self.ranks.rank}")
        if random:
            restore_random_state(random, self.device)
        done = state.metadata["step"]
        if type(done) is not int or not 0 <= done <= self.steps:
            raise ValueError(f"its step is {done!r}; expected 0 to {self.steps}")
        self.steps_done = done
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(dict(state.metadata["scale"]))


class DivergedError(VitrailError):
    """The loss became NaN or infinite."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(
            f"the loss became {loss} at step {step}: lower `lr`, set `clip` to 1, or use `precision` float32"
        )
        self.step = step


def format_shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else "×".join(map(str, tensor.shape)) or "one number"
