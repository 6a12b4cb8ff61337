"""Attention through all layers: how much of each patch has reached a token (Abnar 2020; Chefer 2021 for one class).

L layers, H heads, N = E + n tokens: E prefix tokens and n = h·w patches. A map is (…, H, Nq, N), and its rows sum to 1.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import ConfigError

Array = NDArray[Any]
HeadFusion = Literal["mean", "max", "min"]
HEAD_FUSIONS: tuple[HeadFusion, ...] = ("mean", "max", "min")


def attention_rollout(
    maps: Sequence[Array], fuse: HeadFusion = "mean", residual: float = 0.5, discard: float = 0.0
) -> Array:
    """Π (½I + ½A) from the last layer to the first: (L, …, H, N, N) → (…, N, N), each row the make-up of one token.

    A is a layer's heads as one, its rows normalised. `residual` is the share that passes by the attention; `discard` is
    the share of each row, its smallest entries, that is taken for noise and set to 0.
    """
    check_rollout_arguments(maps, residual, discard)
    result: Any = np.eye(maps[0].shape[-1], dtype=maps[0].dtype)
    for layer in maps:
        result = residual * result + (1 - residual) * (layer_attention(layer, fuse, discard) @ result)
    return result


def token_rollout(
    token: Array, maps: Sequence[Array], fuse: HeadFusion = "mean", residual: float = 0.5, discard: float = 0.0
) -> Array:
    """The make-up of one token, or of shares of several: token · rollout, and no large products: (…, N) → (…, N)."""
    check_rollout_arguments(maps, residual, discard)
    for layer in reversed(maps):
        token = residual * token + (1 - residual) * multiply_row(token, layer_attention(layer, fuse, discard))
    return token


def gradient_rollout(maps: Sequence[Array], gradients: Sequence[Array]) -> Array:
    """R ← R + E_h[(∇A ⊙ A)⁺]·R from R = I (Chefer 2021, 2103.15679, eq. 5 and 6): (L, …, H, N, N) → (…, N, N).

    The slopes of a class in the probabilities leave of the attention what speaks for this class.
    """
    check_rollout_arguments(maps)
    result: Any = np.eye(maps[0].shape[-1], dtype=maps[0].dtype)
    for layer, slope in zip(maps, gradients, strict=True):
        result = result + gradient_relevance(layer, slope) @ result
    return result


def token_gradient_rollout(token: Array, maps: Sequence[Array], gradients: Sequence[Array]) -> Array:
    """token · (R − I): what of one token speaks for the class, without that it is made of itself: (…, N) → (…, N)."""
    check_rollout_arguments(maps)
    result = token
    for layer, slope in zip(reversed(maps), reversed(gradients), strict=True):
        result = result + multiply_row(result, gradient_relevance(layer, slope))
    return result - token


def patch_map_from_row(row: Array, grid: tuple[int, int]) -> Array:
    """The patches, which come last, of what a token is made of, as a picture that sums to 1: (…, N) → (…, h, w)."""
    patches = row[..., -grid[0] * grid[1] :]
    return normalise_rows(patches).reshape(*patches.shape[:-1], *grid)


def multiply_row(token: Array, attended: Array) -> Array:
    """A row times a matrix: (…, N), (…, N, N) → (…, N)."""
    return (token[..., None, :] @ attended)[..., 0, :]


def layer_attention(layer: Array, fuse: HeadFusion, discard: float) -> Array:
    """The heads of a layer as one, rows that sum to 1: (…, H, Nq, N) → (…, N, N)."""
    return normalise_rows(discard_smallest(fill_missing_queries(fuse_heads(layer, fuse)), discard))


def gradient_relevance(layer: Array, slope: Array) -> Array:
    """E_h[(∇A ⊙ A)⁺], and nothing where a token does not ask: (…, H, Nq, N) → (…, N, N)."""
    found = np.maximum(slope * layer, 0).mean(-3)
    missing = found.shape[-1] - found.shape[-2]
    return np.pad(found, [(0, 0)] * (found.ndim - 2) + [(0, missing), (0, 0)]) if missing else found


def check_rollout_arguments(maps: Sequence[Array], residual: float = 0.0, discard: float = 0.0) -> None:
    if not len(maps):
        raise ConfigError("no attention maps to roll out; expected those of at least one layer")
    for name, value in (("residual", residual), ("discard", discard)):
        if not 0 <= value < 1:
            raise ConfigError(f"{name} is {value}; expected a share from 0 up to, but not, 1")


def fuse_heads(layer: Array, fuse: HeadFusion) -> Array:
    """All heads as one: (…, H, Nq, N) → (…, Nq, N)."""
    if fuse not in HEAD_FUSIONS:
        raise ConfigError(f"heads as {fuse!r}; expected one of {', '.join(HEAD_FUSIONS)}")
    return getattr(np, fuse)(layer, axis=-3)


def fill_missing_queries(attended: Array) -> Array:
    """Where only the first tokens ask, as in class attention, the others stay what they are: (…, Nq, N) → (…, N, N)."""
    queries, tokens = attended.shape[-2:]
    if queries == tokens:
        return attended
    whole = np.broadcast_to(np.eye(tokens, dtype=attended.dtype), (*attended.shape[:-2], tokens, tokens)).copy()
    whole[..., :queries, :] = attended
    return whole


def discard_smallest(attended: Array, share: float) -> Array:
    """The smallest entries of each row set to 0."""
    count = int(share * attended.shape[-1] + 1e-9)  # 0.29 · 100 is 28.999…
    if not count:
        return attended
    smallest = np.argpartition(attended, count - 1, axis=-1)[..., :count]
    kept = attended.copy()
    np.put_along_axis(kept, smallest, 0, axis=-1)
    return kept


def normalise_rows(attended: Array) -> Array:
    """Rows that sum to 1; one that is all 0 stays so."""
    total = attended.sum(-1, keepdims=True)
    return attended / np.where(total > 0, total, 1)
