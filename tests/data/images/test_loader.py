"""A batch depends only on the seed and the step."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.toy_datasets import random_array, write_class_folders

from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.augmentations import normalize, random_erase
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.datasets import CachedDataset, DatasetSubset, cache_if_small, estimate_decoded_bytes, open_data
from vitrail.data.images.loader import BatchDataset, ShuffledSampler, evaluation_batches, training_batches
from vitrail.data.images.preprocessing import Preprocessing

SMALL = Preprocessing(image_size=8, crop=1.0)
RANDOM = Augmentation(crop="resized", flip=0.5, policy="rand", jitter=0.3)


def arrays(count: int = 20, size: int = 8, channels: int = 3) -> ArrayDataset:
    return ArrayDataset(random_array(count, size, size, channels), np.arange(count) % 4, ("a", "b", "c", "d"))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 4), st.integers(0, 5))
def test_epoch_has_no_duplicates_and_only_full_batches(images: int, batch: int, repeats: int, seed: int) -> None:
    order = ShuffledSampler(image_count=images, batch=batch, repeats=repeats, seed=seed)
    views = list[tuple[int, int]]()
    for step in range(order.steps_per_epoch):
        indices = order.batch_at(step)
        assert len(indices.indices) == len(indices.replicas) == batch
        assert indices.epoch == 0
        views += zip(indices.indices.tolist(), indices.replicas.tolist(), strict=True)
    assert len(set(views)) == len(views)
    assert all(0 <= index < images for index, _ in views)
    assert order.steps_per_epoch == images // batch
    if batch <= images:
        assert order.batch_at(order.steps_per_epoch).epoch == 1


def test_epochs_and_seeds_shuffle_differently() -> None:
    order, other = ShuffledSampler(image_count=50, batch=50), ShuffledSampler(image_count=50, batch=50, seed=1)
    orders = [
        order.batch_at(0).indices.tolist(),
        order.batch_at(1).indices.tolist(),
        other.batch_at(0).indices.tolist(),
    ]
    assert all(sorted(each) == list(range(50)) for each in orders)
    assert len({tuple(each) for each in orders}) == 3


def test_repeats_are_different_views_and_not_neighbors() -> None:
    """Mixup blends neighbors, so an image would be blended with itself."""
    order = ShuffledSampler(image_count=24, batch=12, repeats=3)
    views = BatchDataset(dataset=arrays(24, 16), augmentation=RANDOM, preprocessing=SMALL)
    batch = next(training_batches(views, order, range(1)))
    assert sorted(np.bincount(batch["indices"].numpy(), minlength=24).tolist())[-4:] == [3, 3, 3, 3]
    for pair in batch["indices"].reshape(-1, 2).tolist():
        assert pair[0] != pair[1]
    for index in set(batch["indices"].tolist()):
        mine = batch["images"][batch["indices"] == index]
        assert len(mine) == 3
        assert not torch.equal(mine[0], mine[1])
        assert not torch.equal(mine[1], mine[2])
        assert batch["labels"][batch["indices"] == index].unique().numel() == 1


@pytest.mark.parametrize("augmentation", [RANDOM, Augmentation(crop="shift", shift=2, flip=0.5)])
def test_ranks_and_micro_batches_join_to_the_batch(augmentation: Augmentation) -> None:
    views = BatchDataset(dataset=arrays(), augmentation=augmentation, preprocessing=SMALL, seed=4)
    order = ShuffledSampler(image_count=20, batch=8, seed=4)
    batches = list(training_batches(views, order, range(3)))
    for world, accumulate, workers in ((2, 1, 0), (1, 2, 2), (2, 2, 0)):
        parts = [
            list(training_batches(views, order, range(3), rank=r, world=world, accumulate=accumulate, workers=workers))
            for r in range(world)
        ]
        for step, batch in enumerate(batches):
            mine = [each for rank in parts for each in rank[step * accumulate : (step + 1) * accumulate]]
            assert torch.equal(torch.cat([each["images"] for each in mine]), batch["images"])
            assert torch.equal(torch.cat([each["labels"] for each in mine]), batch["labels"])
            assert np.array_equal(np.concatenate([each.keys["images"] for each in mine]), batch.keys["images"])


def test_starting_at_a_step_gives_the_same_batches() -> None:
    views = BatchDataset(dataset=arrays(), augmentation=RANDOM, preprocessing=SMALL)
    order = ShuffledSampler(image_count=20, batch=8)
    batches, resumed = list(training_batches(views, order, range(6))), list(training_batches(views, order, range(3, 6)))
    for expected, batch in zip(batches[3:], resumed, strict=True):
        assert torch.equal(expected["images"], batch["images"])


def test_batched_augmentation_equals_one_by_one() -> None:
    """Augmenting a batch at once, also of a subset, gives the same as augmenting image by image."""
    shift, order = Augmentation(crop="shift", shift=2, flip=0.5), ShuffledSampler(image_count=12, batch=12)
    subset = DatasetSubset(arrays(), range(3, 15))
    batched = BatchDataset(dataset=subset, augmentation=shift, preprocessing=SMALL)
    assert batched.model_sized_arrays is not None
    one_by_one = BatchDataset(dataset=CachedDataset(subset), augmentation=shift, preprocessing=SMALL)
    assert one_by_one.model_sized_arrays is None
    batch, expected = (next(training_batches(views, order, range(1))) for views in (batched, one_by_one))
    assert torch.equal(batch["images"], expected["images"])
    assert torch.equal(batch["labels"], expected["labels"])


def test_gray_arrays_are_expanded_to_the_channels_of_the_model() -> None:
    for channels in (1, 3):
        preprocessing = Preprocessing(image_size=8, crop=1.0, mean=(0.5,) * channels, std=(0.5,) * channels)
        batch = next(evaluation_batches(arrays(channels=1), preprocessing))
        assert batch["images"].shape == (20, channels, 8, 8)
        assert torch.equal(batch["images"][:, 0], torch.from_numpy(arrays(channels=1).images[..., 0]))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_covers_every_image_once_over_all_ranks(world: int, workers: int) -> None:
    indices = [
        index
        for rank in range(world)
        for batch in evaluation_batches(arrays(), SMALL, batch=3, rank=rank, world=world, workers=workers)
        for index in batch["indices"].tolist()
    ]
    assert sorted(indices) == list(range(20))


def test_unreadable_images_are_replaced_in_training_and_left_out_in_evaluation(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "photos", ants=4, bees=4)
    (tmp_path / "photos" / "ants" / "1.png").write_text("not an image")
    images = open_data(tmp_path / "photos", val_share=0).train
    assert images is not None
    for source in (images, CachedDataset(images)):
        views = BatchDataset(dataset=source, augmentation=Augmentation(), preprocessing=SMALL, replace_unreadable=True)
        batch = next(training_batches(views, ShuffledSampler(image_count=8, batch=8), range(1)))
        assert batch["images"].shape == (8, 3, 8, 8)
        assert sorted(batch["indices"].tolist()) == [0, 2, 2, 3, 4, 5, 6, 7]
        assert [images.label(index) for index in batch["indices"].tolist()] == batch["labels"].tolist()
        (reason,) = batch.skipped
        assert "1.png" in reason
        left = next(evaluation_batches(source, SMALL, batch=8))
        assert left["indices"].tolist() == [0, 2, 3, 4, 5, 6, 7]
        assert left.skipped == (reason,)


def test_folder_without_readable_images_gives_empty_batches(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "photos", ants=2, bees=2)
    for path in (tmp_path / "photos").rglob("*.png"):
        path.write_text("not an image")
    images = open_data(tmp_path / "photos", val_share=0).train
    assert images is not None
    views = BatchDataset(dataset=images, augmentation=Augmentation(), preprocessing=SMALL, replace_unreadable=True)
    empty = next(training_batches(views, ShuffledSampler(image_count=4, batch=2), range(1)))
    assert len(empty["labels"]) == 0, "the loop raises the error, since one raised in a worker would be a traceback"
    batch = next(evaluation_batches(images, SMALL))
    assert batch["images"].shape == (0, 3, 8, 8)
    assert len(batch.skipped) == 4


def test_data_are_cached_only_if_they_fit(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "photos", ants=5, bees=5)
    data = open_data(tmp_path / "photos")
    assert data.train is not None
    assert estimate_decoded_bytes(data.train) == len(data.train) * 6 * 5 * 3
    assert cache_if_small(data, 100) is data
    decoded = list[int]()
    cached = cache_if_small(data, 1e6, lambda: decoded.append(1))
    assert isinstance(cached.train, CachedDataset)
    assert isinstance(cached.val, CachedDataset)
    assert len(decoded) == 10
    for path in (tmp_path / "photos").rglob("*.png"):
        path.unlink()
    assert cached.train.source(0).shape == (6, 5, 3)
    assert estimate_decoded_bytes(arrays()) == 0


def test_erasing_is_independent_of_the_order() -> None:
    """If both used the same random number, one part of each epoch would be erased and the rest never."""
    views = BatchDataset(dataset=arrays(400), augmentation=Augmentation(), preprocessing=SMALL)
    order = ShuffledSampler(image_count=400, batch=40)
    shares = list[float]()
    for batch in training_batches(views, order, range(10)):
        images = normalize(batch["images"], SMALL)
        changed = (random_erase(images, batch.keys["images"], 0.25) != images).flatten(1).any(1)
        shares.append(changed.float().mean().item())
    assert max(shares) < 0.6
    assert 0.15 < sum(shares) / 10 < 0.35


def test_subset_of_a_subset_is_flattened() -> None:
    inner = DatasetSubset(DatasetSubset(arrays(), range(10, 20)), [3, 1])
    assert inner.indices.tolist() == [13, 11]
    assert isinstance(inner.dataset, ArrayDataset)
