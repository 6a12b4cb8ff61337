"""Attention through all layers: how much of each patch has reached a token (Abnar 2020; Chefer 2021 for one class).

L layers, H heads, N = E + n tokens: E prefix tokens and n = h·w patches. A map is (…, H, Nq, N), and its rows sum to 1.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import ConfigError

Array = NDArray[Any]
Fuse = Literal["mean", "max", "min"]
FUSES: tuple[Fuse, ...] = ("mean", "max", "min")


def rollout(maps: Sequence[Array], fuse: Fuse = "mean", residual: float = 0.5, discard: float = 0.0) -> Array:
    """Π (½I + ½A) from the last layer to the first: (L, …, H, N, N) → (…, N, N), each row the make-up of one token.

    A is a layer's heads as one, its rows normalised. `residual` is the share that passes by the attention; `discard` is
    the share of each row, its smallest entries, that is taken for noise and set to 0.
    """
    for name, value in (("residual", residual), ("discard", discard)):
        if not 0 <= value < 1:
            raise ConfigError(f"{name} is {value}; expected a share from 0 up to, but not, 1")
    result: Array | None = None
    for layer in maps:
        attended = normalised(without_smallest(square(fused(layer, fuse)), discard))
        mixed = residual * np.eye(attended.shape[-1], dtype=attended.dtype) + (1 - residual) * attended
        result = mixed if result is None else mixed @ result
    if result is None:
        raise ConfigError("no attention maps to roll out; expected those of at least one layer")
    return result


def gradient_rollout(maps: Sequence[Array], gradients: Sequence[Array]) -> Array:
    """R ← R + E_h[(∇A ⊙ A)⁺]·R from R = I (Chefer 2021, 2103.15679, eq. 5 and 6): (L, …, H, N, N) → (…, N, N).

    The slopes of a class in the probabilities leave of the attention what speaks for this class.
    """
    result: Array | None = None
    for layer, slope in zip(maps, gradients, strict=True):
        relevant = np.maximum(slope * layer, 0).mean(-3)
        relevant = np.pad(
            relevant, [(0, 0)] * (relevant.ndim - 2) + [(0, relevant.shape[-1] - relevant.shape[-2]), (0, 0)]
        )
        before = np.eye(relevant.shape[-1], dtype=relevant.dtype) if result is None else result
        result = before + relevant @ before
    if result is None:
        raise ConfigError("no attention maps to roll out; expected those of at least one layer")
    return result


def from_token(made_of: Array, token: Array, grid: tuple[int, int]) -> Array:
    """What a token is made of, as a picture that sums to 1: (…, N, N), shares of tokens (…, N) → (…, h, w)."""
    row = (token[..., None, :] @ made_of)[..., 0, -grid[0] * grid[1] :]
    return normalised(row).reshape(*row.shape[:-1], *grid)


def fused(layer: Array, fuse: Fuse) -> Array:
    """All heads as one: (…, H, Nq, N) → (…, Nq, N)."""
    if fuse not in FUSES:
        raise ConfigError(f"heads as {fuse!r}; expected one of {', '.join(FUSES)}")
    return getattr(np, fuse)(layer, axis=-3)


def square(attended: Array) -> Array:
    """Where only the first tokens ask, as in class attention, the others stay what they are: (…, Nq, N) → (…, N, N)."""
    queries, tokens = attended.shape[-2:]
    if queries == tokens:
        return attended
    whole = np.broadcast_to(np.eye(tokens, dtype=attended.dtype), (*attended.shape[:-2], tokens, tokens)).copy()
    whole[..., :queries, :] = attended
    return whole


def without_smallest(attended: Array, share: float) -> Array:
    """The smallest entries of each row set to 0."""
    count = int(share * attended.shape[-1] + 1e-9)  # 0.29 · 100 is 28.999…
    if not count:
        return attended
    smallest = np.argpartition(attended, count - 1, axis=-1)[..., :count]
    kept = attended.copy()
    np.put_along_axis(kept, smallest, 0, axis=-1)
    return kept


def normalised(attended: Array) -> Array:
    """Rows that sum to 1; one that is all 0 stays so."""
    total = attended.sum(-1, keepdims=True)
    return attended / np.where(total > 0, total, 1)
