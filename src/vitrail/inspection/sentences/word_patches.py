"""What a captioner looks at when it writes each word.

B images, W words, L layers, H heads, M tokens of a caption, N tokens of an image: prefix tokens and h×w patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.layers.positions import Grid
from vitrail.models.base.checks import pair
from vitrail.models.base.text_contract import Memory
from vitrail.models.text.caption_model import CaptionModel


@dataclass(frozen=True, eq=False)
class WordAttention:
    """The words of a caption, and the attention with which each was written."""

    words: tuple[str, ...]
    maps: NDArray[Any]  # (W, L, H, h, w): shares of the attention; prefix tokens have the rest

    def average(self, layer: int | None = None) -> NDArray[Any]:
        """One map per word: the mean over the heads of a layer, or of all layers: (W, h, w)."""
        chosen = self.maps if layer is None else self.maps[:, [self.check_layer(layer)]]
        return chosen.mean((1, 2))

    def check_layer(self, layer: int) -> int:
        layers = self.maps.shape[1]
        if not -layers <= layer < layers:
            raise ConfigError(f"`layer` is {layer}; expected 0 to {layers - 1}, the layers of the decoder")
        return layer


def find_patch_grid(model: CaptionModel, preprocessing: Preprocessing, tokens: int) -> Grid:
    """Rows and columns of the patches of an image; an error if the tokens are not those of a grid."""
    stride, (rows, columns) = model.encoder.levels[-1].stride, pair(preprocessing.image_size)
    grid = rows // stride[0], columns // stride[1]
    if grid[0] * grid[1] + model.encoder.prefix != tokens:
        raise ConfigError(
            f"{tokens} tokens of an image; expected {grid[0]}×{grid[1]} patches to draw the attention over them: use "
            "another encoder"
        )
    return grid


def compute_cross_attention(model: CaptionModel, memory: Memory, target: Tensor, grid: Grid) -> NDArray[np.float32]:
    """The attention with which each token after `target` (B, M) is predicted, over the patches: (B, M, L, H, h, w)."""
    if reason := model.decoder.no_maps_reason:
        raise ConfigError(f"this {type(model.decoder).__name__} has no attention to the image: {reason}")
    found = model.decoder.attention_maps(memory, target).cross  # (B, L, H, M, N)
    if found is None:
        raise ConfigError(f"this {type(model.decoder).__name__} has no attention to the image; use another decoder")
    patches = found[..., model.encoder.prefix :].permute(0, 3, 1, 2, 4)
    return patches.unflatten(-1, grid).float().cpu().numpy()


@torch.no_grad()
def attend_words(
    model: CaptionModel, tokenizer: TextTokenizer, memory: Memory, ids: Sequence[int], grid: Grid
) -> WordAttention:
    """The attention of one image's caption, given by its tokens; a word of several pieces has the mean of theirs."""
    target = torch.tensor([[tokenizer.start, *ids]], device=memory.tokens.device)
    maps = compute_cross_attention(model, memory, target, grid)[0]
    starts = [place for place, token in enumerate(ids) if not place or tokenizer.starts_word(token)]
    words = [range(start, end) for start, end in pairwise([*starts, len(ids)])]
    return WordAttention(
        tuple(tokenizer.decode(ids[word.start : word.stop]).strip() for word in words),
        np.stack([maps[word.start : word.stop].mean(0) for word in words]) if words else maps[:0],
    )
