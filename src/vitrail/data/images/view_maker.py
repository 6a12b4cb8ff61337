"""Make the views of a batch; every image is decoded once.

B batch, C channels, h and w rows and columns of a view, V views of an image over all names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.augment.image_transforms import augment_image
from vitrail.data.images.augment.view_config import ViewAugmentation
from vitrail.data.images.augment.view_transforms import recolour, resize_crop
from vitrail.data.images.decoding.crops import (
    UNIFORMS_PER_BOX,
    CropBox,
    SizedBox,
    decode_crops,
    random_resized_crop_box,
)
from vitrail.data.images.decoding.image_formats import prefix_errors_with_path
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.images.views import View
from vitrail.data.rng import make_view_keys, uniform_randoms
from vitrail.models.base.checks import pair


@dataclass(frozen=True)
class NamedView:
    """A view with the defaults of the recipe filled in, and its part of the V views of an image."""

    name: str
    augmentation: Augmentation | ViewAugmentation
    preprocessing: Preprocessing  # with the size of the view
    part: slice

    @property
    def size(self) -> tuple[int, int]:
        return pair(self.preprocessing.image_size)

    def choose_box(self, rows: int, columns: int, draws: Sequence[float]) -> SizedBox:
        """The part of an image of (rows, columns) to decode; all of it for an Augmentation, which crops itself."""
        augmentation = self.augmentation
        if not isinstance(augmentation, ViewAugmentation):
            return SizedBox(CropBox(0, 0, rows, columns), (rows, columns))
        box = random_resized_crop_box(rows, columns, augmentation.area, augmentation.aspect, draws)
        return SizedBox(box, self.size)

    def make_view(self, crop: NDArray[np.uint8], key: int, draw: float) -> Tensor:
        """A view, for a ViewAugmentation before its colours: uint8 (C, h, w), or (1, h, w) of a grey image."""
        if isinstance(self.augmentation, ViewAugmentation):
            return resize_crop(crop, self.preprocessing, flip=draw < self.augmentation.flip)
        return augment_image(crop, self.augmentation, self.preprocessing, key)


class ViewMaker:
    """Makes all views of a batch, given their keys.

    View v of V is a function of the image and of a key made from (seed, epoch, image, replica·V + v).
    """

    def __init__(self, views: Mapping[str, View], augmentation: Augmentation, preprocessing: Preprocessing) -> None:
        self.channels = len(preprocessing.mean)
        self.views, self.total = list[NamedView](), 0
        for name, view in views.items():
            own = preprocessing if view.size is None else replace(preprocessing, image_size=view.size)
            part = slice(self.total, self.total + view.count)
            self.views.append(NamedView(name, view.augmentation or augmentation, own, part))
            self.total += view.count

    def make_keys(
        self, seed: int, epoch: int, indices: NDArray[np.int64], replicas: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """One key per view and image: (V, B)."""
        return make_view_keys(seed, epoch, indices, replicas * self.total + np.arange(self.total)[:, None])

    def crop_image(self, source: Any, keys: NDArray[np.uint64]) -> list[Tensor]:
        """The V views of one image with these keys, before their colours: uint8 (C or 1, h, w)."""
        draws: list[list[float]] = uniform_randoms(keys, 1 + UNIFORMS_PER_BOX).tolist()  # the first one is for the flip

        def choose(rows: int, columns: int) -> list[SizedBox]:
            return [view.choose_box(rows, columns, each[1:]) for view in self.views for each in draws[view.part]]

        with prefix_errors_with_path(source):
            crops = crop_array(source, choose) if is_pixel_array(source) else decode_crops(source, choose)
            return [
                view.make_view(crops[row], int(keys[row]), draws[row][0])
                for view in self.views
                for row in range(self.total)[view.part]
            ]

    def join(
        self, images: Sequence[Sequence[Tensor]], keys: NDArray[np.uint64]
    ) -> tuple[dict[str, Tensor], dict[str, NDArray[np.uint64]]]:
        """Views, uint8 (count, B, C, h, w), and their keys (count, B), by name, from the V crops of each image."""
        tensors = dict[str, Tensor]()
        for view in self.views:
            own_keys = keys[view.part]
            pixels = torch.empty(len(own_keys), len(images), self.channels, *view.size, dtype=torch.uint8)
            for column, crops in enumerate(images):
                for row, crop in enumerate(crops[view.part]):
                    pixels[row, column] = crop
            if isinstance(view.augmentation, ViewAugmentation):
                recolour(pixels.flatten(0, 1), view.augmentation, own_keys.reshape(-1))
            tensors[view.name] = pixels
        return tensors, {view.name: keys[view.part] for view in self.views}


def is_pixel_array(source: Any) -> bool:
    return isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.shape[2:] in ((1,), (3,))


def crop_array(pixels: NDArray[np.uint8], choose: Callable[[int, int], Sequence[SizedBox]]) -> list[NDArray[np.uint8]]:
    boxes = [each.box for each in choose(pixels.shape[0], pixels.shape[1])]
    return [pixels[top : top + height, left : left + width] for top, left, height, width in boxes]
