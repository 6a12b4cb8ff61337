"""Counter-based random numbers: each is a function of its purpose, so order, workers and ranks change nothing."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

# constants of splitmix64 (Steele, Lea and Flood, 2014)
SPLITMIX_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
SPLITMIX_MULTIPLIER_1, SPLITMIX_MULTIPLIER_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

# numbers for different purposes are independent
VIEW_PURPOSE, ORDER_PURPOSE, ERASING_PURPOSE, COLOR_PURPOSE, MASKING_PURPOSE, TOKEN_PURPOSE, COLLAGE_PURPOSE = range(7)


def make_view_keys(seed: int, epochs: ArrayLike, indices: ArrayLike, replicas: ArrayLike) -> NDArray[np.uint64]:
    """One key per view of an image; integers and integer arrays are broadcast, to at least one axis."""
    state = splitmix64_hash(np.array([seed % 2**64], np.uint64))
    for part in (epochs, indices, replicas):
        state = splitmix64_hash(state ^ np.asarray(part).astype(np.uint64))
    return state


def uniform_randoms(keys: NDArray[np.uint64], count: int, purpose: int = VIEW_PURPOSE) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) per key, different for every purpose: (keys, count)."""
    start = splitmix64_hash(keys ^ np.uint64(purpose))
    bits = splitmix64_hash(start[:, None] + np.arange(count, dtype=np.uint64) * SPLITMIX_INCREMENT)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53  # the 53 bits of a float's fraction


def splitmix64_hash(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64, a bijection. Arrays only: numpy warns when scalars overflow."""
    values = values + SPLITMIX_INCREMENT
    values = (values ^ (values >> np.uint64(30))) * SPLITMIX_MULTIPLIER_1
    values = (values ^ (values >> np.uint64(27))) * SPLITMIX_MULTIPLIER_2
    return values ^ (values >> np.uint64(31))
