"""Classification: cross-entropy with label smoothing, Mixup and CutMix, or a custom objective."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.batch import Batch
from vitrail.data.images.augment.augmentations import mixup_or_cutmix, random_erase
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.rng import make_view_keys
from vitrail.distributed import Ranks
from vitrail.evaluation.evaluate import evaluate
from vitrail.evaluation.metrics import Evaluation
from vitrail.models.base.contract import ImageModel
from vitrail.recipes.recipe import LoopSettings, Recipe
from vitrail.recipes.schedule import Clock
from vitrail.tasks.image_task import ImageTask, build_image_task, check_image_source
from vitrail.tasks.metric import CLASSIFICATION_METRICS
from vitrail.tasks.task import Source, TaskKind

BATCH_MIXING_KEY = 2**31 - 1  # in place of an image index in the random key for mixing a batch


@dataclass(frozen=True)
class LossInputs:
    """A batch as the model receives it: after normalization, random erasing and mixing."""

    images: Tensor  # float (B, C, H, W)
    targets: Tensor  # (B, classes), rows sum to 1; include label smoothing, Mixup and CutMix
    labels: Tensor  # int64 (B,), before mixing
    indices: Tensor  # int64 (B,), positions in the data set


Objective = Callable[[nn.Module, LossInputs], tuple[Tensor, Mapping[str, Tensor]]]


def classification_loss(model: nn.Module, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Cross-entropy −Σ targets·log softmax(logits), averaged over the batch."""
    logits = model(inputs.images).float()  # the softmax of the loss, whatever the precision of the model
    hits = logits.detach().argmax(-1) == inputs.targets.argmax(-1)
    return F.cross_entropy(logits, inputs.targets), {"accuracy": hits.float().mean()}


class Classification(ImageTask):
    """Train a model that returns logits on labeled images.

    `objective` is a function (model, inputs) → (loss, metrics) that replaces the cross-entropy.
    """

    metrics = CLASSIFICATION_METRICS

    def __init__(self, model: nn.Module, objective: Objective | None = None) -> None:
        super().__init__()
        self.backbone = model
        self.objective: Objective = objective or classification_loss
        self.not_copied = (self.objective,)
        self.classes, self.augmentation, self.loop = 0, Augmentation(), LoopSettings()

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        data, model, loop = check_image_source(source, self).data, self.backbone, recipe.loop
        config = model.config
        if len(data.classes) < 2:
            only = ", ".join(data.classes)
            raise DataError(f"{data.name} has one class ({only}); expected at least two, each in its own folder")
        if config.classes != len(data.classes):
            raise ConfigError(
                f"a model of {config.classes} classes; expected {len(data.classes)}, as many as {data.name} has"
            )
        if isinstance(model, ImageModel) and vars(config).get("answer", "both") != "both":
            raise ConfigError(f"answer is {config.answer!r}; expected 'both' in training, so that both heads learn")
        super().check(source, recipe, ranks)
        if loop.early_size and not (isinstance(model, ImageModel) and model.sizes.dynamic):
            raise ConfigError(
                f"`early_size` is {loop.early_size}; expected 0, or a dynamic model: `fields` dynamic=true"
            )
        check_even_batches_for_mixing(recipe, ranks)

    def setup(self, source: Source, recipe: Recipe) -> None:
        super().setup(source, recipe)
        images = check_image_source(source, self)
        self.classes, self.augmentation, self.loop = len(images.data.classes), recipe.augmentation, recipe.loop

    @property
    def early_share(self) -> float:
        return self.loop.early_share if self.loop.early_size else 0.0

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.objective(self.backbone, self.prepare_inputs(batch, clock))

    def prepare_inputs(self, batch: Batch, clock: Clock) -> LossInputs:
        """Normalize, erase and mix. Random choices depend on the seed and the step alone."""
        images, labels = self.normalize(batch["images"]), batch["labels"]
        if clock.step < self.early_share * clock.steps:
            rows, columns = images.shape[-2:]
            side = self.loop.early_size
            images = F.interpolate(images, (side, side * columns // rows), mode="bilinear", antialias=True)
        if self.augmentation.erase:
            images = random_erase(images, batch.keys["images"], self.augmentation.erase)
        key = int(make_view_keys(self.loop.seed, clock.step, BATCH_MIXING_KEY, 0)[0])
        images, targets = mixup_or_cutmix(images, labels, self.classes, self.augmentation, key)
        return LossInputs(images, targets, labels, batch["indices"])

    def evaluate(
        self,
        source: Source,
        clock: Clock,  # noqa: ARG002  # the same at every step
        *,
        batch: int,
        workers: int = 0,
        device: torch.device,
        limit: int | None = None,
    ) -> Evaluation:
        images = check_image_source(source, self)
        dataset = images.select_validation_images(limit)
        assert dataset is not None
        return evaluate(
            self.backbone,
            dataset,
            images.preprocessing,
            batch=batch,
            workers=workers,
            device=device,
            progress=False,  # training has its own bar
            ranks=self.ranks,
        )


def check_even_batches_for_mixing(recipe: Recipe, ranks: Ranks) -> None:
    batch, parts = recipe.loop.batch, ranks.world_size * recipe.loop.accumulate
    mixing = recipe.augmentation.mixup or recipe.augmentation.cutmix
    if mixing and batch // parts % 2 and (parts > 1 or batch == 1):
        raise ConfigError(
            f"`batch` {batch} over {ranks.world_size} processes of {recipe.loop.accumulate} micro-batches, with Mixup "
            "or CutMix; expected parts of an even size, since images are mixed in pairs"
        )


TASK = TaskKind(
    name="classification",
    settings=None,
    build=lambda request, context: build_image_task(request, context, Classification),
)
