"""Pre-training by autoregressive prediction of patches: masks, loss, figures, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from support.pretraining_cases import AIM, CASES
from support.toy_task import RECIPE, make_backbone, make_data
from torch import Tensor

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.distributed import Ranks
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import AimSettings
from vitrail.tasks.image_task import open_image_source
from vitrail.tasks.pretraining.aim import AutoregressiveImageModel, share_predicted_patches
from vitrail.tasks.pretraining.parts.masked_prediction import normalize_patches, split_into_patches

CLOCK = Clock(step=0, steps=10, steps_per_epoch=5)
KEYS = np.arange(500, dtype=np.uint64)


def make_task(settings: AimSettings = AIM, **fields: Any) -> AutoregressiveImageModel:
    """Images of 8×8 pixels in 16 patches."""
    backbone = make_backbone(patch_size=2, **{**CASES["aim"].fields, **fields})
    return AutoregressiveImageModel(backbone, settings).eval()


def find_reached_patches(task: AutoregressiveImageModel, patch: int, prefix: int) -> Tensor:
    """Which patches the prediction of the patch after `patch` depends on."""
    images = torch.randn(1, 3, 8, 8, requires_grad=True)
    predicted = task.head(task.encode(images, torch.tensor([prefix])))
    (gradient,) = torch.autograd.grad(predicted[0, patch].square().sum(), images)
    return split_into_patches(gradient, (2, 2))[0].abs().sum(-1) > 0


@pytest.mark.parametrize("positions", ["learned", "sincos_2d", "relative", "rotary"])
def test_a_prediction_depends_on_earlier_patches_only(positions: str) -> None:
    task = make_task(positions=positions, width=16)
    for patch, prefix in ((0, 1), (6, 1), (15, 1), (6, 4), (2, 4), (0, 9)):
        assert find_reached_patches(task, patch, prefix).tolist() == [n <= max(patch, prefix - 1) for n in range(16)]
    without = make_task(AimSettings(head_depth=1, head_width=8, prefix_attention=False))
    assert find_reached_patches(without, 2, 9).tolist() == [n <= 2 for n in range(16)]


def test_without_a_mask_blocks_do_what_they_did() -> None:
    task, images = make_task(), torch.randn(2, 3, 8, 8)
    x, grid = task.backbone.embed(images)
    torch.testing.assert_close(task.backbone.run(x, grid), task.backbone.run(x, grid, mask=None), atol=0, rtol=0)
    everything = torch.ones(16, 16, dtype=torch.bool)
    torch.testing.assert_close(task.backbone.run(x, grid), task.backbone.run(x, grid, mask=everything))
    expected = task.encode(images, torch.tensor([3, 5]))
    for block in task.backbone.blocks:
        block.recompute = True
    torch.testing.assert_close(task.encode(images, torch.tensor([3, 5])), expected)


def test_prefixes_are_functions_of_the_keys() -> None:
    found = make_task().draw_prefixes(KEYS)
    assert set(found.tolist()) == set(range(1, 16))
    assert torch.equal(found[7:9], make_task().draw_prefixes(KEYS[7:9]))
    assert (make_task(AimSettings(head_depth=1, head_width=8, prefix_attention=False)).draw_prefixes(KEYS) == 1).all()


def test_the_loss_is_the_error_of_the_patches_after_the_prefix() -> None:
    task = make_task()
    prepared = Preprocessing(image_size=8, mean=(0.5,) * 3, std=(0.5,) * 3)
    source = open_image_source(task, make_data(), RECIPE, prepared)
    task.setup(source, RECIPE)
    batch = next(iter(source.load_batches(range(1))))
    loss, metrics = task(batch, CLOCK)
    images, prefixes = task.normalize(batch["images"]), task.draw_prefixes(batch.keys["images"])
    predicted = task.head(task.encode(images, prefixes))
    targets = normalize_patches(split_into_patches(images, (2, 2)))
    rows = [
        (predicted[n, prefix - 1 : -1] - targets[n, prefix:]).square().mean()
        for n, prefix in enumerate(prefixes.tolist())
    ]
    torch.testing.assert_close(loss, torch.stack(rows).mean())
    torch.testing.assert_close(metrics["relative_loss"], loss.detach() / metrics["baseline_loss"])
    assert float(metrics["baseline_loss"]) == pytest.approx(11 / 12, abs=1e-3)  # of 2×2×3 numbers, unbiased variance
    torch.testing.assert_close(
        share_predicted_patches(torch.tensor([1, 3]), 4), torch.tensor([[1 / 3, 1 / 3, 1 / 3], [0, 0, 1]])
    )


def test_the_figure_shows_each_patch_predicted() -> None:
    task = make_task(AimSettings(head_depth=1, head_width=8, normalize_pixels=False))
    prepared = Preprocessing(image_size=8, mean=(0.5,) * 3, std=(0.5,) * 3)
    source = open_image_source(task, make_data(), RECIPE, prepared)
    task.setup(source, RECIPE)
    (figure,) = task.draw_figures(source, torch.device("cpu"))
    images, predicted = figure.arrays["images"], figure.arrays["predicted"]
    assert images.shape == predicted.shape == (8, 8, 8, 3)
    assert (predicted[:, :2, :2] == 0.5).all()
    inputs = torch.from_numpy(images).permute(0, 3, 1, 2) * 2 - 1
    second = task.predict_patches(inputs)[:, 0].unflatten(1, (2, 2, 3)) / 2 + 0.5
    np.testing.assert_allclose(predicted[:, :2, 2:4], second.clamp(0, 1), atol=1e-5)
    assert figure.to_png().startswith(b"\x89PNG")


def test_models_that_cannot_be_trained_so_are_refused() -> None:
    source: Any = None
    refused = {
        "this ViT has class tokens": make_backbone(),
        "register0": make_backbone(class_token=False, pool="mean", registers=2),
        "use `fields` pool=mean": make_backbone(class_token=False, pool="mean_norm"),
        "which this IGPT does not have": vitrail.create("igpt_cpu", width=8, depth=1, heads=2),
        "which this CCT does not have": vitrail.create("cct_2_3x2_32", classes=0),
        "at least 2": make_backbone(class_token=False, pool="mean", patch_size=8),
    }
    for message, backbone in refused.items():
        with pytest.raises(ConfigError, match=message):
            AutoregressiveImageModel(backbone, AIM).check(source, RECIPE, Ranks())
