"""What DINO and EsViT share: multi-crop views, a momentum teacher, and distributions over prototypes.

The teacher follows the moving average of what is trained (He 2019, Grill 2020, Caron 2021); BYOL has one, too.
B batch, V crops of an image, of which the first 2 are global, D width, K prototypes.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]  # torch has no public base

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.base.figures import CaptionedFigure
from vitrail.data.batch import Batch
from vitrail.data.images.augment.views import View
from vitrail.distributed import Ranks
from vitrail.evaluation.evaluate import temporary_eval_mode
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import DinoSettings
from vitrail.tasks.metric import SPREAD_SIGN, CollapseSign, Metric
from vitrail.tasks.pretraining.parts.pretraining_figures import (
    compute_class_attention,
    make_attention_figure,
    make_usage_figure,
)
from vitrail.tasks.pretraining.parts.projection_heads import PrototypeHead
from vitrail.tasks.pretraining.parts.views import check_view_size, make_view_augmentation
from vitrail.tasks.pretraining.pretraining import Pretraining
from vitrail.tasks.task import MeanMetrics, Source


class MomentumTeacher(nn.ModuleDict):
    """Copies of the modules of a student, by name, without gradients. `follow` moves them towards the student.

    Dropout and stochastic depth are off, in training too. Batch norms then use the statistics of the batch, as those
    of the student do, and have separate running averages.
    """

    def __init__(self, student: Mapping[str, nn.Module]) -> None:
        super().__init__({name: deepcopy(module) for name, module in student.items()})
        self.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:  # torch's signature
        super().train(False)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.train(mode)
        return self

    @torch.no_grad()
    def follow(self, student: Mapping[str, nn.Module], momentum: float) -> None:
        """Move every parameter towards that of the student: momentum · teacher + (1 − momentum) · student."""
        for name, module in student.items():
            for mine, its in zip(self[name].parameters(), module.parameters(), strict=True):
                mine.lerp_(its, 1 - momentum)

    def copy_student(self, student: Mapping[str, nn.Module]) -> None:
        """Become equal to the student, buffers included."""
        for name, module in student.items():
            self[name].load_state_dict(module.state_dict())


class Center(nn.Module):
    """A moving average of rows (…, K), updated once per step from the rows of all micro-batches and processes.

    Rows are centered by the average of earlier steps: call `observe` for each micro-batch, `average` before the update
    of the weights, and `update` after it.
    """

    def __init__(self, width: int, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("value", torch.zeros(width))
        self.value: Tensor
        self.total, self.count = torch.zeros(width), 0  # of the rows of this step, on this process
        self.mean: Tensor | None = None  # of the rows of this step, on all processes

    @torch.no_grad()
    def observe(self, rows: Tensor) -> None:
        rows = rows.flatten(0, -2).float()
        self.total = self.total.to(rows.device) + rows.sum(0)
        self.count += len(rows)

    def average(self, ranks: Ranks) -> None:
        sums = ranks.all_reduce_sum(torch.cat([self.total, self.total.new_tensor([self.count])]))
        self.mean = sums[:-1] / sums[-1]
        self.total, self.count = torch.zeros_like(self.total), 0

    @torch.no_grad()
    def update(self) -> None:
        if self.mean is not None:
            self.value.lerp_(self.mean, 1 - self.momentum)


GLOBAL_CROPS = 2
ATTENTION_IMAGES = 6  # of the figure
JITTER = (0.4, 0.4, 0.2, 0.1)  # of brightness, contrast, saturation and hue
MIN_BLUR_KERNEL = 13  # pixels: three times the largest sigma to each side
UNIFORM_SIGN = CollapseSign(
    metric="teacher_entropy",
    above=0.999,
    meaning="the teacher gives every image the same probability for all prototypes",
    remedy="lower `teacher_temperature`, lower `lr`, or use a larger `batch`",
)
ONE_HOT_SIGN = CollapseSign(
    metric="teacher_entropy",
    below=0.01,
    meaning="the teacher gives every image one prototype",
    remedy="use a `center_momentum` less than 1, a higher `teacher_temperature`, or a lower `lr`",
)
ONE_PROTOTYPE_SIGN = CollapseSign(
    metric="prototypes",
    below=1.5,
    meaning="all crops have the same most probable prototype",
    remedy="lower `lr`, use a `center_momentum` less than 1, or a larger `batch`",
)
HEADS = {"head": "center", "head_dense": "center_grid"}  # and the names of their centers
SETTINGS_BY_SHAPE = {  # the setting that the number of rows of a tensor of a head depends on
    "head.value": "prototypes",  # of a center
    "head_dense.value": "prototypes",
    "last_layer.weight_g": "prototypes",
    "mlp.0.weight": "head_width",
    "mlp.4.weight": "bottleneck_width",
}


class SelfDistillation(Pretraining):
    """A student predicts, from any crop of an image, the prototypes that its momentum teacher finds in another one."""

    metrics = (*Pretraining.metrics, Metric(name="teacher_entropy", label="entropy of the teacher / ln K"))
    averages_itself = True
    collapse_signs: ClassVar[tuple[CollapseSign, ...]] = (
        UNIFORM_SIGN,
        ONE_HOT_SIGN,
        ONE_PROTOTYPE_SIGN,
        SPREAD_SIGN,
    )
    heads: Any  # a PrototypeHead by name
    centres: Any  # a Center by the name of its head; checkpoints have this spelling

    def __init__(self, backbone: Any, settings: DinoSettings, heads: Sequence[str] = ("head",)) -> None:
        super().__init__()
        self.backbone, self.settings = backbone, settings
        widths = (settings.head_width, settings.bottleneck_width, settings.prototypes)
        self.heads = nn.ModuleDict({name: PrototypeHead(backbone.feature_width, *widths) for name in heads})
        self.teacher = MomentumTeacher(self.student)
        self.centres = nn.ModuleDict({name: Center(settings.prototypes, settings.center_momentum) for name in heads})
        self.views = make_crops(settings)
        self.usage = torch.zeros(settings.prototypes)  # global crops of the last evaluation nearest to each prototype

    @property
    def student(self) -> dict[str, nn.Module]:
        """The modules that the teacher has too."""
        return {"backbone": self.backbone, **self.heads}

    @property
    def result(self) -> Any:
        return self.teacher["backbone"]

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        check_view_size(self.backbone, "global_size", self.settings.global_size)
        if self.settings.local_crops:
            check_view_size(self.backbone, "local_size", self.settings.local_size)
        super().check(source, recipe, ranks)

    def initialize(self, source: Source, recipe: Recipe) -> None:
        super().initialize(source, recipe)
        if recipe.loop.whiten:
            self.teacher.copy_student(self.student)

    def load_crops(self, batch: Batch) -> list[Tensor]:
        """Normalized crops, in one tensor for each size, the global ones first: [(2·B, C, H, W), …]."""
        crops = [torch.cat([batch["global_1"], batch["global_2"]]).flatten(0, 1)]
        if "local" in batch.tensors:
            crops.append(batch["local"].flatten(0, 1))
        if len(crops) == 2 and crops[0].shape[1:] == crops[1].shape[1:]:
            crops = [torch.cat(crops)]
        return [self.normalize(each) for each in crops]

    def compute_targets(self, logits: Tensor, center: Any, clock: Clock) -> tuple[Tensor, Tensor]:
        """Probabilities of the prototypes from the teacher's outputs, and their mean entropy."""
        logits = logits.float()
        log_shares = ((logits - center.value) / self.settings.teacher_temperature.at(clock)).log_softmax(-1)
        if self.training:
            center.observe(logits)
        shares = log_shares.exp()
        return shares, -(shares * log_shares).sum(-1).mean()

    def count_prototypes(self, targets: Tensor) -> Tensor:
        """The number of prototypes that are the most probable one of a crop, over all processes."""
        nearest = targets.argmax(-1).flatten()
        used = torch.bincount(nearest, minlength=targets.shape[-1]).float()
        if self.training:
            return (self.ranks.all_reduce_sum(used) > 0).sum().float()
        self.usage = self.usage.to(used.device) + used  # processes may have different numbers of validation batches
        return (used > 0).sum().float()

    def measure_step(self, features: Tensor, targets: Tensor, loss: Tensor, entropy: Tensor) -> dict[str, Tensor]:
        """Metrics of the view loss: `kl` is what the student can still learn, the loss less the entropy of targets."""
        return {
            "kl": loss.detach() - entropy,
            "teacher_entropy": entropy / math.log(targets.shape[-1]),
            "prototypes": self.count_prototypes(targets),
            "spread": self.measure_spread(features),
        }

    def before_step(self, clock: Clock) -> None:
        for center in self.centres.values():
            center.average(self.ranks)
        if limit := self.settings.clip_each:
            for weight in self.parameters():
                if weight.grad is not None:
                    nn.utils.clip_grad_norm_(weight, limit)
        if clock.step < clock.in_steps(self.settings.frozen_epochs):
            for head in self.heads.values():
                head.last_layer.weight_v.grad = None

    def after_step(self, clock: Clock) -> None:
        for center in self.centres.values():
            center.update()
        self.teacher.follow(self.student, self.settings.teacher_momentum.at(clock))

    def load_parts(self, tensors: Mapping[str, Tensor]) -> str:
        given, expected = rename_tensors(tensors), self.state_dict()
        loaded = select_fitting_tensors(given, expected)
        if loaded:
            self.load_state_dict(loaded, strict=False)
        return describe_loaded_parts(loaded, expected) if loaded else ""

    def draw_figures(self, source: Source, device: torch.device) -> list[CaptionedFigure]:
        found = [make_usage_figure(self.usage)] if self.usage.any() else []
        batch = self.load_figure_images(source, device, ATTENTION_IMAGES)
        with temporary_eval_mode(self):
            maps = compute_class_attention(self.result, self.normalize(batch["images"])) if batch.size else None
        if maps is not None:
            pixels = batch["images"].cpu().permute(0, 2, 3, 1).numpy()
            found.append(make_attention_figure(pixels, maps.float().cpu().numpy()))
        return found

    def list_compiled_modules(self) -> list[nn.Module]:
        return [self.backbone, self.teacher["backbone"]]

    def evaluate(self, source: Source, clock: Clock, *, device: torch.device, **options: Any) -> MeanMetrics:
        self.usage = torch.zeros(self.settings.prototypes, device=device)
        found = super().evaluate(source, clock, device=device, **options)
        self.usage = self.ranks.all_reduce_sum(self.usage)
        return replace(found, metrics={**found.metrics, "prototypes": float((self.usage > 0).sum())})


def make_crops(settings: DinoSettings) -> dict[str, View]:
    """Two global crops, blurred and solarized with different probabilities, and local ones, as in DINO."""

    def make_view(
        area: tuple[float, ...], size: int | None, blur: float, solarize: float = 0.0, count: int = 1
    ) -> View:
        kernel = 0.1 if size is None else min(1.0, max(0.1, MIN_BLUR_KERNEL / size))
        own = make_view_augmentation(settings, JITTER, area=area, blur=blur * settings.blur, solarize=solarize)
        return View(replace(own, blur_kernel=kernel), size=size, count=count)

    views = {
        "global_1": make_view(settings.global_area, settings.global_size, 1.0),
        "global_2": make_view(settings.global_area, settings.global_size, 0.1, settings.solarize),
    }
    if settings.local_crops:
        views["local"] = make_view(settings.local_area, settings.local_size, 0.5, count=settings.local_crops)
    return views


def cross_entropy_between_crops(student: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Mean over the pairs of a teacher's crop and another crop of the student: (V, B, K), (2, B, K) → one number.

    −Σ q·log softmax(s/τ) is logsumexp(s/τ) − Σ q·s/τ, so that the logarithms of all V·B·K shares are not stored.
    """
    student = student.float() / temperature
    crops, rows, teachers = len(student), student.shape[1], len(targets)
    sizes = student.logsumexp(-1).sum(1)  # (V,)
    with torch.autocast(student.device.type, enabled=False):
        products = targets.flatten(1) @ student.flatten(1).T  # (2, V)
    different = 1 - torch.eye(teachers, crops, device=student.device)
    return ((sizes - products) * different).sum() / (rows * different.sum())


def rename_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file under the names of a task; empty if the file has no head to continue with."""
    if "heads.head.mlp.0.weight" in tensors:  # a checkpoint of a run
        return dict(tensors)
    renamed = dict[str, Tensor]()
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        rest = rest.removeprefix("module.")
        if part in ("student", "teacher"):
            inner = rest if rest.partition(".")[0] in HEADS else f"backbone.{rest.removeprefix('backbone.')}"
            prefix = "teacher." if part == "teacher" else "" if inner.startswith("backbone.") else "heads."
            renamed[prefix + inner] = tensor
        elif part == "dino_loss":
            renamed |= {f"centres.{head}.value": tensor.flatten() for head, center in HEADS.items() if rest == center}
    return renamed if "heads.head.mlp.0.weight" in renamed else {}


def select_fitting_tensors(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a task has too; an error if one has another shape."""
    for name, tensor in given.items():
        if name not in expected:
            if name.startswith(("heads.head.", "teacher.head.")):
                raise CheckpointError(f"the file has {name}; expected a head of linear layers without batch norm")
            continue
        if tensor.shape == expected[name].shape:
            continue
        setting = next((each for end, each in SETTINGS_BY_SHAPE.items() if name.endswith(end)), None)
        if setting is not None and len(tensor) != len(expected[name]):
            raise ConfigError(
                f"`{setting}` is {len(expected[name])}, but the head in the file has {len(tensor)}; use `{setting}` "
                f"{len(tensor)}",
                fields=(setting,),
            )
        raise CheckpointError(
            f"{name} in the file has the shape {tuple(tensor.shape)}; expected {tuple(expected[name].shape)}: use the "
            "model and the image size of the file"
        )
    return {name: tensor for name, tensor in given.items() if name in expected}


def describe_loaded_parts(loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """What was loaded completely, and what was not: 'student, teacher, head, center; new: head_dense'."""
    groups = {"student": "backbone.", "teacher": "teacher.backbone."}
    if not any(name.startswith("backbone.") for name in loaded):  # of a run: its model is the teacher's
        del groups["student"]
    for head in HEADS:
        groups |= {
            head: f"heads.{head}.",
            f"{head} of the teacher": f"teacher.{head}.",
            f"center of {head}": f"centres.{head}.",
        }
    present = {group: prefix for group, prefix in groups.items() if any(name.startswith(prefix) for name in expected)}
    complete = {
        group: all(name in loaded for name in expected if name.startswith(prefix)) for group, prefix in present.items()
    }
    missing = [group for group in complete if not complete[group]]
    found = ", ".join(group for group in complete if complete[group])
    return f"{found}; new: {', '.join(missing)}" if missing else found
