"""SimCLR (Chen 2020, arXiv 2002.05709): find the other view of an image among all views of the batch.

N images of a batch, over all processes; 2N views; z a projection, τ a temperature.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.images.augment.views import View
from vitrail.distributed import Ranks
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import SimClrSettings
from vitrail.tasks.metric import SPREAD_SIGN, CollapseSign, Metric
from vitrail.tasks.pretraining.parts.projection_heads import make_contrastive_projector
from vitrail.tasks.pretraining.parts.views import TwoViewTask, make_view_augmentation
from vitrail.tasks.pretraining.pretraining import Pretraining, make_pretraining_kind, make_relative_loss_metric
from vitrail.tasks.task import MeanMetrics, Source

JITTER = (0.8, 0.8, 0.8, 0.2)  # of brightness, contrast, saturation and hue
MAX_RELATIVE_LOSS = 0.999
POSITIVE_FIRST_METRIC = Metric(name="positive_first", label="other view found first", is_share=True)
RELATIVE_LOSS_METRIC = make_relative_loss_metric("equal projections")


class SimClr(TwoViewTask):
    """Both views of an image get similar projections, views of different images dissimilar ones.

    The negatives are the views of all processes, and the projector's batch norms use all of them, so that the loss
    does not depend on the number of processes.
    """

    metrics = (*Pretraining.metrics, POSITIVE_FIRST_METRIC, RELATIVE_LOSS_METRIC)
    shares = ("positive_first",)
    collapse_signs = (
        SPREAD_SIGN,
        CollapseSign(
            metric="relative_loss",
            above=MAX_RELATIVE_LOSS,
            meaning="the loss is that of equal projections, so the two views of an image are not recognized",
            remedy="lower `lr`, use a longer `warmup`, or a lower `loss_temperature`",
            steps=50,  # projections of random weights are worse than equal ones
        ),
    )
    no_accumulation_reason = (
        "the views of an image are compared with those of its micro-batch only; use a smaller `batch`"
    )

    def __init__(self, backbone: Any, settings: SimClrSettings | None = None) -> None:
        settings = settings or SimClrSettings()
        super().__init__(backbone, settings)
        self.settings, width = settings, self.feature_width
        augmentation = make_view_augmentation(settings, JITTER, area=settings.area, blur=settings.blur)
        self.views = {"views": View(augmentation, settings.view_size, 2)}
        self.collected: list[tuple[Tensor, Tensor]] | None = None  # indices and projections (2, B, d) of an evaluation
        self.projector = make_contrastive_projector(
            width, settings.projector_width or width, settings.projection_width, settings.projector_depth
        )

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:  # noqa: ARG002
        features = self.backbone(self.normalize(batch["views"].flatten(0, 1)))  # (2B, D), all first views first
        projections = self.projector(features)
        if self.collected is not None:
            self.collected.append((batch["indices"].cpu(), projections.unflatten(0, (2, -1)).cpu()))
        loss, metrics = contrast(projections, self.settings.loss_temperature, self.compared_ranks)
        return loss, {**metrics, "spread": self.measure_spread(features)}

    @torch.no_grad()
    def evaluate(self, source: Source, clock: Clock, *, batch: int, **options: Any) -> MeanMetrics:
        self.collected = []
        try:
            found = super().evaluate(source, clock, batch=batch, **options)
            collected = [part for parts in self.ranks.all_gather_objects(self.collected) for part in parts]
        finally:
            self.collected = None
        metrics = self.contrast_in_batches(collected, batch * self.ranks.world_size) if collected else {}
        return replace(found, metrics={**found.metrics, **metrics})

    def contrast_in_batches(self, collected: list[tuple[Tensor, Tensor]], batch: int) -> dict[str, float]:
        """Loss and metrics, averaged over complete batches of validation images in order, as a single process has."""
        order = torch.cat([indices for indices, _ in collected]).argsort()
        projections = torch.cat([part for _, part in collected], 1)[:, order]  # (2, images, d)
        count = max(projections.shape[1] // batch, 1)
        parts = [projections[:, batch * i : batch * (i + 1)].flatten(0, 1) for i in range(count)]
        found = [contrast(part, self.settings.loss_temperature, Ranks()) for part in parts]
        values = [{"loss": loss, **metrics} for loss, metrics in found]
        return {name: float(sum(each[name] for each in values) / count) for name in values[0]}


def contrast(projections: Tensor, temperature: float, ranks: Ranks) -> tuple[Tensor, dict[str, Tensor]]:
    """NT-Xent and its metrics, of projections (2B, d) whose row i + B is the other view of row i.

    The loss is the cross-entropy of finding the other view among the 2N − 1 views that are not the view itself, by
    z·z′/τ, averaged over the 2B views. The authors' code has twice this value: it adds the means of the two halves.
    """
    own = F.normalize(projections.float(), dim=-1)
    every = own if ranks.world_size == 1 else ranks.gather_with_gradient(own)  # the processes have equally many
    rows, first = torch.arange(len(own), device=own.device), ranks.rank * len(own)
    with torch.autocast(own.device.type, enabled=False):
        logits = own @ every.T / temperature
    logits = logits.index_put((rows, rows + first), logits.new_tensor(-torch.inf))
    others = rows.roll(len(own) // 2) + first
    loss = F.cross_entropy(logits, others)
    found = (logits.detach().argmax(-1) == others).float().mean()
    return loss, {"positive_first": found, "relative_loss": loss.detach() / log(max(len(every) - 1, 2))}


TASK = make_pretraining_kind("simclr", SimClrSettings, SimClr)
