"""From pixels to tokens: an image cut into patches, each patch a vector.

B batch, C channels, P×Q patch, n = (H/P)·(W/Q) patches row by row, D width.
"""

import torch.nn.functional as F
from torch import Tensor, nn


def patchify(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Cut images into patches and write each as a row, channel by channel: (B, C, H, W) → (B, n, C·P·Q)."""
    b, c, h, w = images.shape
    p, q = patch
    patches = images.reshape(b, c, h // p, p, w // q, q).permute(0, 2, 4, 1, 3, 5)  # (B, H/P, W/Q, C, P, Q)
    return patches.reshape(b, (h // p) * (w // q), c * p * q)


class PatchEmbed(nn.Module):
    """W·patch + b for every patch: (B, C, H, W) → (B, n, D).

    One weight (D, C, P, Q), two ways with equal results: a convolution whose stride is its kernel size, or, with
    `unfold`, a linear map of flattened patches, as in the paper.
    """

    def __init__(self, width: int, patch: tuple[int, int], channels: int = 3, *, unfold: bool = False) -> None:
        super().__init__()
        self.patch, self.unfold = patch, unfold
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        if self.unfold:
            return F.linear(patchify(images, self.patch), self.proj.weight.flatten(1), self.proj.bias)
        return self.proj(images).flatten(2).transpose(1, 2)
