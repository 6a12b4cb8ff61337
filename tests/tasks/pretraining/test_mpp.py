"""Masked patch prediction: shares of the corruption, classes of colors, the three targets, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.toy_task import RECIPE, make_backbone, make_data
from torch import Tensor

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.data.batch import Batch
from vitrail.data.rng import make_view_keys
from vitrail.distributed import Ranks
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import MppSettings
from vitrail.tasks.image_task import open_image_source
from vitrail.tasks.pretraining.mpp import Mpp, classify_colors, draw_corruption
from vitrail.tasks.pretraining.parts.masked_prediction import split_into_patches

CLOCK = Clock(step=0, steps=1, steps_per_epoch=1)
KEYS = make_view_keys(0, 0, np.arange(200), 0)


def make_task(settings: MppSettings | None = None, **fields: Any) -> Mpp:
    torch.manual_seed(0)
    return Mpp(make_backbone(**fields), settings)


def set_up(task: Mpp) -> Any:
    source = open_image_source(task, make_data(), RECIPE)
    task.check(source, RECIPE, Ranks())
    task.setup(source, RECIPE)
    return source


def classify_color(*color: int, patch: int = 4) -> list[int]:
    """The classes of an image of one color, of one patch."""
    image = torch.tensor(color, dtype=torch.uint8)[None, :, None, None].expand(-1, -1, patch, patch) / 255
    return classify_colors(split_into_patches(image, (patch, patch)), (patch, patch), 1).flatten().tolist()


def test_half_of_the_patches_are_corrupted_in_these_shares() -> None:
    found = draw_corruption(KEYS, 64, MppSettings())
    assert found.corrupted.shape == (200, 32)
    chosen = torch.zeros(200, 64, dtype=torch.bool).scatter_(1, found.corrupted, value=True)
    assert (chosen.sum(1) == 32).all()
    swapped = found.sources != torch.arange(64)
    assert not (swapped & found.masked).any()
    assert not ((swapped | found.masked) & ~chosen).any(), "other patches stay"
    shares = [float(each.sum()) / 6400 for each in (found.masked, swapped, chosen & ~found.masked & ~swapped)]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.015)  # 3 standard deviations
    assert found.sources[swapped].unique().numel() == 64, "every patch can take the place of another"
    alone = draw_corruption(KEYS[7:8], 64, MppSettings())
    assert torch.equal(alone.corrupted, found.corrupted[7:8])
    assert torch.equal(alone.sources, found.sources[7:8])
    assert draw_corruption(KEYS, 9, MppSettings()).corrupted.shape == (200, 5), "an odd half is rounded up"


def test_masked_and_swapped_embeddings() -> None:
    """The input of the first block, without positions: the mask token, another patch, or the patch itself."""
    task = make_task(positions="none", class_token=False, pool="mean")
    found, images = draw_corruption(KEYS[:8], 4, MppSettings(mask_share=0.4, swap_share=0.4)), torch.randn(8, 3, 8, 8)
    inputs = list[Tensor]()

    def save_input(_: Any, given: Any) -> None:
        inputs.append(given[0])

    task.backbone.blocks[0].register_forward_pre_hook(save_input)
    task.predict(images, found)
    patches, _ = task.backbone.patches(images)
    for image, patch in np.ndindex(8, 4):
        origin = task.mask_token if found.masked[image, patch] else patches[image, found.sources[image, patch]]
        assert torch.equal(inputs[0][image, patch], origin)
    assert found.masked.any()
    assert (found.sources != torch.arange(4)).any()


def test_classes_of_constant_colors() -> None:
    """r + 8·g + 64·b; the bins of 8 begin at 0, 32, 64, …, 224 of 255."""
    assert classify_color(0, 0, 0) == [0]
    assert classify_color(255, 255, 255) == [511]
    assert classify_color(255, 0, 0) == [7]
    assert classify_color(0, 255, 0) == [56]
    assert classify_color(31, 32, 0) == [8]
    assert classify_color(95, 96, 224) == [2 + 8 * 3 + 64 * 7]
    assert classify_color(95) == [2]
    assert classify_color(100, patch=14) == [3]


def test_a_mean_on_an_edge_is_in_the_upper_bin() -> None:
    values = torch.tensor([255] + [0] * 7, dtype=torch.uint8).repeat(2).reshape(1, 1, 4, 4)  # mean 1/8
    for pixels, expected in ((values, 1), (values.clamp(max=254), 0)):
        assert classify_colors(split_into_patches(pixels / 255, (4, 4)), (4, 4), 1).item() == expected


def test_small_patches_are_classified_row_by_row() -> None:
    image = 0.2 + torch.arange(16, dtype=torch.float32).reshape(1, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(
        2, 3
    )
    classes = classify_colors(split_into_patches(image / 16, (8, 8)), (8, 8), 4)
    assert classes.flatten().tolist() == [each // 2 for each in range(16)]
    assert classify_colors(torch.zeros(1, 1, 14 * 14), (14, 14), 4).shape == (1, 1, 16), "14 is not a multiple of 4"


@pytest.mark.parametrize(
    ("target", "fields", "outputs"),
    [
        ("mean_color", {}, 512),
        ("mean_color", {"channels": 1}, 8),
        ("small_patch", {"positions": "relative"}, 16 * 512),
        ("pixels", {"patch_size": (4, 2), "positions": "rotary", "width": 16}, 24),
    ],
)
def test_a_zero_head_starts_at_the_loss_of_equal_probabilities(target: Any, fields: Any, outputs: int) -> None:
    task = make_task(MppSettings(target=target), **fields)
    assert task.head.out_features == outputs
    channels = task.backbone.config.channels
    task.preprocessing = vitrail.Preprocessing(image_size=8, mean=(0.5,) * channels, std=(0.5,) * channels)
    images = torch.randint(0, 256, (6, channels, 8, 8), dtype=torch.uint8)
    loss, metrics = task(Batch({"images": images}, {"images": KEYS[:6]}, 6), CLOCK)
    loss.backward()
    assert task.head.weight.grad is not None
    assert task.head.weight.grad.abs().sum() > 0
    if target == "pixels":
        assert metrics.keys() == {"relative_loss", "spread"}
        assert 0.2 < loss.item() < 0.45, "the mean square of uniform numbers is 1/3"
        return
    assert loss.item() == pytest.approx(math.log(8**channels), abs=1e-5)
    classes = classify_colors(split_into_patches(images / 255, task.patch), task.patch, task.cells or 0)
    corrupted = draw_corruption(KEYS[:6], 4, task.settings).corrupted
    zeros = (classes.gather(1, corrupted[..., None].expand(-1, -1, classes.shape[-1])) == 0).float().mean()
    assert metrics["accuracy"].item() == pytest.approx(zeros.item()), "equal logits predict class 0"


@pytest.mark.parametrize("target", ["mean_color", "pixels"])
def test_only_corrupted_patches_have_a_loss(target: Any) -> None:
    """The unchanged ones of them too."""
    task = make_task(MppSettings(target=target, mask_share=0, swap_share=0))
    torch.nn.init.normal_(task.head.weight)
    found = draw_corruption(KEYS[:5], 4, task.settings)
    tokens, predictions = task.predict(torch.randn(5, 3, 8, 8), found)
    loss, _ = task.compute_loss(predictions, torch.rand(5, 2, 48))
    (gradients,) = torch.autograd.grad(loss, tokens)
    chosen = torch.zeros(5, 4, dtype=torch.bool).scatter_(1, found.corrupted, value=True)
    assert torch.equal(gradients.abs().sum(-1) > 0, chosen)


def test_commonest_color_is_that_of_the_training_images() -> None:
    task = make_task()
    source = set_up(task)
    pixels = torch.cat([task.scale_pixels(each) for each in source.load_evenly_spaced_images(99)])
    counts = classify_colors(split_into_patches(pixels, (4, 4)), (4, 4), 1).flatten().bincount()
    assert task.commonest == int(counts.argmax())
    batch = next(iter(source.load_validation_batches(batch=24)))
    _, metrics = task(batch, CLOCK)
    assert metrics["commonest"].item() == pytest.approx(counts.max().item() / counts.sum().item(), abs=0.1)


def test_relative_loss_of_pixels_is_1_for_the_mean_color() -> None:
    task = make_task(MppSettings(target="pixels"))
    source = set_up(task)
    (images,) = source.load_evenly_spaced_images(24)
    pixels = split_into_patches(task.scale_pixels(images), (4, 4))
    mean = task.scale_pixels(images).mean((-2, -1)).repeat(1, 16)[:, None].expand_as(pixels)  # row, column, channel
    _, metrics = task.compute_loss(mean, pixels)
    assert metrics["relative_loss"].item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("target", ["mean_color", "small_patch", "pixels"])
def test_figure_shows_the_prediction_in_corrupted_patches_only(target: Any) -> None:
    task = make_task(MppSettings(target=target))
    source = set_up(task)
    (figure,) = task.draw_figures(source, torch.device("cpu"))
    arrays = figure.arrays
    assert arrays["corrupted_patches"].shape == (8, 2)
    mask = np.zeros((8, 4), bool)
    np.put_along_axis(mask, arrays["corrupted_patches"], values=True, axis=1)
    mask = mask.reshape(8, 2, 2).repeat(4, 1).repeat(4, 2)
    for version in ("corrupted", "target", "prediction"):
        assert (arrays[version] == arrays["input"])[~mask].all()
    assert not (arrays["prediction"] == arrays["input"])[mask].all()
    errors = np.abs(arrays["target"].astype(int) - arrays["input"])[mask]
    assert errors.max() <= {"mean_color": 100, "small_patch": 17, "pixels": 0}[target], "half of a bin of 32"
    if target == "small_patch":
        assert figure.to_png().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        ({"corrupt_ratio": 0.1}, {}, r"`corrupt_ratio` is 0.1, which corrupts none of 4 patches; .* 0.25"),
        ({"target": "small_patch"}, {"patch_size": 2}, "`target` is small_patch for patches of 2×2 pixels"),
        ({}, {"channels": 5}, r"`target` is mean_color for images of 5 channels, 8\^5 colors"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: Any, fields: Any, message: str) -> None:
    task = make_task(MppSettings(**settings), **fields)
    channels = task.backbone.config.channels
    preprocessing = vitrail.Preprocessing(image_size=8, mean=(0.5,) * channels, std=(0.5,) * channels)
    with pytest.raises(ConfigError, match=message):
        task.check(open_image_source(task, make_data(), RECIPE, preprocessing), RECIPE, Ranks())


def test_shares_have_a_sum_of_at_most_1() -> None:
    with pytest.raises(ConfigError, match=r"`mask_share` 0.8 and `swap_share` 0.3; .* at most 1"):
        MppSettings(swap_share=0.3)
    task = Mpp(vitrail.create("cct_cpu_32", image_size=16, classes=0))
    with pytest.raises(ConfigError, match="masked patch prediction needs patches that can be masked"):
        task.check(open_image_source(task, make_data(), RECIPE), RECIPE, Ranks())
