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
from vitrail.inspection.capture import as_written, attention_layers
from vitrail.inspection.occlusion import greyed, removed
from vitrail.layers.attention import Attention, SelfAttention

PLAIN = (Attention.project, SelfAttention.project)  # another may know of places


def drops_tokens(model: Any) -> bool:
    """Whether a token knows its place by itself; else the layers need the whole grid, and patches are greyed."""
    layers = attention_layers(model)
    plain = all(type(each).project in PLAIN and getattr(each, "positions", None) is None for each in layers)
    return plain and hasattr(model, "blocks") and getattr(model.config, "positions_at", "stem") == "stem"


@torch.no_grad()
def answer_without(model: Any, pixels: Tensor, gone: NDArray[np.bool_]) -> Tensor:
    """Logits (B, classes) of images (B, C, H, W) without patches (B, h, w), of each image as many."""
    if np.ptp(gone.sum((1, 2))):
        raise ConfigError(f"{gone.sum((1, 2)).tolist()} patches of the images to leave out; expected as many of each")
    if not drops_tokens(model):
        kept = np.stack([greyed(*each) for each in zip(pixels.float().cpu().numpy(), gone, strict=True)])
        return model(torch.from_numpy(kept).to(pixels.device, pixels.dtype))
    patches = torch.from_numpy(~gone).flatten(1).nonzero()[:, 1].view(len(pixels), -1)  # (B, those that stay)

    def leave_out(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens: Tensor = given[0]  # (B, N, D)
        first = tokens.shape[1] - gone[0].size
        index = first + patches[..., None].to(tokens.device).expand(-1, -1, tokens.shape[2])
        return torch.cat([tokens[:, :first], tokens.gather(1, index)], dim=1), *given[1:]

    with model.blocks[0].register_forward_pre_hook(leave_out), as_written(model):
        return model(pixels)


@torch.no_grad()
def probabilities(
    model: Any, pixels: Tensor, attended: NDArray[Any], classes: Tensor, shares: Sequence[float], *, most: bool
) -> NDArray[Any]:
    """Of the classes, (B,), when shares of the patches are removed, by (B, h, w) the most or least attended: (B, K)."""
    found = list[NDArray[Any]]()
    for share in shares:
        logits = answer_without(model, pixels, np.stack([removed(each, share, most) for each in attended]))
        found.append(logits.float().softmax(-1).gather(1, classes[:, None])[:, 0].cpu().numpy())
    return np.stack(found, axis=1)
