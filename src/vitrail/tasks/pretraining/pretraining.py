"""What tasks without labels share: a model without a head, its features, and how these are evaluated."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoint.files.raw_contents import read_raw_contents
from vitrail.checkpoint.model_location import locate_or_download_checkpoint
from vitrail.checkpoint.run_files import CHECKPOINTS_FOLDER, is_run_folder
from vitrail.data.datasets import DatasetSubset, ImageDataset
from vitrail.data.loader import evaluation_batches
from vitrail.distributed import Ranks
from vitrail.errors import ConfigError
from vitrail.evaluation.knn import classify_by_neighbours
from vitrail.evaluation.representation import MAX_RANK_FEATURES, effective_rank, feature_spread
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import Clock
from vitrail.tasks.collapse import SPREAD_SIGN, CollapseSign
from vitrail.tasks.image_source import ImageSource
from vitrail.tasks.image_task import ImageTask, as_image_source, build_image_task
from vitrail.tasks.metric import LOSS_METRIC, Metric
from vitrail.tasks.task import BuildContext, MeanMetrics, Source, Task, TaskSetup

KNN_METRIC = Metric(name="knn", label="k-NN", is_share=True, quantity="accuracy")
SPREAD_METRIC = Metric(name="spread", label="spread of the features")
RANK_METRIC = Metric(name="effective_rank", label="effective rank of the features")
MAX_BANK_IMAGES, MAX_QUERY_IMAGES = 4000, 2000  # of the k-NN during training; `vitrail probe` uses all images
NEIGHBOURS = 20
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
        super().check(source, recipe, ranks)

    def features(self, images: Tensor) -> Tensor:
        """The pooled features of normalised images, which probes use: (B, C, H, W) → (B, D)."""
        return self.result(images)

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
        found = super().evaluate(source, clock, batch=batch, workers=workers, device=device, limit=limit)
        assert isinstance(found, MeanMetrics)
        measured = self.measure_features(as_image_source(source, self), batch, workers, device, limit)
        return replace(found, metrics={**found.metrics, **measured})

    def measure_features(
        self, source: ImageSource, batch: int, workers: int, device: torch.device, limit: int | None
    ) -> dict[str, float]:
        """Spread, rank and, with classes, k-NN accuracy of the features of validation images."""
        most = MAX_QUERY_IMAGES if limit is None else min(limit, MAX_QUERY_IMAGES)
        assert source.data.val is not None
        queries, labels = self.compute_features(source, source.data.val, most, batch, workers, device)
        measured = {
            "spread": float(feature_spread(queries)),
            "effective_rank": effective_rank(queries[:MAX_RANK_FEATURES]),
        }
        if source.data.classes:
            most = MAX_BANK_IMAGES if limit is None else min(limit, MAX_BANK_IMAGES)
            bank, known = self.compute_features(source, source.train_images, most, batch, workers, device)
            votes = classify_by_neighbours(bank, known, queries, counts=(NEIGHBOURS,))[NEIGHBOURS]
            measured["knn"] = float((votes == labels).float().mean())
        return measured

    def compute_features(
        self, source: ImageSource, dataset: ImageDataset, most: int, batch: int, workers: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Features and labels of at most `most` images, evenly spaced; the processes share the work."""
        places = np.linspace(0, len(dataset) - 1, min(most, len(dataset))).astype(np.int64)
        batches = evaluation_batches(
            DatasetSubset(dataset, places),
            source.preprocessing,
            batch=batch,
            workers=workers,
            rank=self.ranks.rank,
            world=self.ranks.world_size,
        )
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        parts = [
            (self.features(self.normalise(each["images"].to(device))).float().cpu(), each["labels"])
            for each in batches
            if each.size
        ]
        for module, mode in modes:
            module.training = mode
        gathered = [part for share in self.ranks.all_gather_objects(parts) for part in share]
        return torch.cat([features for features, _ in gathered]), torch.cat([labels for _, labels in gathered])

    def load_parts(self, tensors: Mapping[str, Tensor]) -> str:  # noqa: ARG002  # for subclasses
        """Load everything but the backbone from the tensors of a checkpoint file in the authors' layout.

        Returns what was loaded, or an empty string if the file has only the backbone.
        """
        return ""


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
            context.report(f"note   {init} has only the backbone; the other weights of the task are new")
        return task

    return build_image_task(request, context, make_task_with_parts)


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
