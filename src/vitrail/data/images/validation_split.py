"""Hold out images for validation by a hash of their names and a seed."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError


def check_val_share(share: Any) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"val_share is {repr(share)[:40]}; expected the share held out for validation, from 0 to 1")


def choose_validation_mask(
    names: Sequence[str], labels: NDArray[np.int64], *, seed: int, share: float
) -> NDArray[np.bool_]:
    """True for validation images: the given share of each class, those with the lowest hashes.

    Unless the share is 0 or 1, a class of two images is split one to one, and a single image is used for training. A
    hash depends only on the seed and one name, so adding an image moves at most one other.
    """
    held_out = np.full(len(names), share == 1)
    if 0 < share < 1:
        hashes = np.fromiter((hash_name(name, seed) for name in names), np.uint64, len(names))
        order = np.lexsort((hashes, labels))  # by class, then by hash
        _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            held_out[order[start : start + held_out_count(count, share)]] = True
    return held_out


def held_out_count(count: int, share: float) -> int:
    return min(max(int(count * share + 0.5), 1), count - 1)


def hash_name(name: str, seed: int) -> int:
    """Hash seed and name, the same on every machine; NFC, since file systems store accents differently."""
    text = f"{seed}/{normalize('NFC', name)}".encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
