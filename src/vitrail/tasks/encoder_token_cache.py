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

from vitrail.base.errors import OutputError
from vitrail.data.images.datasets import ImageDataset
from vitrail.data.images.preprocessing import Preprocessing
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
