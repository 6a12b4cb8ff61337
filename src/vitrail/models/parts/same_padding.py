"""TensorFlow's padding of convolutions and pools, which weights trained there need. B batch, C channels."""

from math import ceil, inf

import torch.nn.functional as F
from torch import Tensor, nn


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
