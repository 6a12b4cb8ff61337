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
SUM_STEPS = 256  # steps per level that values are rounded to in a sum; it is then exact in any order
MAX_SIGMAS = 4  # distance from its centre where a blur is cut off; the rest of the kernel sums to 6e-5


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    return images.mul(factors[:, None, None, None]).clamp_(0, 255)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Blend every image with the mean of its grey values."""
    grey = to_grey(images)
    steps = grey.mul(SUM_STEPS).round_().flatten(1).sum(1, dtype=torch.float64)
    means = (steps / (SUM_STEPS * grey[0].numel())).float()
    return blend(images, means[:, None, None, None], factors)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Blend every image with its grey values."""
    return blend(images, to_grey(images), factors) if images.shape[1] == 3 else images


def adjust_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turn the hue of the HSV colours, by a share of the colour circle per image."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    largest, smallest = torch.maximum(red, green), torch.minimum(red, green)
    largest, smallest = torch.maximum(largest, blue), torch.minimum(smallest, blue)
    chroma = largest - smallest
    divisor = torch.where(chroma == 0, 1, chroma)
    sixths = torch.where(
        largest == red,
        (green - blue).div_(divisor),
        torch.where(largest == green, (blue - red).div_(divisor).add_(2), (red - green).div_(divisor).add_(4)),
    )
    sixths = sixths.add_(shifts[:, None, None] * 6).remainder_(6)
    shares = (  # of the chroma in each channel, for a hue from 0 to 6
        (sixths - 3).abs_().sub_(1),
        (sixths - 2).abs_().neg_().add_(2),
        (sixths - 4).abs_().neg_().add_(2),
    )
    return torch.stack([share.clamp_(0, 1).mul_(chroma).add_(smallest) for share in shares], 1)


def to_grey(images: Tensor) -> Tensor:
    """One grey channel: (N, 1, h, w)."""
    if images.shape[1] == 1:
        return images
    red, green, blue = (images[:, channel : channel + 1] * weight for channel, weight in enumerate(GREY_WEIGHTS))
    return red.add_(green).add_(blue)


def blend(images: Tensor, others: Tensor, factors: Tensor) -> Tensor:
    """`factors` of the images, the rest of the others, within 0 and 255."""
    shares = factors[:, None, None, None]
    return images.mul(shares).add_(others * (1 - shares)).clamp_(0, 255)


def compute_blur_radius(size: tuple[int, int], kernel: float) -> int:
    """Pixels on each side of the centre of a kernel that covers a share of the shorter side, as in SimCLR."""
    side = min(size)
    return min(int(side * kernel) // 2, side - 1)


def gaussian_blur(images: Tensor, sigmas: NDArray[np.float64], radius: int) -> Tensor:
    """Blur by torchvision's kernel of 2·radius + 1 pixels, cut off at four sigmas, mirrored at the border."""
    radii = np.minimum(radius, np.ceil(MAX_SIGMAS * sigmas)).astype(np.int64)
    blurred = images.clone()
    for each in sorted(set(radii.tolist()) - {0}):
        rows = torch.from_numpy(np.flatnonzero(radii == each))
        distances = np.arange(each + 1)
        weights = np.exp(-0.5 * (distances / sigmas[radii == each, None]) ** 2)
        weights /= (2 * weights.sum(1, keepdims=True)) - 1  # the centre is there once
        kernels = torch.from_numpy(weights.astype(np.float32))[:, :, None, None, None]
        padded = F.pad(images[rows], (each,) * 4, mode="reflect")
        blurred[rows] = weigh_neighbours(weigh_neighbours(padded, kernels, 2), kernels, 3)
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
