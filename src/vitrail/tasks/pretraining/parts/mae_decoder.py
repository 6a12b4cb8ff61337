"""The decoder of a masked autoencoder (He 2021): a small transformer that predicts the pixels of hidden patches.

B batch, E prefix tokens, K visible and M hidden patches, D width of the encoder, W width of the decoder. The parameters
have the names of the authors' files.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.layers.positions import Grid, sinusoid_2d
from vitrail.models.parts.blocks import make_blocks

NORM_EPSILON = 1e-6


class MaeDecoder(nn.Module):
    """Tokens of the visible patches → pixels of the hidden ones: (B, E + K, D) → (B, M, pixels of a patch)."""

    def __init__(
        self, input_width: int, grid: Grid, pixels: int, *, prefix: int, width: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        self.grid, self.prefix = grid, prefix
        self.decoder_embed = nn.Linear(input_width, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        positions = torch.empty(1, prefix + grid[0] * grid[1], width)
        self.decoder_pos_embed = nn.Parameter(positions, requires_grad=False)  # fixed; files contain it
        rates = (0.0, 0.0, 0.0)
        self.decoder_blocks = make_blocks(depth, width, heads, 4 * width, norm_eps=NORM_EPSILON, rates=rates)
        self.decoder_norm = nn.LayerNorm(width, NORM_EPSILON)
        self.decoder_pred = nn.Linear(width, pixels)
        if not positions.is_meta:
            self.draw_weights()

    @torch.no_grad()
    def draw_weights(self) -> None:
        draw_xavier_weights(self)
        nn.init.normal_(self.mask_token, std=0.02)
        table = make_position_table(self.grid, self.mask_token.shape[-1])
        self.decoder_pos_embed.copy_(F.pad(table, (0, 0, self.prefix, 0)))  # prefix tokens have rows of zeros

    def forward(self, tokens: Tensor, kept: Tensor, hidden: Tensor) -> Tensor:
        """`kept` (B, K) and `hidden` (B, M) are indices of patches, in the order of the tokens and of the output."""
        table, prefix = self.decoder_pos_embed[0], self.prefix
        x = self.decoder_embed(tokens)
        x = torch.cat([x[:, :prefix] + table[:prefix], x[:, prefix:] + table[prefix:][kept]], dim=1)
        # attention ignores the order of tokens: with the hidden ones first, the last block computes only them
        x = torch.cat([self.mask_token + table[prefix:][hidden], x], dim=1)
        *body, last = self.decoder_blocks
        for block in body:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(last(x, None, hidden.shape[1])))


def make_position_table(grid: Grid, width: int) -> Tensor:
    """Sines and cosines in the authors' order: columns, then rows; of each all sines, then all cosines: (n, W)."""
    return sinusoid_2d(grid, width).unflatten(-1, (2, -1, 2)).transpose(-1, -2).flatten(-3)


@torch.no_grad()
def draw_xavier_weights(module: nn.Module) -> None:
    """Draw linear layers and kernels, as linear layers, from Xavier's uniform distribution; biases are zero."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight.flatten(1))  # a view
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
