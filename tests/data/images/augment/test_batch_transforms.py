"""Transforms of batches: normalisation as in evaluation; random erasing, Mixup and CutMix as in timm."""

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import mixup as theirs
from timm.data.random_erasing import RandomErasing

from vitrail.data.images.augment.batch_transforms import (
    mixup_or_cutmix,
    normalise,
    random_cutmix_box,
    random_erase,
    smooth_labels,
)
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.preprocessing import Preprocessing, preprocess_image, resize_and_crop
from vitrail.data.rng import make_view_keys


@pytest.mark.parametrize("channels", [1, 3])
def test_normalise_is_bit_identical_to_preprocess_image(channels: int) -> None:
    preprocessing = Preprocessing(
        image_size=(20, 30), mean=(0.485, 0.456, 0.406)[:channels], std=(0.229, 0.224, 0.225)[:channels]
    )
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8))
    pixels = torch.from_numpy(np.array(resize_and_crop(image, preprocessing)).reshape(20, 30, channels)).permute(
        2, 0, 1
    )
    expected = torch.from_numpy(preprocess_image(image, preprocessing))
    assert torch.equal(normalise(pixels, preprocessing), expected)
    assert torch.equal(normalise(pixels.expand(2, -1, -1, -1), preprocessing), expected.expand(2, -1, -1, -1))


def test_erasing_changes_one_rectangle_at_the_given_rate() -> None:
    images = torch.zeros(2000, 3, 24, 32)
    erased = random_erase(images, make_view_keys(0, 0, np.arange(2000), 0), 0.25)
    assert not images.any()
    hit = (erased != 0).any(1)
    assert abs(int(hit.any(-1).any(-1).sum()) - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5
    for mask in hit[hit.any(-1).any(-1)]:
        assert torch.equal(mask, mask.any(1)[:, None] & mask.any(0))  # a full rectangle
        height, width = int(mask.any(1).sum()), int(mask.any(0).sum())
        assert 0.01 < height * width / (24 * 32) < 0.36  # the sides are rounded
        assert 0.2 < height / width < 5
    noise = erased[erased != 0]
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02


def test_erased_rectangles_are_distributed_as_in_timm() -> None:
    count = 3000
    mine = (random_erase(torch.zeros(count, 1, 32, 32), make_view_keys(0, 0, np.arange(count), 0), 1.0) != 0).float()
    create: Any = RandomErasing
    other = (create(1.0, mode="pixel", device="cpu")(torch.zeros(count, 1, 32, 32)) != 0).float()
    assert (mine.mean(0) - other.mean(0)).abs().max() < 5 * (2 * 0.25 / count) ** 0.5  # how often a pixel is erased
    areas, theirs_ = mine.mean((1, 2, 3)), other.mean((1, 2, 3))
    for share in (0.1, 0.5, 0.9):
        assert abs(float(areas.quantile(share)) - float(theirs_.quantile(share))) < 0.02


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**64 - 1))
def test_erasing_depends_only_on_the_key(rows: int, columns: int, channels: int, key: int) -> None:
    images = torch.zeros(3, channels, rows, columns)
    given_keys = np.array([key, 1, 2], np.uint64)
    together = random_erase(images, given_keys, 1.0)
    assert together.shape == images.shape
    assert torch.equal(together[:1], random_erase(images[:1], given_keys[:1], 1.0))
    assert torch.equal(random_erase(images, given_keys, 0.0), images)
    assert random_erase(images.half(), given_keys, 1.0).dtype == torch.float16


def batch(count: int = 8, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(count, 3, size, size), torch.arange(count) % 5


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_label_smoothing_equals_timm(smoothing: float) -> None:
    _, labels = batch()
    mixup_target: Any = theirs.mixup_target
    expected = mixup_target(labels, 5, lam=1.0, smoothing=smoothing)
    assert torch.allclose(smooth_labels(labels, 5, smoothing), expected, atol=1e-7)
    images, labels = batch()
    mixed, targets = mixup_or_cutmix(images, labels, 5, Augmentation(smoothing=smoothing), 0)
    assert mixed is images
    assert torch.allclose(targets, expected, atol=1e-7)


def test_mixup_equals_timm_with_neighbours_mixed() -> None:
    images, labels = batch()
    partner = torch.arange(8) ^ 1
    mixup_target: Any = theirs.mixup_target
    for key in range(20):
        mixed, targets = mixup_or_cutmix(images, labels, 5, Augmentation(mixup=0.8, smoothing=0.1), key)
        kept = Random(key).betavariate(0.8, 0.8)
        assert torch.allclose(mixed, images * kept + images[partner] * (1 - kept), atol=1e-6)
        for i in range(8):  # timm mixes the first with the last
            expected = mixup_target(labels[[i, i ^ 1]], 5, lam=kept, smoothing=0.1)[0]
            assert torch.allclose(targets[i], expected, atol=1e-6)


def test_cutmix_targets_match_the_pasted_area() -> None:
    images = torch.arange(8.0)[:, None, None, None].expand(8, 3, 16, 24)
    labels = torch.arange(8)
    for key in range(50):
        mixed, targets = mixup_or_cutmix(images, labels, 8, Augmentation(cutmix=1.0), key)
        own = (mixed == images).all(1)
        assert ((mixed == images) | (mixed == images[torch.arange(8) ^ 1])).all()
        pasted = ~own[0]
        assert torch.equal(pasted, pasted.any(1)[:, None] & pasted.any(0))
        kept = own.float().mean((1, 2))
        assert torch.allclose(targets.diagonal(), kept, atol=1e-6)
        assert torch.allclose(targets[torch.arange(8), torch.arange(8) ^ 1], 1 - kept, atol=1e-6)
    assert torch.equal(images[:, 0, 0, 0], torch.arange(8.0))


def test_cutmix_box_equals_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    rand_bbox: Any = theirs.rand_bbox
    for seed in range(200):
        random = Random(seed)

        def randint(low: int, high: int, size: None, random: Random = random) -> int:
            return random.randrange(low, high)

        monkeypatch.setattr(np.random, "randint", randint)
        kept = seed / 200
        top, bottom, left, right = rand_bbox((3, 17, 30), kept)
        assert random_cutmix_box(17, 30, kept, Random(seed)) == (top, left, bottom - top, right - left)


def test_mixup_and_cutmix_alternate() -> None:
    images, labels = torch.stack([torch.zeros(1, 9, 9), torch.ones(1, 9, 9)]), torch.arange(2)
    cut = 0
    for key in range(400):
        mixed, _ = mixup_or_cutmix(images, labels, 2, Augmentation(mixup=50, cutmix=50), key)
        cut += bool(((mixed == 0) | (mixed == 1)).all())
    assert abs(cut - 200) < 50


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 9),
    mixup=st.sampled_from([0.0, 0.01, 0.8, 5.0]),
    cutmix=st.sampled_from([0.0, 0.01, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
    key=st.integers(0, 2**64 - 1),
)
def test_targets_sum_to_one_and_even_splits_mix_the_same_way(
    count: int, mixup: float, cutmix: float, smoothing: float, key: int
) -> None:
    images, labels = batch(count, 7)
    augmentation = Augmentation(mixup=mixup, cutmix=cutmix, smoothing=smoothing)
    mixed, targets = mixup_or_cutmix(images, labels, 5, augmentation, key)
    assert mixed.shape == images.shape
    assert mixed.dtype == images.dtype
    assert torch.allclose(targets.sum(1), torch.ones(count), atol=1e-5)
    assert (targets >= 0).all()
    halves = [
        mixup_or_cutmix(images[at : at + 2], labels[at : at + 2], 5, augmentation, key) for at in range(0, count, 2)
    ]
    assert torch.equal(torch.cat([half[0] for half in halves]), mixed)
    assert torch.equal(torch.cat([half[1] for half in halves]), targets)
    if count % 2:
        assert torch.equal(mixed[-1], images[-1])
        assert torch.equal(targets[-1:], smooth_labels(labels[-1:], 5, smoothing))
