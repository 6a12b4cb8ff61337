"""The tokens of a frozen encoder, computed once per image and kept on disk, in the files of the probes' features.

They are float32, so that training on them is training on the images. N tokens, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.images.datasets import ImageDataset
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.distributed import Ranks
from vitrail.evaluation.probes.compute_features import FeatureStore, open_features, plan_passes, run_pass
from vitrail.evaluation.probes.feature_cache import compute_data_digest, get_feature_cache_folder
from vitrail.evaluation.probes.feature_sources import FeatureSource, compute_source_digest
from vitrail.models.base.contract import ImageModel

IMAGES_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class EncoderFeatures:
    """The tokens of the images of a data set; an unreadable image has none."""

    rows: NDArray[np.float32]  # (readable images, N · D), memory-mapped
    places: NDArray[np.int64]  # the row of each image, −1 if it is unreadable
    unreadable: dict[int, str]  # why, by image
    width: int
    folder: Path  # where they are kept

    def load(self, images: NDArray[np.int64]) -> Tensor:
        """The tokens of readable images: float32 (images, N, D)."""
        found = torch.from_numpy(np.ascontiguousarray(self.rows[self.places[images]]))
        return found.unflatten(1, (-1, self.width))


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

    That is, if the cache folder cannot be written, or if the model or the data cannot be identified: code and data
    sets from outside the package may change under the same name.
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
    if ranks.is_first:
        compute_missing_files(source, datasets, store, progress)
    ranks.all_reduce_sum(torch.zeros(1))  # wait for the first process
    paths = compute_missing_files(source, datasets, store, progress)  # on another machine they are still missing
    width = encoder.levels[-1].width
    return [open_encoder_features(path, dataset, width) for path, dataset in zip(paths, datasets, strict=True)]


def compute_missing_files(
    source: FeatureSource, datasets: Sequence[ImageDataset], store: FeatureStore, progress: Callable[[int], object]
) -> list[Path]:
    """The file of each data set; those that are missing or damaged are computed."""
    files, passes = plan_passes([source], datasets, store)
    for each in passes:
        run_pass(each, store, progress)
    return [files[number, 0] for number in range(len(datasets))]


def open_encoder_features(path: Path, dataset: ImageDataset, width: int) -> EncoderFeatures:
    stored = open_features(path, dataset)
    places = np.full(len(dataset), -1, np.int64)
    readable = stored.select_readable(np.arange(len(dataset)))
    places[readable] = np.arange(len(readable))
    return EncoderFeatures(stored.rows, places, stored.unreadable, width, path.parent)
