"""Token merging (Bolya 2022, arXiv 2210.09461): every layer merges the most similar patches, without training.

B batch, E prefix tokens, n patches, N = E + n tokens, R merges per layer, D width, H heads, K width of a head's keys.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import SelfAttention, attention, merge_heads
from vitrail.layers.block import Block
from vitrail.layers.positions import Grid
from vitrail.models.base.contract import ImageModel, unwrap_compiled
from vitrail.models.parts.encoder import list_plain_blocks

SUPPORTED_MODELS_HINT = (
    "expected a ViT, DeiT, hybrid or T2T-ViT that adds its positions once, before the first block; or merge 0"
)


def add_token_merging(model: nn.Module, per_layer: int) -> nn.Module:
    """A copy that shares the model's weights and merges `per_layer` patches in every layer; for 0 the model itself.

    The copy is faster and slightly less accurate. `tokens` keeps its shape: merged tokens appear in all places they
    came from.
    """
    if type(per_layer) is not int or per_layer < 0:
        raise ConfigError(f"merge is {per_layer!r}; expected the number of patches that each layer merges, 0 or more")
    if per_layer == 0:
        return model
    model = unwrap_compiled(model)
    patches = count_mergeable_patches(model)
    if per_layer > patches // 2:
        raise ConfigError(
            f"merge is {per_layer} of the {patches} patches of an image; expected at most {patches // 2}: "
            "a layer merges at most half of them"
        )
    tensors: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    merging: Any = copy.deepcopy(model, tensors)  # tensors in deepcopy's memo are not copied
    merging.blocks = nn.ModuleList([MergingBlocks(list(merging.blocks), per_layer, merging.prefix)])
    merging.levels = (replace(merging.levels[0], blocks=("blocks.0",)),)
    merging.takes_mask = False
    return merging


def count_mergeable_patches(model: nn.Module) -> int:
    """The number of patches of a model that supports merging; an error for other models."""
    blocks = list_plain_blocks(model, MergingBlocks, "merge", SUPPORTED_MODELS_HINT)
    assert isinstance(model, ImageModel)
    if model.no_dropping_reason:
        positions = "several" if blocks[0].attn.positions is None else "none"
        raise ConfigError(f"{model.no_dropping_reason}, and a merged token has {positions}; {SUPPORTED_MODELS_HINT}")
    return model.grid[0] * model.grid[1]


class MergingBlocks(nn.Module):
    """All blocks of an encoder, with tokens merged between attention and MLP: (B, N, D) → (B, N, D).

    A merged token is returned in all places it came from, so that pooling over all tokens weighs it by its size. With
    `queries`, the last block computes and returns only the first `queries` tokens.
    """

    def __init__(self, blocks: list[Block], per_layer: int, prefix: int) -> None:
        super().__init__()
        self.blocks, self.per_layer, self.prefix = nn.ModuleList(blocks), per_layer, prefix

    def forward(
        self,
        x: Tensor,
        grid: Grid | None = None,  # noqa: ARG002
        queries: int | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        assert mask is None, "merged tokens have no places in a mask"
        sizes = places = None  # not attributes, since threads may share a model
        blocks: list[Any] = list(self.blocks)
        for layer, block in enumerate(blocks, start=1):
            block_queries = queries if layer == len(blocks) else None
            x, keys = attend_by_size(block, x, sizes, block_queries)
            patches = keys.shape[2] - self.prefix
            merges = min(self.per_layer, patches // 2)
            if merges and block_queries is None:
                order, into = match_patches(keys.mean(1), self.prefix)
                if queries is None:
                    steps = indices_after_merge(order, into, merges, self.prefix, patches)
                    places = steps if places is None else steps.gather(1, places)
                x, sizes = merge_matched_patches(x, sizes, order, into, merges, self.prefix)
            x = x + block.drop_path(block.ls2(block.mlp(block.norm2(x))))
        return (
            x if places is None else torch.cat([x[:, : self.prefix], gather_tokens(x[:, self.prefix :], places)], dim=1)
        )


def attend_by_size(block: Any, x: Tensor, sizes: Tensor | None, queries: int | None) -> tuple[Tensor, Tensor]:
    """The attention of a block, where a token of size s counts as s equal tokens; and its keys: (B, H, N, K)."""
    attn: SelfAttention = block.attn
    mask = None  # s·exp(score) = exp(score + log s)
    if sizes is not None:  # one row per query: ONNX Runtime's attention does not broadcast
        mask = sizes.log().transpose(1, 2)[:, None].expand(-1, -1, x.shape[1] if queries is None else queries, -1)
    q, k, v, mask = attn.project(block.norm1(x), mask=mask, queries=queries)
    y = attn.proj(merge_heads(attention(q, k, v, mask, attn.dropout if attn.training else 0.0)))
    return x[:, :queries] + block.drop_path(block.ls1(block.drop(y))), k


def split_even_odd(x: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Patches at even and at odd positions among all tokens: (B, N, …) → (B, a, …), (B, b, …), a + b = n."""
    return x[:, prefix + prefix % 2 :: 2], x[:, prefix | 1 :: 2]


def match_patches(keys: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Bipartite soft matching: the even patches, most similar ones first, and the most similar odd patch of each.

    (B, N, K) → (B, a), (B, a): indices into the result of `split_even_odd`; similarity is the cosine of the keys.
    """
    even, odd = split_even_odd(F.normalize(keys, dim=-1), prefix)
    similarity, into = (even @ odd.transpose(-2, -1)).max(-1)
    return similarity.argsort(-1, descending=True), into


def merge_matched_patches(
    x: Tensor, sizes: Tensor | None, order: Tensor, into: Tensor, merges: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """Merge the first even patches in `order` into odd ones, weighted by size: (B, N, D) → (B, N−R, D), (B, N−R, 1).

    The result has the prefix, the remaining even patches in their order, then the odd patches.
    """
    sizes = x.new_ones(*x.shape[:2], 1) if sizes is None else sizes
    merged, left = order[:, :merges], order[:, merges:].sort(-1).values
    (even, odd), (even_sizes, odd_sizes) = split_even_odd(x, prefix), split_even_odd(sizes, prefix)
    merged_sizes = gather_tokens(even_sizes, merged)
    targets = torch.arange(odd.shape[1], device=x.device)[:, None]
    takes = (into.gather(1, merged)[:, None] == targets).to(x.dtype)  # (B, b, R): a scatter adds in random order
    total = odd_sizes + takes @ merged_sizes
    mean = (odd * odd_sizes + takes @ (gather_tokens(even, merged) * merged_sizes)) / total
    x = torch.cat([x[:, :prefix], gather_tokens(even, left), mean], dim=1)
    return x, torch.cat([sizes[:, :prefix], gather_tokens(even_sizes, left), total], dim=1)


def indices_after_merge(order: Tensor, into: Tensor, merges: int, prefix: int, patches: int) -> Tensor:
    """The patch that each patch is part of after `merge_matched_patches`: (B, n), indices from 0 to n−R−1."""
    stays, left = order.argsort(-1) >= merges, order.shape[1] - merges
    to = order.new_empty(order.shape[0], patches)
    to[:, prefix % 2 :: 2] = torch.where(stays, stays.cumsum(-1) - 1, left + into)
    to[:, 1 - prefix % 2 :: 2] = left + torch.arange(patches - order.shape[1], device=order.device)
    return to


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """The tokens of each sample at its indices: (B, N, D), (B, M) → (B, M, D)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
