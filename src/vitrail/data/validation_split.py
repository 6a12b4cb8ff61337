"""Which pictures are held out for validation where a data set does not say: by their names and a seed."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import ConfigError


def check_val_share(share: Any) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"val_share is {repr(share)[:40]}; expected the share held out for validation, from 0 to 1")


def choose_validation_mask(
    names: Sequence[str], labels: NDArray[np.int64], *, seed: int, share: float
) -> NDArray[np.bool_]:
    """True for the pictures of validation: of each class its share, those whose hashes are lowest.

    A class of two has one on either side, a class of one is for training; unless the share is 0 or 1, which is all or
    nothing. A hash is of the seed and one name alone, so a picture that is added moves at most one other.
    """
    held = np.full(len(names), share == 1)
    if 0 < share < 1:
        hashes = np.fromiter((hash_name(name, seed) for name in names), np.uint64, len(names))
        order = np.lexsort((hashes, labels))  # class by class, and in a class from the lowest
        _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            held[order[start : start + held_out_count(count, share)]] = True
    return held


def held_out_count(count: int, share: float) -> int:
    return min(max(int(count * share + 0.5), 1), count - 1)


def hash_name(name: str, seed: int) -> int:
    """The same on every machine: of the name as it reads, whichever way its accents are stored."""
    read = f"{seed}/{normalize('NFC', name)}".encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(read, digest_size=8).digest(), "little")
