"""Views of a batch: a function of seed and step, decoded once, and refused in one line if they cannot be made."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.toy_datasets import random_array, write_class_folders

from vitrail.base.errors import ConfigError
from vitrail.data.batch import Batch
from vitrail.data.images import view_maker
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.augment.image_transforms import augment_image
from vitrail.data.images.augment.view_config import ViewAugmentation
from vitrail.data.images.datasets import DatasetSubset, open_data
from vitrail.data.images.decoding.crops import decode_crops
from vitrail.data.images.image_cache import CachedDataset
from vitrail.data.images.loader import BatchDataset, ShuffledSampler, training_batches
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.images.torch_dataset import TorchDatasetAdapter
from vitrail.data.images.views import View
from vitrail.data.rng import make_view_keys

SMALL = Preprocessing(image_size=8, crop=1.0)
CROP = ViewAugmentation(area=(0.2, 1.0))
COLOURED = ViewAugmentation(
    brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, grey_rate=0.2, blur_rate=0.5, blur_kernel=0.5
)
MULTI_CROP = {"global": View(COLOURED, count=2), "local": View(ViewAugmentation(area=(0.05, 0.3)), (4, 6), count=3)}


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

    monkeypatch.setattr(view_maker, "decode_crops", count_and_decode)
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
    grey = Preprocessing(image_size=8, crop=1.0, mean=(0.5,), std=(0.5,))
    for dataset in (TorchDatasetAdapter(images), DatasetSubset(arrays(), range(4))):
        batch = load_first(make_batches(dataset, MULTI_CROP), batch=4)
        assert batch["global"].shape == (2, 4, 3, 8, 8)
        batch = load_first(make_batches(dataset, MULTI_CROP, preprocessing=grey), batch=4)
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
