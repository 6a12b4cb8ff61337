"""Random numbers by counting: each is a function of what it is for, so that order, workers and ranks change nothing."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

SPLITMIX_INCREMENT = np.uint64(
    0x9E3779B97F4A7C15
)  # of splitmix64 (Steele, Lea and Flood, 2014), with its two multipliers
SPLITMIX_MULTIPLIER_1, SPLITMIX_MULTIPLIER_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

VIEW_PURPOSE, ORDER_PURPOSE, ERASING_PURPOSE = range(
    3
)  # what a number is drawn for: no two of them may follow from one another


def make_view_keys(seed: int, epochs: ArrayLike, indices: ArrayLike, replicas: ArrayLike) -> NDArray[np.uint64]:
    """One key for each view of a picture; numbers and arrays of whole numbers are broadcast, to one axis at least."""
    state = splitmix64_hash(np.array([seed % 2**64], np.uint64))
    for part in (epochs, indices, replicas):
        state = splitmix64_hash(state ^ np.asarray(part).astype(np.uint64))
    return state


def uniform_randoms(keys: NDArray[np.uint64], count: int, purpose: int = VIEW_PURPOSE) -> NDArray[np.float64]:
    """`count` numbers from 0 to less than 1 for each key, (keys, count); others for every purpose."""
    start = splitmix64_hash(keys ^ np.uint64(purpose))
    bits = splitmix64_hash(start[:, None] + np.arange(count, dtype=np.uint64) * SPLITMIX_INCREMENT)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53  # the 53 bits of a float's fraction


def splitmix64_hash(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's output function, one to one: neighbours become unrelated. Arrays only: numpy lets them wrap."""
    values = values + SPLITMIX_INCREMENT
    values = (values ^ (values >> np.uint64(30))) * SPLITMIX_MULTIPLIER_1
    values = (values ^ (values >> np.uint64(27))) * SPLITMIX_MULTIPLIER_2
    return values ^ (values >> np.uint64(31))
