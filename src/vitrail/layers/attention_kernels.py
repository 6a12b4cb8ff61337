"""The kernels of attention, and which one to use: torch's fused one, or two products and a softmax.

On a CPU with bfloat16 instructions the products take half as long as in float32, but torch's fused kernel does not gain
from bfloat16: at 197 to 2049 tokens they take 0.40 to 0.45 of its time forward, 0.30 to 0.52 with the backward pass.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.machine import find_bfloat16_instructions

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
