"""What tasks without labels share: a model without a head, its features, and how these are evaluated."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import ConfigError, DataError
from vitrail.checkpoint.model_location import locate_or_download_checkpoint
from vitrail.checkpoint.run_files import CHECKPOINTS_FOLDER, is_run_folder
from vitrail.checkpoint.weight_files import read_raw_contents
from vitrail.data.batch import Batch
from vitrail.data.images.datasets import DatasetSubset, ImageDataset
from vitrail.data.images.loader import evaluation_batches
from vitrail.distributed import Ranks
from vitrail.evaluation.evaluate import temporary_eval_mode
from vitrail.evaluation.probes.feature_measures import (
    MAX_RANK_FEATURES,
    classify_by_neighbors,
    effective_rank,
    feature_spread,
)
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import Clock
from vitrail.tasks.image_source import ImageSource
from vitrail.tasks.image_task import ImageTask, build_image_task, check_image_source
from vitrail.tasks.metric import LOSS_METRIC, SPREAD_SIGN, CollapseSign, Metric
from vitrail.tasks.task import BuildContext, MeanMetrics, Source, Task, TaskKind, TaskSetup, parse_task_settings

KNN_METRIC = Metric(name="knn", label="k-NN", is_share=True, quantity="accuracy")
SPREAD_METRIC = Metric(name="spread", label="spread of the features")
RANK_METRIC = Metric(name="effective_rank", label="effective rank of the features")
MAX_BANK_IMAGES, MAX_QUERY_IMAGES = 4000, 2000  # of the k-NN during training; `vitrail probe` uses all images
NEIGHBORS = 20
FIGURE_IMAGES = 8
TRAINING_PARTS = ("student", "teacher", "dino_loss")  # in the files of DINO and EsViT


class Pretraining(ImageTask):
    """A task on images without labels. An evaluation adds the spread and rank of the features to the metrics of
    `forward`, and the accuracy of k-NN if the data has classes.
    """

    metrics = (LOSS_METRIC, KNN_METRIC, SPREAD_METRIC, RANK_METRIC)
    collapse_signs: ClassVar[tuple[CollapseSign, ...]] = (SPREAD_SIGN,)

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        if self.backbone.config.classes:
            raise ConfigError(
                f"a model of {self.backbone.config.classes} classes; expected 0 for {type(self).__name__}, which "
                "trains a model without a head"
            )
        if recipe.loop.early_size:
            raise ConfigError(
                f"`early_size` is {recipe.loop.early_size}; expected 0, since {type(self).__name__} has images of one "
                "size",
                fields=("early_size",),
            )
        super().check(source, recipe, ranks)

    def features(self, images: Tensor) -> Tensor:
        """The pooled features of normalized images, which probes use: (B, C, H, W) → (B, D)."""
        return self.result(images)

    @property
    def compared_ranks(self) -> Ranks:
        """The processes whose examples are compared: all of them in training, only this one in an evaluation, in which
        processes may have different numbers of batches.
        """
        return self.ranks if self.training else Ranks()

    def measure_spread(self, features: Tensor) -> Tensor:
        """The spread of the features (B, D) of a micro-batch, over the compared processes."""
        return feature_spread(features, self.compared_ranks)

    @torch.no_grad()
    def evaluate(
        self,
        source: Source,
        clock: Clock,
        *,
        batch: int,
        workers: int = 0,
        device: torch.device,
        limit: int | None = None,
    ) -> MeanMetrics:
        """Metrics of `forward`, and those of the features. With a `baseline_loss`, the relative loss is the ratio of
        the two means, not the mean of the ratios.
        """
        found = super().evaluate(source, clock, batch=batch, workers=workers, device=device, limit=limit)
        assert isinstance(found, MeanMetrics)
        if not found.examples and source.validation_count and limit is None:
            reason = f", for instance: {found.skipped[0]}" if found.skipped else ""
            raise DataError(f"none of {source.validation_count} validation images can be read{reason}")
        measured = self.measure_features(check_image_source(source, self), batch, workers, device, limit)
        if "baseline_loss" in found.metrics:
            measured["relative_loss"] = found.metrics["loss"] / found.metrics["baseline_loss"]
        return replace(found, metrics={**found.metrics, **measured})

    def measure_features(
        self, source: ImageSource, batch: int, workers: int, device: torch.device, limit: int | None
    ) -> dict[str, float]:
        """Spread, rank and, with classes, k-NN accuracy of the features of validation images; empty without any.

        With a `limit`, the same share of all images is used, so that its time tells that of a complete evaluation.
        """
        if not source.data.val:
            return {}
        share = 1.0 if limit is None else min(limit / len(source.data.val), 1.0)
        most = ceil(share * min(MAX_QUERY_IMAGES, len(source.data.val)))
        queries, labels = self.compute_features(source, source.data.val, most, batch, workers, device)
        if not len(queries):  # none can be read
            return {}
        measured = {
            "spread": float(feature_spread(queries)),
            "effective_rank": effective_rank(queries[:MAX_RANK_FEATURES]),
        }
        if source.data.classes:
            most = ceil(share * min(MAX_BANK_IMAGES, source.example_count))
            bank, known = self.compute_features(source, source.train_images, most, batch, workers, device)
            if not len(bank):
                return measured
            votes = classify_by_neighbors(bank, known, queries, counts=(NEIGHBORS,))[NEIGHBORS]
            measured["knn"] = float((votes == labels).float().mean())
        return measured

    def compute_features(
        self, source: ImageSource, dataset: ImageDataset, most: int, batch: int, workers: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Features and labels of at most `most` images, evenly spaced; the processes share the work."""
        batches = evaluation_batches(
            take_evenly_spaced_images(dataset, most),
            source.preprocessing,
            batch=batch,
            workers=workers,
            rank=self.ranks.rank,
            world=self.ranks.world_size,
        )
        with temporary_eval_mode(self):
            parts = [
                (self.features(self.normalize(each["images"].to(device))).float().cpu(), each["labels"])
                for each in batches
                if each.size
            ]
        gathered = [part for share in self.ranks.all_gather_objects(parts) for part in share]
        if not gathered:
            return torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)
        return torch.cat([features for features, _ in gathered]), torch.cat([labels for _, labels in gathered])

    def load_figure_images(self, source: Source, device: torch.device, count: int = FIGURE_IMAGES) -> Batch:
        """Evenly spaced validation images for a figure, or training images if there are none; unreadable ones are left
        out.
        """
        images = check_image_source(source, self)
        chosen = take_evenly_spaced_images(images.data.val or images.train_images, count)
        return next(iter(evaluation_batches(chosen, images.preprocessing))).to(device)

    def load_parts(self, tensors: Mapping[str, Tensor]) -> str:  # noqa: ARG002  # for subclasses
        """Load everything but the backbone from the tensors of a checkpoint file in the authors' layout.

        Returns what was loaded, or an empty string if the file has only the backbone.
        """
        return ""


def make_relative_loss_metric(baseline: str) -> Metric:
    """The loss divided by that of a trivial prediction."""
    label = f"loss relative to {baseline}"
    return Metric(name="relative_loss", label=label, higher_is_better=False, quantity="relative loss")


def take_evenly_spaced_images(dataset: ImageDataset, most: int) -> DatasetSubset:
    """At most `most` images, from the first to the last one."""
    return DatasetSubset(dataset, np.linspace(0, len(dataset) - 1, min(most, len(dataset))).astype(np.int64))


def build_pretraining(request: Request, context: BuildContext, make_task: Callable[[Any], Pretraining]) -> TaskSetup:
    """A task without labels, from a request; parts besides the backbone are loaded if `init` has them."""
    if request.init is None:
        return build_image_task(request, context, make_task)
    tensors, init = read_part_tensors(request.init), request.init

    def make_task_with_parts(model: Any) -> Task:
        task = make_task(model)
        loaded = task.load_parts(tensors)
        others = any(not name.startswith("backbone.") for name, _ in task.named_parameters())
        if loaded:
            context.report(f"note   also from {init}: {loaded}")
        elif others:
            context.report(f"note   only the backbone of {init} is used; the other weights of the task are new")
        return task

    return build_image_task(request, context, make_task_with_parts)


def make_pretraining_kind(name: str, settings: type[Any], task: Callable[[Any, Any], Pretraining]) -> TaskKind:
    """The kind of a task without labels that is made of a model and its settings."""

    def build(request: Request, context: BuildContext) -> TaskSetup:
        given = parse_task_settings(kind, request.recipe)
        return build_pretraining(request, context, lambda model: task(model, given))

    kind = TaskKind(name=name, settings=settings, build=build, needs_classes=False)
    return kind


def read_part_tensors(init: str) -> dict[str, Tensor]:
    """The tensors of a file by the names that they have in it; of a run, those of its task but the backbone."""
    path = locate_or_download_checkpoint(init)
    if not is_run_folder(path):
        return read_raw_contents(path, parts=TRAINING_PARTS).tensors
    checkpoints = sorted((path / CHECKPOINTS_FOLDER).glob("step-*.safetensors"))
    state = read_raw_contents(checkpoints[-1]).tensors if checkpoints else {}
    averaged = any(name.startswith("average/") for name in state)  # with `ema`, as the model of the run
    prefix = "average/task." if averaged else "model/task."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
