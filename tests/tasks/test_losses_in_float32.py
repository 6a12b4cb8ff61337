"""Under autocast to bfloat16, losses are computed in float32 from what the model returns."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from vitrail.distributed import Ranks
from vitrail.tasks.classification import LossInputs, classification_loss
from vitrail.tasks.distillation import DistillationLoss
from vitrail.tasks.pretraining.byol import compare_with_targets
from vitrail.tasks.pretraining.parts.self_distillation import cross_entropy_between_crops
from vitrail.tasks.pretraining.simclr import contrast
from vitrail.tasks.translation import compute_token_loss

INPUTS = LossInputs(torch.zeros(4, 3), torch.eye(8)[:4], torch.arange(4), torch.arange(4))


def distil(outputs: Tensor, kind: Literal["hard", "soft"]) -> Tensor:
    loss = DistillationLoss(
        teacher_logits=lambda _: outputs.flip(0),
        kind=kind,
        weight=0.5,
        temperature=3.0,
        uses_distillation_token=False,
    )
    return loss(lambda _: outputs, INPUTS)[0]  # pyright: ignore[reportUnknownLambdaType]


def compare_crops(outputs: Tensor) -> Tensor:
    return cross_entropy_between_crops(outputs, outputs.float().softmax(-1), 0.1)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "classification": lambda x: classification_loss(lambda _: x, INPUTS)[0],  # pyright: ignore
    "hard distillation": lambda x: distil(x, "hard"),
    "soft distillation": lambda x: distil(x, "soft"),
    "tokens": lambda x: compute_token_loss(x[None], torch.arange(4)[None], torch.ones(()), pad=0, smoothing=0.1)[0],
    "simclr": lambda x: contrast(x, 0.2, Ranks())[0],
    "crops": lambda x: compare_crops(x.unflatten(0, (2, 2))),
    "byol": lambda x: compare_with_targets([x, x.flip(0)], [x.roll(1, 0), x])[0],
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_that_of_float32(name: str) -> None:
    outputs = (5 * torch.randn(4, 8)).bfloat16()
    expected = LOSSES[name](outputs.float())
    with torch.autocast("cpu", torch.bfloat16):
        found = LOSSES[name](outputs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
