"""Your own task is one class. This one predicts by how many quarter turns an image was rotated (Gidaris 2018).

    python examples/own_task.py                                # a few seconds on two cores
    torchrun --nproc-per-node 2 examples/own_task.py           # the same images and weights, on two processes

It needs no labels. Resuming, EMA, mixed precision, logs, curves and several GPUs come with `vitrail.fit`.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from vitrail.data.batch import Batch
from vitrail.distributed import join_process_group
from vitrail.recipes.schedule import Clock
from vitrail.tasks.image_task import ImageTask
from vitrail.tasks.metric import Metric


class RotationPrediction(ImageTask):
    metrics = (Metric(name="accuracy", label="accuracy", is_share=True),)  # of an evaluation: the first one counts

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone = backbone  # what is saved: layer decay, freezing and Muon apply to it
        self.head = nn.Linear(width, 4)  # trained with it, in every checkpoint, but not in the saved model

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: ARG002
        # each image has a random key; torch's generator would give other turns to two processes and to a resumed run
        turns = torch.from_numpy((batch.keys["images"] % 4).astype(int))
        rotated = [image.rot90(int(turn), (-2, -1)) for image, turn in zip(batch["images"], turns, strict=True)]
        images = self.normalize(torch.stack(rotated))  # uint8 pixels → the model's input, (B, C, H, W)
        turns = turns.to(images.device)
        logits = self.head(self.backbone(images))  # (B, 4)
        return F.cross_entropy(logits, turns), {"accuracy": (logits.argmax(-1) == turns).float().mean()}


def main(epochs: float = 3.0) -> None:
    torch.manual_seed(0)
    recipe = vitrail.open_recipe("fashion").with_settings({"epochs": epochs})
    backbone = vitrail.create("ViT-Ti/16", channels=1, classes=0, **recipe.fields)  # 0 classes: no head
    task = RotationPrediction(backbone, width=backbone.config.width)
    with join_process_group() as ranks:  # a single process, or those of torchrun
        # the run is resumed if you stop this script and start it again; its folder has a log and checkpoints
        result = vitrail.fit(task, "fashion", recipe, run="runs/rotation", ranks=ranks)
    if ranks.is_first:
        print(f"after {result.steps} steps: {result.evaluation.format_headline()}")
        # the backbone alone, to start from: vitrail train --init runs/rotation/model
        vitrail.save(result.model, "runs/rotation/model", preprocessing=task.preprocessing)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
