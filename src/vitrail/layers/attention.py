"""Attention: every query attends to all keys and takes a weighted mean of their values (Vaswani 2017).

B batch, N tokens (Nq queries, Nx keys), D width, H heads, K and V the widths of one head's keys and values.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.base.machine import find_bfloat16_instructions
from vitrail.layers.positions import Grid, RelativePositions, RotaryPositions

Mask = Tensor | None  # of booleans, True for keys that are kept, or added to the scores
Projected = tuple[Tensor, Tensor, Tensor, Mask]  # q, k, v and the mask joined with the positions' bias


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q·kᵀ/√K)·v, eq. 1, by the fastest kernel: (B, H, Nq, K), (B, H, Nx, K), (B, H, Nx, V) → (B, H, Nq, V).

    A boolean mask keeps what is True, any other is added to the scores; both broadcast to (B, H, Nq, Nx). `causal` is
    for as many queries as keys, without another mask; `scale` replaces 1/√K.
    """
    if choose_products(q, k, v):
        mask = causal_mask(q.shape[-2], k.shape[-2], q.device) if causal else mask
        return attend_by_products(q, k, v, mask, dropout, scale)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q·kᵀ/√K), the probabilities that `attention` multiplies v by: (B, H, Nq, Nx), each row sums to 1."""
    return masked_softmax(q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1), mask)


def masked_softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Probabilities of scores (…, Nx) under a boolean or additive mask: each row sums to 1."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blind = scores.isneginf().all(-1, keepdim=True)  # a query whose keys are all masked: 0, not 0/0
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Causal mask (Nq, Nx): no key later than its query; if Nq < Nx, queries are the last tokens, as in decoding."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def join_masks(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Combine two masks, each boolean or additive."""
    if a is None or b is None:
        return b if a is None else a
    if a.dtype == torch.bool:
        return a & b if b.dtype == torch.bool else b.masked_fill(~a, -math.inf)
    return a.masked_fill(~b, -math.inf) if b.dtype == torch.bool else a + b


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, N, H·K) → (B, H, N, K)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, N, V) → (B, N, H·V)."""
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Queries from one sequence, keys and values from another: (B, Nq, D), (B, Nx, Dx) → (B, Nq, Dout).

    All widths may differ; `key_width` and `value_width` are of all heads together. `inputs` defaults to x.
    """

    no_shares_reason: ClassVar[str] = ""  # why the weights of a query do not sum to 1; empty if they do

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        input_width: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        out_width: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.widths = (key_width or width, value_width or width)
        self.q = nn.Linear(width, self.widths[0], bias=bias)
        self.kv = nn.Linear(input_width or width, sum(self.widths), bias=bias)
        self.proj = nn.Linear(self.widths[1], out_width or width)

    def project(self, x: Tensor, inputs: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.kv(x if inputs is None else inputs).split(self.widths, dim=-1)
        return split_heads(self.q(x), self.heads), split_heads(k, self.heads), split_heads(v, self.heads)

    def forward(self, x: Tensor, inputs: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x, inputs)
        return self.proj(merge_heads(attention(q, k, v, mask, self.dropout if self.training else 0.0)))

    def weights(self, x: Tensor, inputs: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The attention probabilities that `forward` multiplies the values by: (B, H, Nq, Nx)."""
        return attention_weights(*self.project(x, inputs)[:2], mask)


class AttentionLayer(nn.Module):
    """What attention within one sequence shares, (B, N, D) → (B, N, D): a kind of it writes `project`."""

    no_shares_reason: ClassVar[str] = ""  # why the weights of a query do not sum to 1; empty if they do
    heads: int
    dropout: float
    proj: nn.Module  # maps the outputs of all heads, (B, N, H·V)

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        """q, k, v and the mask joined with the positions' bias; with `queries`, only for the first `queries` tokens."""
        raise NotImplementedError

    def forward(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Tensor:
        return self.proj(merge_heads(self.attend(*self.project(x, grid, mask, queries))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """The weighted means of the values, from the output of `project`: (B, H, Nq, V)."""
        return attention(q, k, v, mask, self.dropout if self.training else 0.0)

    def weights(self, x: Tensor, grid: Grid | None = None, mask: Tensor | None = None) -> Tensor:
        """The attention probabilities of `forward` if every token is a query: (B, H, N, N)."""
        q, k, _, mask = self.project(x, grid, mask)
        return self.weigh(q, k, mask)

    def weigh(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """The same from the output of `project`; other kinds of attention override this: (B, H, Nq, N)."""
        return attention_weights(q, k, mask)


class SelfAttention(AttentionLayer):
    """Multi-head self-attention, q, k and v from one matrix: (B, N, D) → (B, N, D).

    `positions` inside the attention place the tokens of a grid: relative ones bias the scores, rotary ones rotate q, k.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        positions: RelativePositions | RotaryPositions | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.positions = heads, dropout, positions
        self.qkv = nn.Linear(width, 3 * width, bias=bias)  # rows: all of q, then k, then v; in each head after head
        self.proj = nn.Linear(width, width)

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        if queries is None:
            qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (3, B, H, N, K)
            q, k, v = qkv.unbind()
        else:
            shares = (x.shape[-1], 2 * x.shape[-1])
            (q_weight, kv_weight), bias = self.qkv.weight.split(shares), self.qkv.bias
            q_bias, kv_bias = (None, None) if bias is None else bias.split(shares)
            q = split_heads(F.linear(x[:, :queries], q_weight, q_bias), self.heads)
            k, v = F.linear(x, kv_weight, kv_bias).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        if self.positions is not None:
            if grid is None or grid[0] * grid[1] > x.shape[1]:
                raise ConfigError(f"grid {grid} for {x.shape[1]} tokens; expected (rows, columns) of no more tokens")
            q, k, by_offset = self.positions(q, k, grid)
            mask = join_masks(mask, by_offset)
        return q, k, v, mask


# On a CPU with bfloat16 instructions two products take half as long as in float32, but the fused kernel does not gain
# from bfloat16: at 197 to 2049 tokens they take 0.40 to 0.45 of its time forward, 0.30 to 0.52 with the backward pass.
PIECE = 2**22  # scores computed at once, of one head or more: they should stay in the cache
MOST = 2**27  # scores of a call that may be kept for the backward pass: 256 MB; the fused kernel keeps none


def choose_products(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether two products and a softmax are faster than the fused kernel: only in bfloat16, on some CPUs."""
    if q.device.type != "cpu" or torch.compiler.is_exporting():
        return False
    autocast = torch.is_autocast_enabled("cpu") and q.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cpu") if autocast else q.dtype
    if dtype != torch.bfloat16 or q.shape[:-2] != k.shape[:-2] or q.shape[:-1].numel() * k.shape[-2] > MOST:
        return False
    backward = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return read_instructions() not in ("", "" if backward else "amx_bf16")  # the fused forward pass uses AMX well


def read_instructions() -> str:
    return find_bfloat16_instructions()


# as `torch.compiler.assume_constant_result` does, which imports the compiler and so takes more than a second
vars(read_instructions)["_dynamo_marked_constant"] = True


def attend_by_products(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """softmax(q·kᵀ·scale)·v as two products and a softmax, in pieces of the batch and heads; the scores are kept."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if len(q) == 1 and q.ndim > 3:  # its heads are divided
        mask = mask[0] if mask is not None and mask.ndim == q.ndim else mask
        return attend_by_products(q[0], k[0], v[0], mask, dropout, scale)[None]
    rows = max(1, PIECE // max(1, q.shape[1:-1].numel() * k.shape[-2]))  # of the batch
    if rows >= len(q):
        return attend_in_one_piece(q, k, v, mask, dropout, scale)
    masks = [mask] * len(q) if mask is None or mask.ndim < q.ndim or len(mask) == 1 else mask.split(rows)
    parts = zip(q.split(rows), k.split(rows), v.split(rows), masks, strict=False)  # as many as of q
    return torch.cat([attend_by_products(*part, dropout, scale) for part in parts])


def attend_in_one_piece(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float) -> Tensor:
    nothing = q.new_empty(())  # beta 0: only the scale is used, within the product
    scores = torch.baddbmm(nothing, q.flatten(0, -3), k.flatten(0, -3).transpose(1, 2), beta=0, alpha=scale)
    scores = scores.view(*q.shape[:-1], k.shape[-2])
    if mask is None:
        return F.dropout(scores.softmax(-1), dropout) @ v
    least = torch.finfo(scores.dtype).min  # not −∞: a query whose keys are all masked has finite gradients
    if mask.dtype == torch.bool:
        blind = ~mask.any(-1, keepdim=True)
        scores = scores.masked_fill_(~mask, least)
    else:
        blind = mask.isneginf().all(-1, keepdim=True)
        scores = scores.add_(mask.clamp(min=least))
    return (F.dropout(scores.softmax(-1), dropout) @ v).masked_fill(blind, 0.0)
