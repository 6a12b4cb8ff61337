"""Hold out images or sentence pairs for validation by a hash of their names or texts and a seed."""

from collections.abc import Callable, Sequence
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


def check_held_out_share(share: Any) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 0.5:
        raise ConfigError(
            f"`val_share` is {repr(share)[:40]}; expected the share of pairs held out for validation, from 0 to 0.5"
        )


def choose_held_out_pairs(
    sources: Sequence[str], targets: Sequence[str], *, seed: int, share: float, key: Callable[[str], str] = str
) -> list[bool]:
    """True for validation pairs: at most the given share, and at least one pair if that is possible.

    Pairs that share a sentence, as compared by `key`, are in one group, which is never divided. Groups are taken in
    the order of their hashes as long as they fit. The choice is the same in both directions, and in any order.
    """
    groups = group_by_sentences([key(each) for each in sources], [key(each) for each in targets])
    sizes, hashes = dict[int, int](), dict[int, int]()
    for group, pair in zip(groups, zip(sources, targets, strict=True), strict=True):
        value = hash_name("\t".join(sorted(pair)), seed)
        sizes[group] = sizes.get(group, 0) + 1
        hashes[group] = min(hashes.get(group, value), value)
    room = min(max(round(len(sources) * share), 1), len(sources) // 2) if share else 0
    chosen = set[int]()
    for group in sorted(sizes, key=lambda each: (hashes[each], sizes[each])):
        if sizes[group] <= room:
            chosen.add(group)
            room -= sizes[group]
    return [group in chosen for group in groups]


def group_by_sentences(sources: Sequence[str], targets: Sequence[str]) -> list[int]:
    """A number per pair, the same for pairs that are linked by equal sentences of any language (union-find)."""
    parents = list[int]()

    def find_root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]  # shortens the path for the next search
            node = parents[node]
        return node

    nodes = {text: node for node, text in enumerate(dict.fromkeys((*sources, *targets)))}
    parents.extend(range(len(nodes)))
    for source, target in zip(sources, targets, strict=True):
        one, other = find_root(nodes[source]), find_root(nodes[target])
        parents[max(one, other)] = min(one, other)
    return [find_root(nodes[source]) for source in sources]
