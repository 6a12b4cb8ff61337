"""Images with captions for training and validation, as batches of images, or of their tokens, and words.

The tokens of a frozen encoder are computed once per image and kept on disk, in the files of the probes' features. They
are float32, so that training on them is training on the images. N tokens, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import OutputError
from vitrail.base.text import format_count
from vitrail.checkpoint.weight_folders import compute_tokenizer_checksum
from vitrail.data.batch import Batch
from vitrail.data.captions.captions import CaptionSplits, EncodedCaptions
from vitrail.data.captions.collages import CollageImages
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.datasets import CachedDataset, DatasetSplits, DatasetSubset, ImageDataset, cache_if_small
from vitrail.data.images.loader import BatchDataset, ShuffledSampler, evaluation_batches, training_batches
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.distributed import Ranks
from vitrail.evaluation.probes.feature_sources import FeatureSource, compute_source_digest
from vitrail.evaluation.probes.stored_features import (
    DatasetFeatures,
    FeatureStore,
    compute_data_digest,
    get_feature_cache_folder,
    store_features,
)
from vitrail.models.base.contract import ImageModel

IMAGES_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class EncoderFeatures:
    """The tokens of the images of a data set; an unreadable image has none."""

    rows: NDArray[np.float32]  # (images, N · D), memory-mapped
    unreadable: dict[int, str]  # why, by image
    width: int
    folder: Path  # where they are kept

    def load(self, images: NDArray[np.int64]) -> Tensor:
        """The tokens of readable images: float32 (images, N, D)."""
        return torch.from_numpy(np.ascontiguousarray(self.rows[images])).unflatten(1, (-1, self.width))


def compute_encoder_features(
    encoder: ImageModel,
    preprocessing: Preprocessing,
    datasets: Sequence[ImageDataset],
    *,
    device: torch.device,
    ranks: Ranks,
    progress: Callable[[int], object] = lambda _: None,
) -> list[EncoderFeatures] | None:
    """The tokens of each data set, computed unless they are on disk; None if they cannot be kept there.

    That is, if the cache folder cannot be written or its disk is full, or if the model or the data cannot be
    identified: code and data sets from outside the package may change under the same name.
    """
    source = FeatureSource(
        name=type(encoder).__name__,
        kind="model",
        preprocessing=preprocessing,
        compute=lambda images: encoder.tokens(images).flatten(1),
        digest=compute_source_digest(encoder, preprocessing, "tokens"),
        module=encoder,
    )
    folder = get_feature_cache_folder()
    known = source.digest is not None and all(compute_data_digest(each) is not None for each in datasets)
    if folder is None or not known:
        return None
    store = FeatureStore(cache=folder, temporary=folder, batch=IMAGES_AT_ONCE, workers=0, device=device, strict=False)
    found, failed = dict[tuple[int, int], DatasetFeatures](), torch.zeros(1)
    for turn in (ranks.is_first, not ranks.is_first):  # on another machine the files are still missing
        try:
            found = store_features([source], datasets, store, progress) if turn else found
        except OutputError:
            failed += 1
        if ranks.all_reduce_sum(failed).item():
            return None
    width = encoder.levels[-1].width
    stored = [found[number, 0] for number in range(len(datasets))]
    return [EncoderFeatures(each.file.open_rows(), each.unreadable, width, folder) for each in stored]


@dataclass(frozen=True, kw_only=True)
class CaptionSource:
    """Batches of captions with their images, each a function of the seed and the step; an example is a caption."""

    data: CaptionSplits
    tokenizer: TextTokenizer
    train: EncodedCaptions
    val: EncodedCaptions | None
    preprocessing: Preprocessing
    augmentation: Augmentation
    batch: int
    seed: int = 0
    train_features: EncoderFeatures | None = None  # of a frozen encoder: batches have `tokens` instead of `images`
    val_features: EncoderFeatures | None = None

    @classmethod
    def encode(
        cls,
        data: CaptionSplits,
        tokenizer: TextTokenizer,
        *,
        max_length: int,
        limit: int | None,
        preprocessing: Preprocessing,
        augmentation: Augmentation,
        batch: int,
        seed: int,
    ) -> "CaptionSource":
        """Encode all captions; those longer than `limit`, the positions of a model, are left out, in training also
        those longer than `max_length`.
        """
        longest = max_length if limit is None else min(max_length, limit)
        return cls(
            data=data,
            tokenizer=tokenizer,
            train=EncodedCaptions.encode(data.train, tokenizer, length=longest),
            val=None if data.val is None else EncodedCaptions.encode(data.val, tokenizer, length=limit),
            preprocessing=preprocessing,
            augmentation=augmentation,
            batch=batch,
            seed=seed,
        )

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.data.notes, *self.train.notes, *(self.val.notes if self.val else ()))

    @property
    def example_count(self) -> int:
        return len(self.train)

    @property
    def validation_count(self) -> int:
        return len(self.val or ())

    @property
    def in_memory(self) -> bool:
        return self.train_features is not None or isinstance(self.data.train.images, CachedDataset | ArrayDataset)

    @cached_property
    def sampler(self) -> ShuffledSampler:
        repeats = self.augmentation.repeats
        return ShuffledSampler(image_count=self.example_count, batch=self.batch, repeats=repeats, seed=self.seed)

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    def load_batches(
        self, steps: range, *, accumulate: int = 1, workers: int = 0, ranks: Ranks | None = None, pin: bool = False
    ) -> Iterator[Batch]:
        ranks = ranks or Ranks()
        parts = accumulate * ranks.world_size
        loaded = self.load_images(steps, accumulate, workers, ranks)
        for step in steps:
            tokens = self.train.count_tokens(self.sampler.batch_at(step).indices)
            for _ in range(accumulate):
                batch = self.train.add_words(next(loaded), tokens / parts)
                yield batch.pin_memory() if pin else batch

    def load_images(self, steps: range, accumulate: int, workers: int, ranks: Ranks) -> Iterator[Batch]:
        """This rank's images of every step, or their tokens, as `accumulate` micro-batches per step."""
        if self.train_features is not None:
            own = (self.sampler.batch_at(step).take_part(ranks.rank, ranks.world_size) for step in steps)
            chunks = (part.take_part(each, accumulate).indices for part in own for each in range(accumulate))
            return (load_image_tokens(self.train_features, self.train.owners, chunk, tries=True) for chunk in chunks)
        batches = BatchDataset(
            dataset=DatasetSubset(self.data.train.images, self.train.owners),
            augmentation=self.augmentation,
            preprocessing=self.preprocessing,
            seed=self.seed,
            replace_unreadable=True,
        )
        rank, world = ranks.rank, ranks.world_size
        return training_batches(
            batches, self.sampler, steps, accumulate=accumulate, workers=workers, rank=rank, world=world
        )

    def load_validation_batches(
        self, *, batch: int, workers: int = 0, ranks: Ranks | None = None, limit: int | None = None
    ) -> Iterator[Batch]:
        """Every validation caption once, or the first `limit`, without augmentation."""
        ranks, captions, data = ranks or Ranks(), self.val, self.data.val
        if captions is None or data is None:
            return iter(())
        count = len(captions) if limit is None else min(limit, len(captions))
        if self.val_features is not None:
            own = np.arange(ranks.rank, count, ranks.world_size)
            chunks = (own[start : start + batch] for start in range(0, len(own), batch))
            loaded = (load_image_tokens(self.val_features, captions.owners, chunk) for chunk in chunks)
        else:
            examples = DatasetSubset(data.images, captions.owners[:count])
            loaded = evaluation_batches(
                examples,
                self.preprocessing,
                batch=batch,
                workers=workers,
                rank=ranks.rank,
                world=ranks.world_size,
            )
        return (captions.add_words(each) for each in loaded)

    def load_scored_images(self, indices: NDArray[np.int64], batch: int) -> Iterator[Batch]:
        """Some validation images, each once, or their tokens: batches without words."""
        assert self.data.val is not None
        if self.val_features is not None:
            every, features = np.arange(len(self.data.val)), self.val_features
            chunks = (indices[start : start + batch] for start in range(0, len(indices), batch))
            return (load_image_tokens(features, every, chunk) for chunk in chunks)
        found = evaluation_batches(DatasetSubset(self.data.val.images, indices), self.preprocessing, batch=batch)
        return (
            replace(each, tensors={**each.tensors, "indices": torch.from_numpy(indices)[each["indices"]]})
            for each in found
        )

    def describe(self) -> str:
        images = len(self.data.train)
        captions = "" if images == self.example_count else f" of {format_count(images, 'image')}"
        return (
            f"{self.name}: {format_count(self.example_count, 'training caption')}{captions}, "
            f"{format_count(self.validation_count, 'validation caption')}, "
            f"{format_count(self.tokenizer.vocabulary, 'token')} in the vocabulary"
        )

    @cached_property
    def tokenizer_text(self) -> str:
        return self.tokenizer.to_json()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.data.name,
            "train": self.example_count,
            "val": self.validation_count,
            "images": len(self.data.train),
            "tokenizer": compute_tokenizer_checksum(self.tokenizer_text),
        }

    def describe_model_input(self, model: Any) -> dict[str, Any]:
        del model
        return {"preprocessing": self.preprocessing, "tokenizer": self.tokenizer_text}


def load_image_tokens(
    features: EncoderFeatures, owners: NDArray[np.int64], examples: NDArray[np.int64], *, tries: bool = False
) -> Batch:
    """The `tokens` of the images of examples. For an unreadable image, the next readable one, or none."""
    found, skipped = list[int](), list[str]()
    for example in examples.tolist():
        for candidate in range(example, example + (len(owners) if tries else 1)):
            owner = int(owners[candidate % len(owners)])
            if owner not in features.unreadable:
                found.append(candidate % len(owners))
                break
            skipped.append(features.unreadable[owner])
    indices = np.array(found, np.int64)
    tensors = {"tokens": features.load(owners[indices]), "indices": torch.from_numpy(indices)}
    return Batch(tensors, {}, len(found), tuple(skipped))


def keep_images_in_memory(
    data: CaptionSplits, limit: float, on_image: Callable[[], object] = lambda: None
) -> CaptionSplits:
    """Collages as arrays, from which a batch is taken at once; files decoded, if they take at most `limit` bytes."""
    images = DatasetSplits(
        name=data.name,
        train=draw_if_generated(data.train.images),
        val=None if data.val is None else draw_if_generated(data.val.images),
        classes=(),
    )
    kept = cache_if_small(images, limit, on_image)
    assert kept.train is not None
    val = None if data.val is None or kept.val is None else replace(data.val, images=kept.val)
    return replace(data, train=replace(data.train, images=kept.train), val=val)


def draw_if_generated(images: ImageDataset) -> ImageDataset:
    return images.to_arrays() if isinstance(images, CollageImages) else images
