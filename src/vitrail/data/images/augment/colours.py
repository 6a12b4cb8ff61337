"""Changes of colours for a batch, as torchvision's on floats: float (N, C, h, w) from 0 to 255, one amount per image.

Every operation rounds each value by itself, and sums are exact. So an image has the same values in a batch of any
size, and with any number of threads.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

GREY_WEIGHTS = (0.2989, 0.587, 0.114)  # of red, green and blue, as in torchvision
SUM_STEPS = 256  # per level: values in a sum are rounded to multiples of 1 / 256, so that it is exact in any order
MIN_CHROMA = 1e-6  # replaces the chroma 0 of a grey pixel as a divisor; its hue is not used
MAX_SIGMAS = 4  # distance from its centre where a blur is cut off; the rest of the kernel sums to 6e-5


def adjust_brightness(images: Tensor, amounts: Tensor) -> Tensor:
    return images.mul(amounts[:, None, None, None]).clamp_(0, 255)


def adjust_contrast(images: Tensor, amounts: Tensor) -> Tensor:
    """Blend every image with the mean of its grey values."""
    grey = to_grey(images, copies=1)
    steps = grey.mul(SUM_STEPS).round_().flatten(1).sum(1, dtype=torch.float64)
    means = (steps / (SUM_STEPS * grey[0].numel())).float()
    return blend(images, means[:, None, None, None], amounts)


def adjust_saturation(images: Tensor, amounts: Tensor) -> Tensor:
    """Blend every image with its grey values."""
    return blend(images, to_grey(images, copies=1), amounts) if images.shape[1] == 3 else images


def adjust_hue(images: Tensor, amounts: Tensor) -> Tensor:
    """Rotate the hue of the HSV colours by a share of the colour circle, one share per image."""
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
    for channel, (centre, sign, offset) in enumerate(((3, 1, -1), (2, -1, 2), (4, -1, 2))):
        share = (sixths - centre).abs_().mul_(sign).add_(offset).clamp_(0, 1)  # of the chroma
        torch.add(share.mul_(chroma), smallest, out=changed[:, channel])
    return changed


def to_grey(images: Tensor, copies: int | None = None) -> Tensor:
    """Grey images with equal channels: as many as before, or `copies`."""
    if images.shape[1] == 1:
        return images
    red, green, blue = (images[:, channel : channel + 1] * weight for channel, weight in enumerate(GREY_WEIGHTS))
    return red.add_(green).add_(blue).expand(-1, copies or images.shape[1], -1, -1).contiguous()


def blend(images: Tensor, others: Tensor, amounts: Tensor) -> Tensor:
    """amounts · images + (1 − amounts) · others, one amount per image, clipped to 0 … 255."""
    shares = amounts[:, None, None, None]
    return images.mul(shares).add_(others * (1 - shares)).clamp_(0, 255)


def compute_blur_radius(images: Tensor, kernel: float) -> int:
    """Pixels on each side of the centre of a kernel that covers a share of the shorter side, as in SimCLR."""
    side = min(images.shape[-2:])
    return min(int(side * kernel) // 2, side - 1)


def gaussian_blur(images: Tensor, sigmas: NDArray[np.float64], radius: int) -> Tensor:
    """Blur by torchvision's kernel of 2·radius + 1 pixels, cut off at four sigmas, mirrored at the border."""
    radii = np.minimum(radius, np.ceil(MAX_SIGMAS * sigmas)).astype(np.int64)
    blurred = torch.empty_like(images)
    for each in sorted(set(radii.tolist())):
        rows, distances = np.flatnonzero(radii == each), np.arange(each + 1)
        weights = np.exp(-0.5 * (distances / sigmas[rows, None]) ** 2)
        weights /= 2 * weights.sum(1, keepdims=True) - 1  # both sides of the kernel; the centre, 1, counts once
        kernels, indices = torch.from_numpy(weights.astype(np.float32))[:, :, None, None, None], torch.from_numpy(rows)
        padded = F.pad(images.index_select(0, indices), (each,) * 4, mode="reflect")
        blurred.index_copy_(0, indices, weigh_neighbours(weigh_neighbours(padded, kernels, 2), kernels, 3))
    return blurred


def weigh_neighbours(padded: Tensor, kernels: Tensor, axis: int) -> Tensor:
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
