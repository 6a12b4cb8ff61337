"""Attention rollout: the contribution of each patch to a token through all layers (Abnar 2020; by class: Chefer 2021).

L layers, H heads, N = E + n tokens: E prefix tokens and n = h·w patches. A map is (…, H, Nq, N); its rows sum to 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError

Array = NDArray[Any]
HeadFusion = Literal["mean", "max", "min"]
HEAD_FUSIONS: tuple[HeadFusion, ...] = ("mean", "max", "min")


@dataclass(frozen=True, eq=False)  # comparing arrays is ambiguous
class Merger:
    """What merges all patches into M tokens between two layers; layers after it have maps of these tokens."""

    before: int  # the first layer after it
    weights: Array  # of each patch in each merged token; rows sum to 1: (…, M, n)


def attention_rollout(
    maps: Sequence[Array], fuse: HeadFusion = "mean", residual: float = 0.5, discard: float = 0.0
) -> Array:
    """Π (½I + ½A) from the last layer to the first: (L, …, H, N, N) → (…, N, N).

    Each row holds the contributions of all tokens to one. A is a layer's attention with fused heads and normalized
    rows; `residual` is the weight of I. `discard` is the share of the smallest entries of each row, set to 0 as noise.
    """
    check_rollout_arguments(maps, residual, discard)
    result: Any = np.eye(maps[0].shape[-1], dtype=maps[0].dtype)
    for layer in maps:
        result = residual * result + (1 - residual) * (fuse_and_normalize_layer(layer, fuse, discard) @ result)
    return result


def token_rollout(
    token: Array,
    maps: Sequence[Array],
    fuse: HeadFusion = "mean",
    residual: float = 0.5,
    discard: float = 0.0,
    merger: Merger | None = None,
) -> Array:
    """token · rollout for a row vector of token weights, without matrix-matrix products: (…, N) → (…, N).

    A merger is a factor of its own, without I: merged tokens have no residual connection to patches.
    """
    check_rollout_arguments(maps, residual, discard)
    for number, layer in reversed(list(enumerate(maps))):
        token = residual * token + (1 - residual) * multiply_row(token, fuse_and_normalize_layer(layer, fuse, discard))
        token = unmerge_row(token, number, merger)
    return token


def gradient_rollout(maps: Sequence[Array], gradients: Sequence[Array]) -> Array:
    """R ← R + E_h[(∇A ⊙ A)⁺]·R from R = I (Chefer 2021, 2103.15679, eq. 5 and 6): (L, …, H, N, N) → (…, N, N).

    The gradients of a class keep the part of the attention that supports this class.
    """
    check_rollout_arguments(maps)
    result: Any = np.eye(maps[0].shape[-1], dtype=maps[0].dtype)
    for layer, gradient in zip(maps, gradients, strict=True):
        result = result + gradient_relevance(layer, gradient) @ result
    return result


def token_gradient_rollout(
    token: Array, maps: Sequence[Array], gradients: Sequence[Array], merger: Merger | None = None
) -> Array:
    """token · (R − I): relevance of all tokens for the class, without the identity: (…, N) → (…, N).

    With a merger, merged tokens have the relevance of their patches, R ← W·R, and W takes the place of the identity.
    """
    check_rollout_arguments(maps)
    result = token
    for number, (layer, gradient) in reversed(list(enumerate(zip(maps, gradients, strict=True)))):
        result = result + multiply_row(result, gradient_relevance(layer, gradient))
        result, token = unmerge_row(result, number, merger), unmerge_row(token, number, merger)
    return result - token


def unmerge_row(token: Array, layer: int, merger: Merger | None) -> Array:
    """The row of the patches if the merger comes right before this layer: (…, M) → (…, n)."""
    return token if merger is None or layer != merger.before else multiply_row(token, merger.weights)


def patch_map_from_row(row: Array, grid: tuple[int, int]) -> Array:
    """The patches of a row, which come last, as a map that sums to 1: (…, N) → (…, h, w)."""
    patches = row[..., -grid[0] * grid[1] :]
    return normalize_rows(patches).reshape(*patches.shape[:-1], *grid)


def multiply_row(token: Array, attended: Array) -> Array:
    """Row vector times matrix: (…, N), (…, N, N) → (…, N)."""
    return (token[..., None, :] @ attended)[..., 0, :]


def fuse_and_normalize_layer(layer: Array, fuse: HeadFusion, discard: float) -> Array:
    """Attention of a layer with fused heads and rows that sum to 1: (…, H, Nq, N) → (…, N, N)."""
    return normalize_rows(discard_smallest(fill_missing_queries(fuse_heads(layer, fuse)), discard))


def gradient_relevance(layer: Array, gradient: Array) -> Array:
    """E_h[(∇A ⊙ A)⁺], with zeros for tokens that are not queries: (…, H, Nq, N) → (…, N, N)."""
    relevance = np.maximum(gradient * layer, 0).mean(-3)
    missing = relevance.shape[-1] - relevance.shape[-2]
    return np.pad(relevance, [(0, 0)] * (relevance.ndim - 2) + [(0, missing), (0, 0)]) if missing else relevance


def check_rollout_arguments(maps: Sequence[Array], residual: float = 0.0, discard: float = 0.0) -> None:
    if not len(maps):
        raise ConfigError("there are no attention maps; expected those of at least one layer")
    for name, value in (("residual", residual), ("discard", discard)):
        if not 0 <= value < 1:
            raise ConfigError(f"{name} is {value}; expected 0 or more, and less than 1")


def fuse_heads(layer: Array, fuse: HeadFusion) -> Array:
    """Fuse all heads into one map: (…, H, Nq, N) → (…, Nq, N)."""
    if fuse not in HEAD_FUSIONS:
        raise ConfigError(f"fuse is {fuse!r}; expected one of {', '.join(HEAD_FUSIONS)}")
    return {"mean": np.mean, "max": np.max, "min": np.min}[fuse](layer, axis=-3)


def fill_missing_queries(attended: Array) -> Array:
    """Add identity rows for tokens that are not queries, as in class attention: (…, Nq, N) → (…, N, N)."""
    queries, tokens = attended.shape[-2:]
    if queries >= tokens:
        return attended
    square = np.broadcast_to(np.eye(tokens, dtype=attended.dtype), (*attended.shape[:-2], tokens, tokens)).copy()
    square[..., :queries, :] = attended
    return square


def discard_smallest(attended: Array, share: float) -> Array:
    """Set the smallest entries of each row to 0."""
    count = int(share * attended.shape[-1] + 1e-9)  # 0.29 · 100 is 28.999…
    if not count:
        return attended
    smallest = np.argpartition(attended, count - 1, axis=-1)[..., :count]
    kept = attended.copy()
    np.put_along_axis(kept, smallest, 0, axis=-1)
    return kept


def normalize_rows(attended: Array) -> Array:
    """Divide rows by their sums; rows of zeros stay 0."""
    total = attended.sum(-1, keepdims=True)
    return attended / np.where(total > 0, total, 1)
