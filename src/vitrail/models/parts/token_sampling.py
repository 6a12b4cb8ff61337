"""Adaptive token sampling (Fayyaz 2021, arXiv 2111.15667): layers drop patches that the class token does not need.

How many remain depends on the image: few if the attention of the class token is concentrated. There is nothing to
train. As defined for one image: a batch is padded and masked, so that it changes nothing. B batch, E prefix tokens,
n patches, N = E + n tokens, M the most patches of an image that remain, D width, H heads, K width of a head.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import SelfAttention, attention, attention_weights, merge_heads
from vitrail.layers.block import Block
from vitrail.layers.positions import Grid
from vitrail.models.base.contract import ImageModel, unwrap_compiled
from vitrail.models.parts.encoder import list_plain_blocks

NO_GRID_REASON = "its layers drop tokens, more or fewer for each image"
SUPPORTED_MODELS_HINT = (
    "expected a ViT, DeiT or hybrid whose head reads the class token, and that adds its positions once, before the "
    "first block"
)


def add_token_sampling(model: nn.Module, first: int = 3, samples: int | None = None) -> ImageModel:
    """A copy that shares the model's weights and drops patches in every block from number `first` on.

    A block takes at most `samples` patches, by default as many as an image has; often the same patch several times.
    The copy has logits; tokens and maps of a complete grid are those of the model it was made from.
    """
    model = unwrap_compiled(model)
    patches, depth = count_patches_and_blocks(model)
    if type(first) is not int or not 0 <= first < depth:
        raise ConfigError(f"first is {first!r}; expected 0 to {depth - 1}, a block of the model")
    if samples is not None and (type(samples) is not int or not 2 <= samples <= patches):
        raise ConfigError(f"samples is {samples!r}; expected 2 to {patches}, the patches of an image")
    tensors: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    sampling: Any = copy.deepcopy(model, tensors)  # tensors in deepcopy's memo are not copied
    sampling.blocks = nn.ModuleList([SamplingBlocks(list(sampling.blocks), first, samples, sampling.prefix)])
    sampling.levels = (replace(sampling.levels[0], blocks=("blocks.0",)),)
    sampling.takes_mask = False
    sampling.no_maps_reason = sampling.no_export_reason = NO_GRID_REASON
    return sampling


def count_patches_and_blocks(model: nn.Module) -> tuple[int, int]:
    """The numbers of patches and blocks of a model that supports sampling; an error for other models."""
    blocks = list_plain_blocks(model, SamplingBlocks, "sample", SUPPORTED_MODELS_HINT)
    assert isinstance(model, ImageModel)
    if model.no_dropping_reason:
        raise ConfigError(f"{model.no_dropping_reason}, so none can be dropped; {SUPPORTED_MODELS_HINT}")
    if not model.classifier_tokens or "class" not in model.prefix_tokens[:1]:
        raise ConfigError(
            f"the head of this {type(model).__name__} does not read a class token; {SUPPORTED_MODELS_HINT}"
        )
    return model.grid[0] * model.grid[1], len(blocks)


class SamplingBlocks(nn.Module):
    """All blocks of an encoder; from block `first` on, each drops patches: (B, N, D) → the first `queries` tokens."""

    def __init__(self, blocks: list[Block], first: int, samples: int | None, prefix: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.first, self.samples, self.prefix = first, samples, prefix

    def forward(
        self, x: Tensor, grid: Grid | None = None, queries: int | None = None, mask: Tensor | None = None
    ) -> Tensor:
        assert mask is None, "dropped tokens have no places in a mask"
        if queries is None:
            raise ConfigError(f"this model does not return a token for every patch: {NO_GRID_REASON}; use its logits")
        *_, (x, _) = self.run(x, grid)
        return x[:, :queries]

    def run(self, x: Tensor, grid: Grid | None) -> Iterator[tuple[Tensor, Tensor]]:
        """The tokens after each block, (B, E + M, D), and the patches they are, (B, M); −1 for padding."""
        patches = x.shape[1] - self.prefix
        places, samples = torch.arange(patches, device=x.device).expand(len(x), -1), self.samples or patches
        blocks: list[Any] = list(self.blocks)
        for number, block in enumerate(blocks):
            if number < self.first:
                x = block(x, grid)
            else:
                x, places = run_sampling_block(block, x, places, samples)
            yield x, places


def run_sampling_block(block: Any, x: Tensor, places: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """A block in which the tokens that remain attend to all; the places of the patches as in `SamplingBlocks.run`."""
    attn: SelfAttention = block.attn
    prefix = x.shape[1] - places.shape[1]
    real = torch.cat([places.new_ones(len(x), prefix, dtype=torch.bool), places >= 0], dim=1)  # (B, N)
    q, k, v, _ = attn.project(block.norm1(x))
    scores = score_tokens(q[:, :, :1].float(), k.float(), v.float(), real)  # half precision would merge small ones
    kept = sample_patches(scores[:, prefix:], places >= 0, samples)
    order = kept.long().argsort(dim=1, descending=True, stable=True)[:, : int(kept.sum(1).max())]  # (B, M)
    places = places.gather(1, order).masked_fill(~kept.gather(1, order), -1)
    first = torch.arange(prefix, device=x.device).expand(len(x), -1)
    rows = torch.cat([first, prefix + order], dim=1)  # the tokens that remain: (B, E + M)
    q = q.gather(2, rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
    mask = real[:, None, None].expand(-1, -1, rows.shape[1], -1)
    y = attn.proj(merge_heads(attention(q, k, v, mask, attn.dropout if attn.training else 0.0)))
    x = x.gather(1, rows[..., None].expand(-1, -1, x.shape[2]))
    x = x + block.drop_path(block.ls1(block.drop(y)))
    return x + block.drop_path(block.ls2(block.mlp(block.norm2(x)))), places


@torch.no_grad()
def score_tokens(query: Tensor, keys: Tensor, values: Tensor, real: Tensor) -> Tensor:
    """How much of each token the class token takes: its attention, over all heads, times the length of the value.

    (B, H, 1, K), (B, H, N, K), (B, H, N, K), (B, N) → (B, N)
    """
    shares = attention_weights(query, keys, real[:, None, None])[:, :, 0].sum(1)
    return shares * values.transpose(1, 2).flatten(2).norm(dim=-1)


@torch.no_grad()
def sample_patches(scores: Tensor, real: Tensor, samples: int) -> Tensor:
    """Which patches remain: those nearest to evenly spaced values of the cumulative score: (B, n), (B, n) → (B, n).

    The values are from the smallest positive one to 1, so that of two patches or more the one of the smallest score is
    dropped; a patch of a large score is nearest to several values.
    """
    ordered, order = scores.masked_fill(~real, -1.0).sort(dim=1)  # padding first
    padding, ordered = ordered < 0, ordered.clamp(min=0)
    cumulative = (ordered / ordered.sum(1, keepdim=True)).cumsum(1)
    low, high = cumulative.masked_fill(padding, 1.0).amin(1, keepdim=True), cumulative[:, -1:]
    cumulative = (cumulative - low) / (high - low).clamp(min=torch.finfo(scores.dtype).tiny)  # 0 … 1
    cumulative = cumulative.masked_fill(padding, -1.0)  # nearest to none
    start = cumulative.masked_fill(cumulative <= 0, 1.0).amin(1, keepdim=True)
    values = start + (1 - start) * torch.linspace(0, 1, samples, device=scores.device, dtype=scores.dtype)
    picked = (values[..., None] - cumulative[:, None]).abs().argmin(2)  # (B, samples)
    return torch.zeros_like(real).scatter(1, order.gather(1, picked), value=True)


def find_kept_patches(sampling: nn.Module, images: Tensor) -> Tensor:
    """Which patches remain after each block of a model that samples tokens: (B, C, H, W) → (B, L, h, w)."""
    if not isinstance(sampling, ImageModel) or not isinstance(blocks := sampling.blocks[0], SamplingBlocks):
        raise ConfigError(f"{type(sampling).__name__} does not sample tokens; expected a model of add_token_sampling")
    with torch.no_grad():
        x, grid = sampling.embed(images)
        kept = list[Tensor]()
        for _, places in blocks.run(x, grid):
            shown = torch.zeros(len(x), 1 + grid[0] * grid[1], dtype=torch.bool, device=x.device)
            kept.append(shown.scatter(1, 1 + places, value=True)[:, 1:].unflatten(1, grid))  # 0 is padding
    return torch.stack(kept, dim=1)
