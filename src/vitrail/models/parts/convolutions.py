"""Convolutions that make tokens or add their positions, TensorFlow's padding, and convolutions of standardized filters.

B batch, C channels, n = h·w tokens, D width.
"""

from math import ceil, inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.layers.positions import Grid
from vitrail.models.parts.stages import flatten_map, unflatten_map


class MaxPoolSame(nn.Module):
    """3×3 with stride 2: (B, C, H, W) → (B, C, H/2, W/2)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(pad_same(x, 3, 2, -inf), 3, 2)


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """TensorFlow's SAME padding: ⌈size/stride⌉ outputs, the odd pixel of padding at the end."""
    missing = [max((ceil(size / stride) - 1) * stride + kernel - size, 0) for size in x.shape[-2:]]
    (top, bottom), (left, right) = ((m // 2, m - m // 2) for m in missing)
    return F.pad(x, (left, right, top, bottom), value=value) if any(missing) else x


class ConvSame(nn.Conv2d):
    """A convolution with this padding: (B, C, H, W) → (B, D, ⌈H/stride⌉, ⌈W/stride⌉)."""

    def __init__(self, channels: int, width: int, kernel: int, stride: int, *, groups: int = 1, bias: bool) -> None:
        super().__init__(channels, width, kernel, stride, groups=groups, bias=bias)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.Conv2d
        return super().forward(pad_same(input, self.kernel_size[0], self.stride[0]))


class StdConv2d(nn.Module):
    """A convolution whose filters are standardized to mean 0 and deviation 1 (Qiao 2019); no bias.

    Its padding is TensorFlow's, or `symmetric`. What filters are divided by is √(variance + eps), or √variance + eps.
    """

    def __init__(
        self,
        width: int,
        out_width: int,
        kernel: int,
        stride: int = 1,
        *,
        symmetric: bool = False,
        eps: float = 1e-8,
        eps_in_root: bool = True,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.symmetric = kernel, stride, symmetric
        self.eps, self.eps_in_root = eps, eps_in_root
        self.weight = nn.Parameter(torch.zeros(out_width, width, kernel, kernel))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()  # eps and small variances underflow in half precision
        variance, mean = torch.var_mean(weight, dim=(1, 2, 3), keepdim=True, correction=0)
        inverse = torch.rsqrt(variance + self.eps) if self.eps_in_root else 1 / (variance.sqrt() + self.eps)
        weight = ((weight - mean) * inverse).to(x.dtype)
        if self.symmetric:
            return F.conv2d(x, weight, stride=self.stride, padding=self.kernel // 2)
        return F.conv2d(pad_same(x, self.kernel, self.stride), weight, stride=self.stride)


NORM_EPS = 1e-5


class ConvEmbed(nn.Module):
    """A convolution whose places are the tokens, then a norm: (B, C, H, W) → (B, n, D) and their grid."""

    def __init__(
        self, channels: int, width: int, kernel: int, stride: int, padding: int = 0, norm_eps: float = NORM_EPS
    ) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel, stride, padding)
        self.norm = nn.LayerNorm(width, norm_eps)

    def forward(self, images: Tensor) -> tuple[Tensor, Grid]:
        x = self.proj(images)
        return self.norm(flatten_map(x)), (x.shape[2], x.shape[3])


class Peg(nn.Module):
    """x + a 3×3 convolution within each channel, which sees the border and so the place (Chu 2021): (B, n, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=width))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return x + flatten_map(self.proj(unflatten_map(x, grid)))
