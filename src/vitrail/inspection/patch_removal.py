"""What a model answers without some of the patches: their tokens are left out of the sequence.

B images, N = E + n tokens: E prefix tokens and n = h·w patches, D width, K shares of the patches.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.inspection.capture import find_attention_layers, force_eager
from vitrail.inspection.occlusion import grey_out_patches, select_patches_to_remove
from vitrail.layers.attention import Attention, SelfAttention

PROJECTIONS_WITHOUT_POSITIONS = (Attention.project, SelfAttention.project)  # another may know of places


def can_drop_tokens(model: Any) -> bool:
    """Whether a token knows its place by itself; else the layers need the whole grid, and patches are greyed."""
    layers = find_attention_layers(model)
    plain = all(
        type(each).project in PROJECTIONS_WITHOUT_POSITIONS and getattr(each, "positions", None) is None
        for each in layers
    )
    return plain and hasattr(model, "blocks") and getattr(model.config, "positions_at", "stem") == "stem"


@torch.no_grad()
def predict_without_patches(model: Any, pixels: Tensor, gone: NDArray[np.bool_]) -> Tensor:
    """Logits (B, classes) of images (B, C, H, W) without patches (B, h, w), of each image as many."""
    if np.ptp(gone.sum((1, 2))):
        raise ConfigError(f"{gone.sum((1, 2)).tolist()} patches of the images to leave out; expected as many of each")
    if not can_drop_tokens(model):
        kept = np.stack([grey_out_patches(*each) for each in zip(pixels.float().cpu().numpy(), gone, strict=True)])
        return model(torch.from_numpy(kept).to(pixels.device, pixels.dtype))
    patches = torch.from_numpy(~gone).flatten(1).nonzero()[:, 1].view(len(pixels), -1)  # (B, those that stay)

    def leave_out(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens: Tensor = given[0]  # (B, N, D)
        first = tokens.shape[1] - gone[0].size
        index = first + patches[..., None].to(tokens.device).expand(-1, -1, tokens.shape[2])
        return torch.cat([tokens[:, :first], tokens.gather(1, index)], dim=1), *given[1:]

    with model.blocks[0].register_forward_pre_hook(leave_out), force_eager(model):
        return model(pixels)


@torch.no_grad()
def probabilities_without_patches(
    model: Any, pixels: Tensor, attended: NDArray[Any], classes: Tensor, shares: Sequence[float], *, most: bool
) -> NDArray[Any]:
    """Of the classes, (B,), when shares of the patches are removed, by (B, h, w) the most or least attended: (B, K)."""
    found = list[NDArray[Any]]()
    for share in shares:
        logits = predict_without_patches(
            model, pixels, np.stack([select_patches_to_remove(each, share, most) for each in attended])
        )
        found.append(logits.float().softmax(-1).gather(1, classes[:, None])[:, 0].cpu().numpy())
    return np.stack(found, axis=1)
