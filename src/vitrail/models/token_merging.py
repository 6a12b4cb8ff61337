"""Token merging (Bolya 2022, arXiv 2210.09461): in every layer the patches most alike become one, without training.

B batch, E prefix tokens, n patches, N = E + n tokens, R merges in a layer, D width, H heads, K width of a head's keys.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.layers.attention import SelfAttention, attention, merge_heads
from vitrail.layers.block import Block
from vitrail.layers.positions import Grid

SUPPORTED_MODELS_HINT = (
    "expected a ViT, DeiT, hybrid or T2T-ViT that adds its positions once, before the first block; or merge 0"
)


def add_token_merging(model: nn.Module, per_layer: int) -> nn.Module:
    """A copy that shares the model's weights and merges so many patches in every layer; of 0 the model itself.

    It answers as the model would, a little less exactly and sooner; all that reads its tokens finds them in their
    places, those that were merged alike.
    """
    if type(per_layer) is not int or per_layer < 0:
        raise ConfigError(f"merge is {per_layer!r}; expected how many patches each layer merges, a whole number from 0")
    if per_layer == 0:
        return model
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    patches = count_mergeable_patches(model)
    if per_layer > patches // 2:
        raise ConfigError(
            f"merge is {per_layer} of the {patches} patches of a picture; expected at most {patches // 2}: "
            "a layer merges no more than every second"
        )
    tensors: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin: Any = copy.deepcopy(model, tensors)  # what stands in deepcopy's memo is not copied
    twin.blocks = nn.ModuleList([MergingBlocks(list(twin.blocks), per_layer, twin.prefix)])
    return twin


def count_mergeable_patches(model: Any) -> int:
    """Of a model whose patches may be merged; another is refused."""
    kind, held = type(model).__name__, getattr(model, "blocks", None)
    blocks: list[Any] = list(held) if isinstance(held, nn.ModuleList) else []
    if not blocks or not all(hasattr(model, name) for name in ("config", "prefix", "grid")):
        raise ConfigError(f"{kind} has no blocks of tokens to merge; {SUPPORTED_MODELS_HINT}")
    if isinstance(blocks[0], MergingBlocks):
        raise ConfigError(f"this {kind} merges its tokens already; expected the model it was made of")
    if any(type(block) is not Block or type(block.attn) is not SelfAttention for block in blocks):
        raise ConfigError(
            f"{kind} has blocks of its own kind, which know nothing of merged tokens; {SUPPORTED_MODELS_HINT}"
        )
    if any(block.attn.positions is not None for block in blocks):
        where = f"positions {getattr(model.config, 'positions', 'inside the attention')!r}"
        raise ConfigError(
            f"{where} place every token in a grid, and a merged one has no place in it; {SUPPORTED_MODELS_HINT}"
        )
    if getattr(model.config, "positions_at", "stem") != "stem":
        where = f"positions_at {model.config.positions_at!r}"
        raise ConfigError(
            f"{where} adds a row to every token again, and a merged one has several; {SUPPORTED_MODELS_HINT}"
        )
    return model.grid[0] * model.grid[1]


class MergingBlocks(nn.Module):
    """All blocks of an encoder in one, tokens merged between attention and MLP: (B, N, D) → (B, N, D).

    What was merged stands, alike, in all the places it came from, so that any pool over all tokens weighs it by its
    size; with `queries` only the first so many tokens come out, and the last block computes no others.
    """

    def __init__(self, blocks: list[Block], per_layer: int, prefix: int) -> None:
        super().__init__()
        self.blocks, self.per_layer, self.prefix = nn.ModuleList(blocks), per_layer, prefix

    def forward(self, x: Tensor, grid: Grid | None = None, queries: int | None = None) -> Tensor:  # noqa: ARG002
        sizes = places = None  # here and not on self: threads may share a model
        blocks: list[Any] = list(self.blocks)
        for layer, block in enumerate(blocks, start=1):
            asking = queries if layer == len(blocks) else None
            x, keys = attend_by_size(block, x, sizes, asking)
            patches = keys.shape[2] - self.prefix
            merges = min(self.per_layer, patches // 2)
            if merges and asking is None:
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
    """The first half of a block, a token of size s asked as s alike would be; and its keys: (B, H, N, K)."""
    attn: SelfAttention = block.attn
    mask = None  # s·exp(score) = exp(score + log s)
    if sizes is not None:  # a row for each query: ONNX Runtime's attention repeats none
        mask = sizes.log().transpose(1, 2)[:, None].expand(-1, -1, x.shape[1] if queries is None else queries, -1)
    q, k, v, mask = attn.project(block.norm1(x), mask=mask, queries=queries)
    y = attn.proj(merge_heads(attention(q, k, v, mask, attn.dropout if attn.training else 0.0)))
    return x[:, :queries] + block.drop_path(block.ls1(block.drop(y))), k


def split_even_odd(x: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Patches at even and at odd places among all tokens: (B, N, …) → (B, a, …), (B, b, …), a + b = n."""
    return x[:, prefix + prefix % 2 :: 2], x[:, prefix | 1 :: 2]


def match_patches(keys: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Bipartite soft matching: the even patches, most like an odd one first; and which odd one each is most like.

    (B, N, K) → (B, a), (B, a): indices into what `halves` gives; likeness is the cosine of the keys.
    """
    even, odd = split_even_odd(F.normalize(keys, dim=-1), prefix)
    likeness, into = (even @ odd.transpose(-2, -1)).max(-1)
    return likeness.argsort(-1, descending=True), into


def merge_matched_patches(
    x: Tensor, sizes: Tensor | None, order: Tensor, into: Tensor, merges: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """The first even patches of the order into their odd ones, as means by size: (B, N, D) → (B, N−R, D), (B, N−R, 1).

    Tokens come out as prefix, even patches that are left in their order, odd patches.
    """
    sizes = x.new_ones(*x.shape[:2], 1) if sizes is None else sizes
    moved, left = order[:, :merges], order[:, merges:].sort(-1).values
    (even, odd), (even_sizes, odd_sizes) = split_even_odd(x, prefix), split_even_odd(sizes, prefix)
    given = gather_tokens(even_sizes, moved)
    targets = torch.arange(odd.shape[1], device=x.device)[:, None]
    takes = (into.gather(1, moved)[:, None] == targets).to(x.dtype)  # (B, b, R): a scatter would add in any order
    total = odd_sizes + takes @ given
    mean = (odd * odd_sizes + takes @ (gather_tokens(even, moved) * given)) / total
    x = torch.cat([x[:, :prefix], gather_tokens(even, left), mean], dim=1)
    return x, torch.cat([sizes[:, :prefix], gather_tokens(even_sizes, left), total], dim=1)


def indices_after_merge(order: Tensor, into: Tensor, merges: int, prefix: int, patches: int) -> Tensor:
    """The patch that each patch is part of after `merge`: (B, n), indices from 0 to n−R−1."""
    stays, left = order.argsort(-1) >= merges, order.shape[1] - merges
    to = order.new_empty(order.shape[0], patches)
    to[:, prefix % 2 :: 2] = torch.where(stays, stays.cumsum(-1) - 1, left + into)
    to[:, 1 - prefix % 2 :: 2] = left + torch.arange(patches - order.shape[1], device=order.device)
    return to


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """The tokens of each sample at its indices: (B, N, D), (B, M) → (B, M, D)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
