"""Views of a batch: a function of seed and step, decoded once, with colors as in torchvision."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from support.toy_datasets import random_array, write_class_folders
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from vitrail.base.errors import ConfigError
from vitrail.data.batch import Batch
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment import views as view_module
from vitrail.data.images.augment.augmentations import augment_image
from vitrail.data.images.augment.config import Augmentation, ViewAugmentation
from vitrail.data.images.augment.views import ColorDraws, View, recolor
from vitrail.data.images.datasets import CachedDataset, DatasetSubset, TorchDatasetAdapter, open_data
from vitrail.data.images.decoding.crops import decode_crops
from vitrail.data.images.loader import BatchDataset, ShuffledSampler, training_batches
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.rng import make_view_keys, uniform_randoms

SIGMAS = (0.1, 0.7, 2.0, 3.5)
FACTORS = (0.0, 0.3, 1.0, 1.8)
SHIFTS = (-0.5, -0.1, 0.0, 0.37)
NONE = ViewAugmentation()
ALL = ViewAugmentation(
    brightness=0.8,
    contrast=0.8,
    saturation=0.8,
    hue=0.2,
    gray_rate=0.2,
    blur_rate=0.5,
    blur_kernel=0.3,
    solarize_rate=0.2,
)
THEIRS: tuple[Any, ...] = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
SMALL = Preprocessing(image_size=8, crop=1.0)
CROP = ViewAugmentation(area=(0.2, 1.0))
COLORED = ViewAugmentation(
    brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, gray_rate=0.2, blur_rate=0.5, blur_kernel=0.5
)
MULTI_CROP = {"global": View(COLORED, count=2), "local": View(ViewAugmentation(area=(0.05, 0.3)), (4, 6), count=3)}


def make_color_pixels(count: int = 4, channels: int = 3) -> Tensor:
    """Noise, with black, white, gray and pure colors in one row."""
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, channels, 30, 41), dtype=np.uint8))
    pixels[:, :, 0, :8] = torch.tensor([[n & 1, n >> 1 & 1, n >> 2] for n in range(8)]).T[:channels] * 255
    pixels[:, :, 1, :8] = 97
    return pixels


def blur_by_sigmas(images: Tensor, sigmas: Tensor) -> Tensor:
    return view_module.gaussian_blur(images, sigmas.double().numpy(), 5)


OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, float], Any], tuple[float, ...]]] = {
    "brightness": (view_module.adjust_brightness, tv.adjust_brightness, FACTORS),
    "contrast": (view_module.adjust_contrast, tv.adjust_contrast, FACTORS),
    "saturation": (view_module.adjust_saturation, tv.adjust_saturation, FACTORS),
    "hue": (view_module.adjust_hue, tv.adjust_hue, SHIFTS),
    "gray": (lambda x, _: view_module.to_gray(x), lambda x, _: tv.rgb_to_grayscale(x, x.shape[0]), FACTORS),
    "blur": (blur_by_sigmas, lambda x, sigma: tv.gaussian_blur(x, [11, 11], [sigma, sigma]), SIGMAS),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_equals_torchvision(name: str, channels: int) -> None:
    """On floats within 0.001 levels, but for the exact mean and the end of the blur; uint8 is truncated there."""
    mine, theirs, amounts = OPERATIONS[name]
    pixels = make_color_pixels(channels=channels)
    given = pixels.float()
    changed = mine(given, torch.tensor(amounts))
    assert torch.equal(given, pixels.float()), "the images are not changed in place"
    for image, result, amount in zip(pixels, changed, amounts, strict=True):
        exact = theirs(image.float() / 255, amount) * 255
        assert (result - exact).abs().max() <= (0.02 if name == "blur" else 0.005 if name == "contrast" else 1e-3)
        assert (result.round() - theirs(image, amount)).abs().max() <= (2 if name == "saturation" else 1)


def test_solarize_equals_torchvision() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    for threshold in (0, 1, 128, 255):
        assert torch.equal(view_module.solarize(pixels, threshold), tv.solarize(pixels, threshold))


@pytest.mark.parametrize("name", OPERATIONS)
def test_result_does_not_depend_on_the_batch(name: str) -> None:
    mine, _, amounts = OPERATIONS[name]
    images, factors = make_color_pixels(12).float(), torch.tensor(amounts).repeat(3)
    together = mine(images, factors)
    for row in range(12):
        assert torch.equal(mine(images[row : row + 1], factors[row : row + 1])[0], together[row])


def test_blur_radius_is_a_share_of_the_shorter_side() -> None:
    sizes = ((224, 300), (96, 96), (32, 32), (8, 8))
    assert [view_module.compute_blur_radius(torch.empty(1, 3, *size), 0.1) for size in sizes] == [11, 4, 1, 0]
    assert view_module.compute_blur_radius(torch.empty(1, 3, 3, 3), 1.0) == 1


def make_pixels(count: int, channels: int = 3) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, channels, 16, 20), dtype=np.uint8))


def change(pixels: Tensor, augmentation: ViewAugmentation, keys: NDArray[np.uint64]) -> Tensor:
    pixels = pixels.clone()
    recolor(pixels, augmentation, keys)
    return pixels


@pytest.mark.parametrize("channels", [1, 3])
def test_views_equal_torchvision_with_the_same_choices(channels: int) -> None:
    pixels, keys = make_pixels(40, channels), make_view_keys(0, 0, np.arange(40), 0)
    augmentation = replace(ALL, solarize_rate=0.0)
    draws, changed = ColorDraws(augmentation, keys), change(pixels, augmentation, keys)
    for row, (image, result) in enumerate(zip(pixels, changed, strict=True)):
        expected = image / 255
        assert (draws.order[row] >= 0).all() == draws.jitter[row]
        for operation in draws.order[row].tolist() if draws.jitter[row] else ():
            expected = THEIRS[operation](expected, draws.amounts[row, operation].item())
        if draws.gray[row]:
            expected = tv.rgb_to_grayscale(expected, num_output_channels=channels)
        if draws.blur[row]:
            expected = tv.gaussian_blur(expected, [5, 5], [draws.sigmas[row]] * 2)
        assert (result - expected * 255).abs().max() <= 0.51, "rounded once, at the end"
    assert draws.jitter.any()
    assert draws.gray.any()
    assert draws.blur.any()


def test_view_depends_only_on_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, keys = make_pixels(30), make_view_keys(0, 0, np.arange(30), 0)
    together = change(pixels, ALL, keys)
    monkeypatch.setattr(view_module, "CHUNK_VALUES", 3000)
    assert torch.equal(change(pixels, ALL, keys), together)
    for row in (0, 13, 29):
        assert torch.equal(change(pixels[row : row + 1], ALL, keys[row : row + 1])[0], together[row])
    assert change(pixels[:0], ALL, keys[:0]).shape == (0, 3, 16, 20)
    others = change(pixels, ALL, make_view_keys(0, 0, np.arange(30), 1))
    assert sum(torch.equal(a, b) for a, b in zip(together, others, strict=True)) < 5


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("jitter_rate", {"brightness": 0.5}),
        ("jitter_rate", {"hue": 0.2}),
        ("gray_rate", {}),
        ("blur_rate", {"blur_sigma": (1.0, 1.0), "blur_kernel": 0.3}),
        ("solarize_rate", {}),
    ],
)
def test_rates(name: str, others: dict[str, Any]) -> None:
    pixels, keys = make_pixels(1).expand(800, -1, -1, -1), make_view_keys(0, 0, np.arange(800), 0)
    for rate in (0.0, 0.3, 1.0):
        changed = change(pixels, replace(NONE, **{**others, name: rate}), keys)
        share = (changed != pixels).flatten(1).any(1).float().mean()
        assert abs(share - rate) < (0.06 if 0 < rate < 1 else 0.01)


def test_choices_are_independent_of_one_another_and_of_the_crop() -> None:
    keys = make_view_keys(0, 0, np.arange(2000), 0)
    draws = ColorDraws(replace(ALL, jitter_rate=0.5, gray_rate=0.5, solarize_rate=0.5), keys)
    choices = (uniform_randoms(keys, 1)[:, 0] < 0.5, draws.jitter, draws.gray, draws.blur, draws.solarize)
    shares = np.corrcoef(np.stack(choices).astype(float))
    assert np.abs(shares - np.eye(5)).max() < 0.1
    orders, counts = np.unique(draws.order[draws.jitter], axis=0, return_counts=True)
    assert len(orders) == 24
    assert counts.min() > 20


@pytest.mark.parametrize(
    "fields",
    [
        {"area": (0.5, 0.1)},
        {"area": (0.5, 2.0)},
        {"hue": 0.6},
        {"brightness": -0.1},
        {"blur_sigma": (2.0, 1.0)},
        {"blur_sigma": (0.0, 1.0)},
        {"gray_rate": 1.5},
        {"solarize_threshold": 256},
    ],
)
def test_bad_fields(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        ViewAugmentation(**fields)


def arrays(count: int = 20, size: int = 12, channels: int = 3) -> ArrayDataset:
    return ArrayDataset(random_array(count, size, size, channels), np.arange(count) % 4, ("a", "b", "c", "d"))


def make_batches(dataset: Any, views: Mapping[str, View] | None, **fields: Any) -> BatchDataset:
    defaults: dict[str, Any] = {"augmentation": Augmentation(), "preprocessing": SMALL}
    return BatchDataset(dataset=dataset, views=views, **{**defaults, **fields})


def load_first(batches: BatchDataset, batch: int = 8, repeats: int = 1) -> Batch:
    sampler = ShuffledSampler(image_count=len(batches.dataset), batch=batch, repeats=repeats)
    return next(training_batches(batches, sampler, range(1)))


def test_names_shapes_and_keys() -> None:
    batch = load_first(make_batches(arrays(), MULTI_CROP, seed=3), repeats=2)
    assert batch.size == 8
    assert batch["global"].shape == (2, 8, 3, 8, 8)
    assert batch["local"].shape == (3, 8, 3, 4, 6)
    assert {each.dtype for name, each in batch.tensors.items() if name in MULTI_CROP} == {torch.uint8}
    assert batch["labels"].tolist() == [int(index) % 4 for index in batch["indices"]]
    replicas = np.arange(8) // 4
    expected = [make_view_keys(3, 0, batch["indices"].numpy(), replicas * 5 + view) for view in range(5)]
    assert np.array_equal(np.concatenate([batch.keys["global"], batch.keys["local"]]), np.stack(expected))


def test_default_view_gives_the_batch_without_views() -> None:
    """Also keys and shapes, so that a task that asks for nothing else trains as before."""
    augmentation = Augmentation(crop="resized", flip=0.5, policy="rand")
    plain, named = (
        load_first(make_batches(arrays(), views, augmentation=augmentation)) for views in (None, {"images": View()})
    )
    assert torch.equal(plain["images"], named["images"])
    assert np.array_equal(plain.keys["images"], named.keys["images"])
    assert named["images"].shape == (8, 3, 8, 8)


@pytest.mark.parametrize("channels", [1, 3])
def test_view_of_a_batch_equals_the_view_of_one_image(channels: int) -> None:
    """Crop and flip are those of Augmentation(crop="resized"); an Augmentation can also be asked for itself."""
    one = Augmentation(crop="resized", flip=0.5, area=(0.2, 1.0))
    both = {"a": View(CROP, count=2), "b": View(Augmentation(crop="resized", policy="rand"), size=5)}
    data = arrays(channels=channels)
    batch = load_first(make_batches(data, both, augmentation=one))
    for row, index in enumerate(batch["indices"].tolist()):
        for view in range(2):
            expected = augment_image(data.source(index), one, SMALL, int(batch.keys["a"][view, row]))
            assert torch.equal(batch["a"][view, row], expected)
        preprocessing = Preprocessing(image_size=5, crop=1.0)
        key = int(batch.keys["b"][0, row])
        expected = augment_image(data.source(index), both["b"].augmentation, preprocessing, key)  # pyright: ignore[reportArgumentType]
        assert torch.equal(batch["b"][0, row], expected)
    assert not torch.equal(batch["a"][0], batch["a"][1])


def test_workers_ranks_micro_batches_and_resuming_give_the_same_views() -> None:
    batches, sampler = make_batches(arrays(), MULTI_CROP, seed=4), ShuffledSampler(image_count=20, batch=8, seed=4)
    expected = list(training_batches(batches, sampler, range(3)))
    for world, accumulate, workers in ((2, 1, 0), (1, 2, 2), (2, 2, 0)):
        parts = [
            list(
                training_batches(
                    batches, sampler, range(1, 3), rank=r, world=world, accumulate=accumulate, workers=workers
                )
            )
            for r in range(world)
        ]
        for step, batch in enumerate(expected[1:]):
            mine = [each for rank in parts for each in rank[step * accumulate : (step + 1) * accumulate]]
            for name in MULTI_CROP:
                assert torch.equal(torch.cat([each[name] for each in mine], dim=1), batch[name])
                assert np.array_equal(np.concatenate([each.keys[name] for each in mine], axis=1), batch.keys[name])


def test_image_is_decoded_once_for_all_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = open_data(write_class_folders(tmp_path / "photos", ants=4, bees=4), val_share=0).train
    assert images is not None
    decoded, decode = list[Any](), decode_crops

    def count_and_decode(source: Any, choose: Any) -> Any:
        decoded.append(source)
        return decode(source, choose)

    monkeypatch.setattr(view_module, "decode_crops", count_and_decode)
    views = {"global": View(CROP, count=2), "local": View(CROP, size=4, count=3)}
    batch = load_first(make_batches(images, views))
    assert sorted(decoded) == sorted(images.source(index) for index in range(8))
    cached = load_first(make_batches(CachedDataset(images), views))
    assert len(decoded) == 8, "the cache holds decoded images"
    assert all(torch.equal(batch[name], cached[name]) for name in views)


def test_unreadable_image_is_replaced_in_all_views(tmp_path: Path) -> None:
    images = open_data(write_class_folders(tmp_path / "photos", ants=4, bees=4), val_share=0).train
    assert images is not None
    (tmp_path / "photos" / "ants" / "1.png").write_text("not an image")
    batch = load_first(make_batches(images, MULTI_CROP, replace_unreadable=True))
    assert sorted(batch["indices"].tolist()) == [0, 2, 2, 3, 4, 5, 6, 7]
    assert "1.png" in batch.skipped[0]
    left = load_first(make_batches(images, MULTI_CROP))
    assert left["local"].shape == (3, 7, 3, 4, 6)
    assert left.keys["local"].shape == (3, 7)
    assert left.size == len(left["labels"]) == 7


def test_torch_data_sets_and_subsets() -> None:
    images = [(Image.fromarray(each), 0) for each in arrays(4).images]
    gray = Preprocessing(image_size=8, crop=1.0, mean=(0.5,), std=(0.5,))
    for dataset in (TorchDatasetAdapter(images), DatasetSubset(arrays(), range(4))):
        batch = load_first(make_batches(dataset, MULTI_CROP), batch=4)
        assert batch["global"].shape == (2, 4, 3, 8, 8)
        batch = load_first(make_batches(dataset, MULTI_CROP, preprocessing=gray), batch=4)
        assert batch["global"].shape == (2, 4, 1, 8, 8)
    floats = TorchDatasetAdapter([(torch.zeros(3, 8, 8), 0)])
    with pytest.raises(ConfigError, match=r"image 0 of list is a tensor of floats.*ToTensor"):
        make_batches(floats, MULTI_CROP)


@pytest.mark.parametrize("size", [0, -1, (8, 0), (8,), 2.5, True])
def test_bad_size(size: Any) -> None:
    with pytest.raises(ConfigError, match="`size`"):
        View(CROP, size=size)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_bad_count(count: Any) -> None:
    with pytest.raises(ConfigError, match="`count`"):
        View(CROP, count=count)


def test_bad_views() -> None:
    with pytest.raises(ConfigError, match="`views` is empty"):
        make_batches(arrays(), {})
    with pytest.raises(ConfigError, match="'labels'"):
        make_batches(arrays(), {"labels": View(CROP)})
    with pytest.raises(ConfigError, match="`transform`"):
        make_batches(arrays(), MULTI_CROP, transform=str)
    large = {"global": View(CROP, size=224, count=2)}
    for dataset in (arrays(), CachedDataset(arrays()), DatasetSubset(arrays(), [0])):
        with pytest.raises(ConfigError, match=r"'global' has a size of 224×224.*at most 12×12; use 12"):
            make_batches(dataset, large)
