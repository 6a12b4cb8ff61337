"""Views that a task requests: random crops of every image with changed colors, as in SimCLR, BYOL and DINO.

An image is decoded once for all its views. Crops are resized and flipped one by one; colors are changed for the batch,
as torchvision does on floats from 0 to 255. Every operation rounds each value by itself, and sums are exact. So an
image has the same values in a batch of any size, and with any number of threads.

B batch, N crops, C channels, h and w rows and columns of a view, V views of an image over all names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.augmentations import augment_image
from vitrail.data.images.augment.config import Augmentation, ViewAugmentation
from vitrail.data.images.datasets import CachedDataset, DatasetSubset, ImageDataset
from vitrail.data.images.decoding.crops import (
    UNIFORMS_PER_BOX,
    CropBox,
    SizedBox,
    decode_crops,
    random_resized_crop_box,
)
from vitrail.data.images.decoding.image_formats import prefix_errors_with_path
from vitrail.data.images.preprocessing import Preprocessing, get_pillow_mode
from vitrail.data.rng import COLOR_PURPOSE, make_view_keys, uniform_randoms
from vitrail.models.base.checks import Size, check_count, pair

DEFAULT_VIEW_NAME = "images"
RESERVED_NAMES = ("labels", "indices")  # tensors of every batch
GRAY_WEIGHTS = (0.2989, 0.587, 0.114)  # of red, green and blue, as in torchvision
SUM_STEPS = 256  # per level: values in a sum are rounded to multiples of 1 / 256, so that it is exact in any order
MIN_CHROMA = 1e-6  # replaces the chroma 0 of a gray pixel as a divisor; its hue is not used
MAX_SIGMAS = 4  # distance from its center where a blur is cut off; the rest of the kernel sums to 6e-5
CHUNK_VALUES = 2**17  # changed at once: intermediate results stay in the cache of the processor
NO_OPERATION = -1


@dataclass(frozen=True)
class View:
    """`count` random views of every image, requested by a task under one name.

    `augmentation` is a ViewAugmentation, computed for a batch at once, an Augmentation, computed image by image, or
    None for that of the recipe. `size` (rows, columns, or one number) is None for the size of the preprocessing.

    >>> large, small = ViewAugmentation(area=(0.4, 1.0)), ViewAugmentation(area=(0.05, 0.4))
    >>> views = {"global": View(large, size=224, count=2), "local": View(small, size=96, count=8)}
    """

    augmentation: Augmentation | ViewAugmentation | None = None
    size: Size | None = None
    count: int = 1

    def __post_init__(self) -> None:
        check_count("count", self.count)
        sides: Any = (self.size, self.size) if isinstance(self.size, int) else self.size
        if self.size is not None and not (
            isinstance(sides, tuple) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)
        ):
            raise ConfigError(f"`size` is {self.size!r}; expected the rows and columns of a view, 1 or more")


def are_default_views(views: Mapping[str, View] | None) -> bool:
    """Whether a batch is the same as without views: `images`, (B, C, H, W), by the augmentation of the recipe."""
    return views is None or views == {DEFAULT_VIEW_NAME: View()}


def check_views(views: Mapping[str, View], dataset: ImageDataset) -> None:
    """Raise an error for reserved names, and for views that are larger than the images in memory."""
    if not isinstance(views, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"views is a {type(views).__name__}; expected a mapping of names to View(…)")
    if not views:
        raise ConfigError("`views` is empty; expected at least one view")
    for name, view in views.items():
        if not isinstance(name, str) or not isinstance(view, View):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"views has {name!r}: {view!r}; expected a name as text, and a View(…)")
    for name in RESERVED_NAMES:
        if name in views:
            raise ConfigError(
                f"a view is named {name!r}, but every batch has another tensor of this name; use another name"
            )
    largest = find_largest_stored_size(dataset)
    for name, view in views.items():
        if largest is None or view.size is None:
            continue
        rows, columns = pair(view.size)
        if rows > largest[0] or columns > largest[1]:
            raise ConfigError(
                f"the view {name!r} has a size of {rows}×{columns} pixels, but the images in memory have at most "
                f"{largest[0]}×{largest[1]}; use {min(largest)} or less, or larger images"
            )


def find_largest_stored_size(dataset: ImageDataset) -> tuple[int, int] | None:
    """The most rows and columns of the images in memory; None for files, whose sizes are not known yet."""
    dataset = dataset.dataset if isinstance(dataset, DatasetSubset) else dataset
    if isinstance(dataset, ArrayDataset):
        return dataset.images.shape[1], dataset.images.shape[2]
    if isinstance(dataset, CachedDataset):
        sizes = [each.shape for each in dataset.decoded_images if not isinstance(each, Exception)]
        return (max(size[0] for size in sizes), max(size[1] for size in sizes)) if sizes else None
    return None


def adjust_brightness(images: Tensor, amounts: Tensor) -> Tensor:
    return images.mul(amounts[:, None, None, None]).clamp_(0, 255)


def adjust_contrast(images: Tensor, amounts: Tensor) -> Tensor:
    """Blend every image with the mean of its gray values."""
    gray = to_gray(images, copies=1)
    steps = gray.mul(SUM_STEPS).round_().flatten(1).sum(1, dtype=torch.float64)
    means = (steps / (SUM_STEPS * gray[0].numel())).float()
    return blend(images, means[:, None, None, None], amounts)


def adjust_saturation(images: Tensor, amounts: Tensor) -> Tensor:
    """Blend every image with its gray values."""
    return blend(images, to_gray(images, copies=1), amounts) if images.shape[1] == 3 else images


def adjust_hue(images: Tensor, amounts: Tensor) -> Tensor:
    """Rotate the hue of the HSV colors by a share of the color circle, one share per image."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    largest = torch.maximum(red, green).maximum(blue)
    smallest = torch.minimum(red, green).minimum(blue)
    chroma = largest - smallest
    divisor = chroma.clamp(min=MIN_CHROMA)
    # sums weighted by 0 and 1: torch's comparisons of floats with a result of floats are faster than `where`
    is_red, is_green = red.clone().eq_(largest), green.clone().eq_(largest)
    if_red = (green - blue).div_(divisor)
    if_green = (blue - red).div_(divisor).add_(2)
    if_blue = (red - green).div_(divisor).add_(4)
    if_not_red = if_green.sub_(if_blue).mul_(is_green).add_(if_blue)
    sixths = if_red.sub_(if_not_red).mul_(is_red).add_(if_not_red).add_(amounts[:, None, None] * 6)
    sixths.sub_(sixths.div(6).floor_().mul_(6))  # from 0 to 6
    changed = torch.empty_like(images)
    for channel, (center, sign, offset) in enumerate(((3, 1, -1), (2, -1, 2), (4, -1, 2))):
        share = (sixths - center).abs_().mul_(sign).add_(offset).clamp_(0, 1)  # of the chroma
        torch.add(share.mul_(chroma), smallest, out=changed[:, channel])
    return changed


def to_gray(images: Tensor, copies: int | None = None) -> Tensor:
    """Gray images with equal channels: as many as before, or `copies`."""
    if images.shape[1] == 1:
        return images
    red, green, blue = (images[:, channel : channel + 1] * weight for channel, weight in enumerate(GRAY_WEIGHTS))
    return red.add_(green).add_(blue).expand(-1, copies or images.shape[1], -1, -1).contiguous()


def blend(images: Tensor, others: Tensor, amounts: Tensor) -> Tensor:
    """amounts · images + (1 − amounts) · others, one amount per image, clipped to 0 … 255."""
    shares = amounts[:, None, None, None]
    return images.mul(shares).add_(others * (1 - shares)).clamp_(0, 255)


def compute_blur_radius(images: Tensor, kernel: float) -> int:
    """Pixels on each side of the center of a kernel that covers a share of the shorter side, as in SimCLR."""
    side = min(images.shape[-2:])
    return min(int(side * kernel) // 2, side - 1)


def gaussian_blur(images: Tensor, sigmas: NDArray[np.float64], radius: int) -> Tensor:
    """Blur by torchvision's kernel of 2·radius + 1 pixels, cut off at four sigmas, mirrored at the border."""
    radii = np.minimum(radius, np.ceil(MAX_SIGMAS * sigmas)).astype(np.int64)
    blurred = torch.empty_like(images)
    for each in sorted(set(radii.tolist())):
        rows, distances = np.flatnonzero(radii == each), np.arange(each + 1)
        weights = np.exp(-0.5 * (distances / sigmas[rows, None]) ** 2)
        weights /= 2 * weights.sum(1, keepdims=True) - 1  # both sides of the kernel; the center, 1, counts once
        kernels, indices = torch.from_numpy(weights.astype(np.float32))[:, :, None, None, None], torch.from_numpy(rows)
        padded = F.pad(images.index_select(0, indices), (each,) * 4, mode="reflect")
        blurred.index_copy_(0, indices, weigh_neighbors(weigh_neighbors(padded, kernels, 2), kernels, 3))
    return blurred


def weigh_neighbors(padded: Tensor, kernels: Tensor, axis: int) -> Tensor:
    """The sum of shifted images weighed by one half of symmetric kernels, (N, radius + 1, 1, 1, 1)."""
    radius = kernels.shape[1] - 1
    size = padded.shape[axis] - 2 * radius
    total = padded.narrow(axis, radius, size) * kernels[:, 0]
    pairs = torch.empty_like(total)
    for distance in range(1, radius + 1):
        before, after = (padded.narrow(axis, radius + shift, size) for shift in (-distance, distance))
        total.add_(torch.add(before, after, out=pairs).mul_(kernels[:, distance]))
    return total


def solarize(pixels: Tensor, threshold: int) -> Tensor:
    """Invert the values of at least the threshold, uint8."""
    return torch.where(pixels >= threshold, 255 - pixels, pixels)


JITTER_OPERATIONS = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


def resize_crop(crop: NDArray[np.uint8], preprocessing: Preprocessing, *, flip: bool) -> Tensor:
    """A crop (rows, columns, 1 or 3) at the size of the view: uint8 (1 or 3, h, w), gray if there is one mean."""
    if get_pillow_mode(preprocessing) == "L" and crop.shape[2] == 3:
        crop = np.asarray(Image.fromarray(crop).convert("L"))[:, :, None]
    # a copy: torch warns about arrays that cannot be written, and resizes contiguous ones faster
    pixels = torch.from_numpy(crop.copy()).permute(2, 0, 1)[None]
    size, mode = pair(preprocessing.image_size), preprocessing.interpolation
    pixels = F.interpolate(pixels, size, mode=mode, antialias=True)[0]
    return pixels.flip(-1) if flip else pixels


def recolor(pixels: Tensor, augmentation: ViewAugmentation, keys: NDArray[np.uint64]) -> None:
    """Change the colors of crops, uint8 (N, C, h, w), in place, with one key each."""
    draws = ColorDraws(augmentation, keys)
    chosen = np.flatnonzero(draws.jitter | draws.gray | draws.blur)
    for rows in np.array_split(chosen, max(1, chosen.size * pixels[:1].numel() // CHUNK_VALUES)):
        # numpy copies rows of bytes at once, torch one by one
        images = torch.from_numpy(pixels.numpy()[rows]).float()
        images = jitter_gray_and_blur(images, augmentation, draws, rows)
        pixels.numpy()[rows] = images.round_().to(torch.int16).to(torch.uint8).numpy()  # faster than without int16
    rows = np.flatnonzero(draws.solarize)
    pixels.numpy()[rows] = solarize(torch.from_numpy(pixels.numpy()[rows]), augmentation.solarize_threshold).numpy()


class ColorDraws:
    """The random choices of N images, by their keys."""

    def __init__(self, augmentation: ViewAugmentation, keys: NDArray[np.uint64]) -> None:
        jitter, gray, blur, sigma, inverted, *rest = uniform_randoms(keys, 13, COLOR_PURPOSE).T
        factors, order = np.stack(rest[:4], 1), np.stack(rest[4:], 1)
        strengths = np.array(augmentation.jitter_strengths)
        lowest = np.append(np.maximum(1 - strengths[:3], 0), -augmentation.hue)
        highest = np.append(1 + strengths[:3], augmentation.hue)
        self.jitter = (jitter < augmentation.jitter_rate) & bool(strengths.any())
        self.amounts = torch.from_numpy((lowest + factors * (highest - lowest)).astype(np.float32))  # (N, 4)
        order = np.argsort(order, axis=1, kind="stable")
        self.order = np.where(self.jitter[:, None] & (strengths > 0)[order], order, NO_OPERATION)  # (N, 4)
        self.gray = gray < augmentation.gray_rate
        self.blur = blur < augmentation.blur_rate
        low, high = augmentation.blur_sigma
        self.sigmas = low + sigma * (high - low)
        self.solarize = inverted < augmentation.solarize_rate


def jitter_gray_and_blur(
    images: Tensor, augmentation: ViewAugmentation, draws: ColorDraws, chosen: NDArray[np.int64]
) -> Tensor:
    """Change the chosen images, float (N, C, h, w); values are rounded once, afterwards."""
    for numbers in draws.order[chosen].T:
        for number in sorted(set(numbers.tolist()) - {NO_OPERATION}):
            rows = np.flatnonzero(numbers == number)
            adjust = partial(JITTER_OPERATIONS[number], amounts=draws.amounts[chosen[rows], number])
            images = change_rows(images, rows, adjust)
    images = change_rows(images, np.flatnonzero(draws.gray[chosen]), to_gray)
    radius, rows = compute_blur_radius(images, augmentation.blur_kernel), np.flatnonzero(draws.blur[chosen])
    if radius == 0:
        return images
    return change_rows(images, rows, partial(gaussian_blur, sigmas=draws.sigmas[chosen[rows]], radius=radius))


def change_rows(images: Tensor, rows: NDArray[np.int64], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `change` to these rows; in place, except if all rows change."""
    if len(rows) == 0:
        return images
    if len(rows) == len(images):
        return change(images)
    indices = torch.from_numpy(rows)
    return images.index_copy_(0, indices, change(images.index_select(0, indices)))


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
        """A view, for a ViewAugmentation before its colors: uint8 (C, h, w), or (1, h, w) of a gray image."""
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
        """The V views of one image with these keys, before their colors: uint8 (C or 1, h, w)."""
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
                recolor(pixels.flatten(0, 1), view.augmentation, own_keys.reshape(-1))
            tensors[view.name] = pixels
        return tensors, {view.name: keys[view.part] for view in self.views}


def is_pixel_array(source: Any) -> bool:
    return isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.shape[2:] in ((1,), (3,))


def crop_array(pixels: NDArray[np.uint8], choose: Callable[[int, int], Sequence[SizedBox]]) -> list[NDArray[np.uint8]]:
    boxes = [each.box for each in choose(pixels.shape[0], pixels.shape[1])]
    return [pixels[top : top + height, left : left + width] for top, left, height, width in boxes]
