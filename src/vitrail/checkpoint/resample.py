"""Resample weights for another resolution: position tables by the rule of their authors, patch kernels as in FlexiViT.

The rules are not interchangeable: from 14×14 to 24×24 they differ by up to a third of the magnitude of the table.
"""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.errors import unknown_name_error
from vitrail.layers.positions import Grid, resample

ResamplingPolicy = Literal["timm", "deit", "google", "torchvision", "dino"]
INTERPOLATION_RULES: dict[ResamplingPolicy, dict[str, Any]] = {
    "timm": {},  # bicubic and antialiased, like a dynamic model at run time
    "deit": {"mode": "bicubic", "align_corners": False},  # also MAE, T2T, transformers
    "google": {"mode": "bilinear", "align_corners": True},  # scipy's zoom of order 1; also big_vision
    "torchvision": {"mode": "bicubic", "align_corners": True},
    "dino": {"mode": "bicubic", "align_corners": False},  # with a slightly larger scale, see below
}


def resample_positions(table: Tensor, old: Grid, new: Grid, policy: ResamplingPolicy = "timm") -> Tensor:
    """Resample a table (T, E + h·w, D) to another grid; the E prefix rows are kept."""
    if policy not in INTERPOLATION_RULES:
        raise unknown_name_error("position policy", policy, get_args(ResamplingPolicy))
    if old == new or policy == "timm":
        return resample(table, old, new)
    prefix, patches = table.tensor_split([table.shape[1] - old[0] * old[1]], dim=1)
    image = patches.unflatten(1, old).permute(0, 3, 1, 2).float()
    if policy == "dino":  # its authors added 0.1 against rounding down, which moves all samples a little
        scale = ((new[0] + 0.1) / old[0], (new[1] + 0.1) / old[1])
        image = F.interpolate(image, scale_factor=scale, **INTERPOLATION_RULES[policy])
    else:
        image = F.interpolate(image, size=new, **INTERPOLATION_RULES[policy])
    return torch.cat((prefix, image.flatten(2).transpose(1, 2).to(table.dtype)), dim=1)


def resample_map(table: Tensor, old: Grid, new: Grid, policy: ResamplingPolicy = "timm") -> Tensor:
    """Resample a table (…, h, w) whose last axes are the grid: (1, D, h, w), or offsets of H heads (H, 2h−1, 2w−1)."""
    rows = table.reshape(1, -1, old[0] * old[1]).transpose(1, 2)  # (1, h·w, D)
    return resample_positions(rows, old, new, policy).transpose(1, 2).reshape(*table.shape[:-2], *new)


def resample_distances(table: Tensor, old: Grid, new: Grid, policy: ResamplingPolicy = "timm") -> Tensor:
    """Resample a table by distance, (H, h, w), as one by offset to both sides, in which distance 0 stays in place."""
    from vitrail.models.parts.windows import mirror_offsets  # few models have such tables

    offsets = resample_map(
        mirror_offsets(table), (2 * old[0] - 1, 2 * old[1] - 1), (2 * new[0] - 1, 2 * new[1] - 1), policy
    )
    return offsets[:, new[0] - 1 :, new[1] - 1 :].contiguous()


def resample_projection(table: Tensor, old: Grid, new: Grid, policy: ResamplingPolicy = "timm") -> Tensor:
    """Resample weights (T, E + h·w, D) of sums over tokens; with more patches each has a smaller weight."""
    rows = table.shape[1] - old[0] * old[1]
    prefix, patches = resample_positions(table, old, new, policy).tensor_split([rows], dim=1)
    return torch.cat((prefix, patches * (old[0] * old[1] / (new[0] * new[1]))), dim=1)


def resample_patch_kernel(kernel: Tensor, new: Grid) -> Tensor:
    """Resize a patch kernel (D, C, P, Q) to another patch size (Beyer 2022, FlexiViT).

    B is the matrix that resizes a patch. The output of the new kernel w' for a resized patch should be close to that of
    the old kernel for the patch itself: (Bx)·w' ≈ x·w, so w' = pinv(Bᵀ)·w.
    """
    old = (kernel.shape[2], kernel.shape[3])
    if old == new:
        return kernel
    pixels = torch.eye(old[0] * old[1]).unflatten(1, old)[:, None]  # one image per pixel of the old patch
    resize = F.interpolate(pixels, size=new, mode="bicubic", antialias=True).flatten(1)  # Bᵀ: (old pixels, new pixels)
    flat = kernel.float().flatten(2) @ torch.linalg.pinv(resize).T
    return flat.unflatten(2, new).to(kernel.dtype)
