"""Training state and one optimizer step. The loop, logging and evaluation live in loop.py."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from math import isfinite
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError, ConfigError, DataError, VitrailError
from vitrail.data.batch import Batch
from vitrail.distributed import set_sync_batch_norm_ranks
from vitrail.recipes.schedule import Clock, lr_factor, parse_schedule
from vitrail.tasks.task import Task
from vitrail.train.optim import (
    Muon,
    WeightEMA,
    create_optimizers,
    freeze_all_but_last_blocks,
    set_frozen_batch_norms_to_eval,
    set_scaled_lr,
    set_scheduled_settings,
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

WINDOWS_OF_SHORT_RUN = 12  # log windows of a run with signs of a collapse, at least
AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Trainer:
    """The task of a plan in training. `task` is always the plain module, not its DDP wrapper."""

    def __init__(self, plan: Plan) -> None:
        self.recipe, self.device, self.ranks = plan.recipe, plan.device, plan.ranks
        self.steps, self.steps_per_epoch = plan.steps, plan.steps_per_epoch
        self.log_every = max(1, min(50, plan.steps_per_epoch // 10))
        if plan.task.collapse_signs:  # a short run needs several windows after its warm-up to show one
            self.log_every = max(1, min(self.log_every, plan.steps // WINDOWS_OF_SHORT_RUN))
        settings, loop = plan.recipe.optimization, plan.recipe.loop
        self.task = plan.task.to(plan.device)
        self.task.ranks = plan.ranks
        self.task.setup(plan.source, plan.recipe)
        if not isinstance(self.task.result, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(self.task.result).__name__
            raise ConfigError(f"the result of {type(self.task).__name__} is a {kind}; expected the module to save")
        set_sync_batch_norm_ranks(self.task, plan.ranks)
        freeze_all_but_last_blocks(self.task, settings.train_blocks)
        self.optimizers = create_optimizers(self.task, settings)
        self.schedules = {name: parse_schedule(value, name) for name, value in plan.recipe.schedules.items()}
        self.ema = WeightEMA(self.task, self.task.copy(), loop.ema) if loop.ema else None
        self.precision = plan.chosen_precision
        self.scaler = torch.GradScaler(plan.device.type, enabled=self.precision == "float16")
        warmup = round(settings.warmup * self.steps_per_epoch)
        self.warmup_steps = min(warmup, self.steps // 2)  # a short run must reach its peak
        self.peak_lr = settings.lr * (loop.batch / settings.lr_batch if settings.lr_batch else 1)
        self.metric_window = dict[str, Tensor]()  # loss and metrics of each step since the last log
        self.window_start = 0  # place of its first step; more than 0 in a run that was extended after its last log
        self.units_since_log = 0  # images or tokens, over all processes
        if loop.compile:
            self.task.compile_backbone()
        self.forward = plan.ranks.wrap_in_ddp(self.task, plan.device)
        self.steps_done = 0
        self.metric_names: set[str] | None = None  # known after the first forward pass

    @property
    def trained_task(self) -> Task:
        """The task to evaluate and save: with the moving average of the weights if the recipe has one."""
        return self.ema.averaged_module if self.ema else self.task

    @property
    def clock(self) -> Clock:
        """The clock of the next step."""
        return Clock(step=self.steps_done, steps=self.steps, steps_per_epoch=self.steps_per_epoch)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.peak_lr * lr_factor(self.steps_done, self.steps, self.warmup_steps, self.recipe.optimization)

    def step(self, batches: Iterator[Batch]) -> set[str]:
        """Take the micro-batches of one step from `batches` and update the weights; return why some were skipped."""
        accumulate, skipped, clock = self.recipe.loop.accumulate, set[str](), self.clock
        self.forward.train()
        if self.recipe.optimization.train_blocks == 0:
            self.task.backbone.eval()  # a frozen backbone has no dropout
        set_frozen_batch_norms_to_eval(self.task.backbone)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for part in range(accumulate):
            batch = next(batches)
            skipped.update(batch.skipped)
            if not batch.size:
                raise DataError(f"no {self.task.example} of a batch can be read, for instance {min(skipped)}")
            self.units_since_log += self.task.count_units(batch) * self.ranks.world_size
            last = part == accumulate - 1
            waiting = nullcontext() if last or self.ranks.world_size == 1 else cast(Any, self.forward).no_sync()
            with waiting:
                with self.autocast():
                    loss, metrics = self.compute_loss(batch.to(self.device), clock)
                self.scaler.scale(loss / accumulate).backward()
            self.record_metrics({"loss": loss.detach(), **metrics}, 1 / accumulate)
        if self.ranks.world_size > 1:
            self.check_weights_have_gradients()
        taken = self.update_weights(clock)
        if taken:
            self.task.after_step(clock)
        self.steps_done += 1
        if self.ema:
            self.ema.update(self.steps_done)
        return skipped

    def compute_loss(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:
        output: Any = self.forward(batch, clock)
        check_task_output(self.task, output)
        if self.metric_names is None:  # once, before the first update
            check_first_output(self.task, *output)
            self.metric_names = set(output[1])
        loss, metrics = output
        if metrics.keys() != self.metric_names:
            given, expected = (", ".join(map(str, names)) or "none" for names in (metrics, sorted(self.metric_names)))
            raise ConfigError(
                f"the metrics of {type(self.task).__name__} are {given} at step {clock.step + 1}; "
                f"expected the same at every step: {expected}"
            )
        return loss, {name: torch.as_tensor(value, device=self.device).detach() for name, value in metrics.items()}

    def update_weights(self, clock: Clock) -> bool:
        """Update the weights; return whether the step was taken: in float16, one with infinite gradients is skipped."""
        set_scaled_lr(self.optimizers, self.lr)
        values = {name: schedule.at(clock) for name, schedule in self.schedules.items()}
        set_scheduled_settings(self.optimizers, values)
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                optimizer.orthogonalize_in = torch.bfloat16 if self.precision == "bfloat16" else torch.float32
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        if clip := values.get("clip", self.recipe.optimization.clip):
            trained = [weight for weight in self.task.parameters() if weight.grad is not None]
            nn.utils.clip_grad_norm_(trained, clip)
        self.task.before_step(clock)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else 0.0
        self.scaler.update()
        return not self.scaler.is_enabled() or self.scaler.get_scale() >= scale

    def check_weights_have_gradients(self) -> None:
        """DDP needs the gradient of every trained weight."""
        unused = [name for name, weight in self.named_weights().items() if weight.requires_grad and weight.grad is None]
        if unused:
            raise ConfigError(
                f"{unused[0]} of {type(self.task).__name__} is trained but does not change the loss; expected weights "
                "that do, on several processes: use it, or call requires_grad_(False)"
            )

    def autocast(self) -> Any:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, AUTOCAST_DTYPES[self.precision])

    def finish(self) -> nn.Module:
        """The result of the task in eval mode, no longer compiled."""
        if self.recipe.loop.compile:
            self.task.restore_eager()
        return self.trained_task.result.eval()

    def record_metrics(self, values: Mapping[str, Tensor], weight: float) -> None:
        place = self.steps_done % self.log_every
        for name, value in values.items():
            if name not in self.metric_window:
                exact = torch.float32 if self.device.type == "mps" else torch.float64  # MPS has no float64
                self.metric_window[name] = torch.zeros(self.log_every, dtype=exact, device=self.device)
            self.metric_window[name][place] += value.reshape(()).to(self.metric_window[name].dtype) * weight

    def compute_mean_metrics(self) -> dict[str, float]:
        """Mean metrics since the last log, over all processes; an error if the loss is not finite."""
        count = (self.steps_done - 1) % self.log_every + 1
        rows = torch.stack([values[self.window_start : count] for values in self.metric_window.values()])
        rows = self.ranks.all_reduce_sum(rows) / self.ranks.world_size
        for place, loss in enumerate(rows[list(self.metric_window).index("loss")].tolist()):
            if not isfinite(loss):
                raise DivergedError(self.steps_done - count + self.window_start + place + 1, loss)
        means = zip(self.metric_window, rows.mean(1).tolist(), strict=True)
        return {name: mean for name, mean in means if isfinite(mean)}  # the log has finite numbers only

    def clear_metrics(self) -> None:
        """Start a new window, after a log."""
        self.metric_window.clear()
        self.window_start = 0

    def check_weights_finite(self) -> None:
        """The last finite loss may have an infinite gradient."""
        if not all(weight.isfinite().all() for weight in self.task.parameters()):
            raise DivergedError(self.steps_done, float("nan"))

    def get_state(self, metadata: Mapping[str, Any]) -> TrainingState:
        ranks = self.ranks.all_gather(get_random_state(self.device)["cpu"])
        tensors = {
            **add_prefix("model", get_task_state(self.task)),
            **add_prefix("optimizer", get_optimizer_tensors(self.named_weights(), self.optimizers)),
            **add_prefix("window", self.metric_window),
            **{f"random/{rank}/cpu": state for rank, state in enumerate(ranks)},
        }
        if self.device.type == "cuda":
            states = self.ranks.all_gather(get_random_state(self.device)["cuda"].to(self.device))
            tensors |= {f"random/{rank}/cuda": state for rank, state in enumerate(states)}
        if self.ema:
            tensors |= add_prefix("average", get_task_state(self.ema.averaged_module))
        extended = {"window_start": self.window_start} if self.window_start else {}
        numbers = {"step": self.steps_done, "scale": self.scaler.state_dict(), **extended, **metadata}
        return TrainingState(tensors, numbers)

    def named_weights(self) -> dict[str, nn.Parameter]:
        return {name_in_checkpoint(name): weight for name, weight in self.task.named_parameters()}

    def restore_state(self, state: TrainingState) -> None:
        targets = [("model", self.task), *([("average", self.ema.averaged_module)] if self.ema else [])]
        for name, task in targets:
            given, expected = state.tensors_with_prefix(name), get_task_state(task)
            wrong = [
                key for key in {**given, **expected} if format_shape(given.get(key)) != format_shape(expected.get(key))
            ]
            if wrong:
                raise CheckpointError(
                    f"the run's checkpoint does not fit its model, for instance {wrong[0]!r} is "
                    f"{format_shape(given.get(wrong[0]))}; expected {format_shape(expected.get(wrong[0]))}"
                )
            names = {name_in_checkpoint(key): key for key in task.state_dict()}
            task.load_state_dict({names[key]: tensor for key, tensor in given.items()})
        restore_optimizers(self.named_weights(), self.optimizers, state.tensors_with_prefix("optimizer"))
        done, window = state.metadata["step"], state.tensors_with_prefix("window")
        if type(done) is not int or not 0 <= done <= self.steps:
            raise ValueError(f"its step is {done!r}; expected 0 to {self.steps}")
        if state.metadata.get("steps") != self.steps:  # extended: its windows may have another length
            window = {name: each for name, each in window.items() if each.shape == (self.log_every,)}
        if any(each.shape != (self.log_every,) for each in window.values()) or (window and "loss" not in window):
            raise ValueError(f"its losses do not cover {self.log_every} steps")
        self.metric_window = {name: each.to(self.device) for name, each in window.items()}
        random = state.tensors_with_prefix(f"random/{self.ranks.rank}")
        if random:
            restore_random_state(random, self.device)
        self.steps_done = done
        start = state.metadata.get("window_start", 0) if window else done % self.log_every
        self.window_start = start if start in range(self.log_every) else 0
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(dict(state.metadata["scale"]))


def name_in_checkpoint(name: str) -> str:
    """The name of a task's tensor in a checkpoint: that of the backbone alone, or with a prefix for other parts."""
    return name.removeprefix("backbone.") if name.startswith("backbone.") else f"task.{name}"


def get_task_state(task: Task) -> dict[str, Tensor]:
    return {name_in_checkpoint(name): tensor for name, tensor in task.state_dict().items()}


def check_task_output(task: Task, output: Any) -> None:
    """Check the types of what a task returns for a batch."""
    name = type(task).__name__
    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Mapping)):
        raise ConfigError(f"{name} returned a {type(output).__name__}; expected the loss and a mapping of metrics")
    loss, metrics = cast(tuple[Any, Mapping[Any, Any]], output)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        given = f"a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            given = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
        raise ConfigError(f"the loss of {name} is {given}; expected a tensor with one real number")
    if not loss.requires_grad:
        raise ConfigError(f"the loss of {name} has no gradient; expected one that depends on trained weights")
    for key, value in metrics.items():
        is_tensor = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not is_tensor and not isinstance(value, Real):
            given = " ".join(repr(value).split())[:80]
            raise ConfigError(f"the metric {key!r} of {name} is {given}; expected a finite number")


def check_first_output(task: Task, loss: Tensor, metrics: Mapping[Any, Any]) -> None:
    """Check the values that a task returns for its first batch, which waits for the device."""
    name = type(task).__name__
    if not loss.isfinite():
        raise ConfigError(
            f"the loss of {name} is {loss.item()} in its first step, before any update; "
            "expected a finite number: check its inputs and the initial weights"
        )
    if wrong := [key for key in metrics if not isinstance(key, str) or key == "loss"]:
        raise ConfigError(f"{name} has a metric named {wrong[0]!r}; expected another name, as text")
    for key, value in metrics.items():
        if not isfinite(value.detach() if isinstance(value, Tensor) else value):
            raise ConfigError(f"the metric {key!r} of {name} is {value!r}; expected a finite number")
        if key in ("step", "epoch") or key.startswith("val_"):
            raise ConfigError(f"{name} has a metric {key!r}; expected another name: the log uses it for something else")


class DivergedError(VitrailError):
    """The loss became NaN or infinite."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(
            f"the loss became {loss} at step {step}: lower `lr`, set `clip` to 1, or use `precision` float32"
        )
        self.step = step


def format_shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else "×".join(map(str, tensor.shape)) or "one number"
