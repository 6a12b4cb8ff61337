"""Convolutions that make tokens, or place them. B batch, C channels, n = h·w tokens, D width."""

import math

from torch import Tensor, nn

from vitrail.layers.positions import Grid
from vitrail.models.parts.stages import flatten_map, unflatten_map

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


def init_as_pvt(model: nn.Module) -> None:
    """Linear maps small, convolutions scaled by their outputs, norms the identity, as in PVT's code and its heirs'."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Conv2d):
            outputs = module.weight[0, 0].numel() * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / outputs))
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
