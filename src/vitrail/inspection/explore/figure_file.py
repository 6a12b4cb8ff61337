"""The figures of one photo or sentence as a safetensors file, which the page and numpy read."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from vitrail.base.errors import ConfigError


def pack_figures(about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays by name, and what they show as JSON in the metadata `explanation`."""
    made = {name: np.ascontiguousarray(each) for name, each in arrays.items()}
    return save(made, {"explanation": json.dumps(about, ensure_ascii=False, allow_nan=False)})


def scale_rows_to_bytes(maps: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Each row in 255 steps of its maximum, and the maxima: (…, N, N) → (…, N, N), (…, N)."""
    scale = maps.max(-1)
    shares = maps / np.where(scale > 0, scale, 1)[..., None]
    return np.rint(255 * shares).astype(np.uint8), scale.astype(np.float32)


def read_number(query: Mapping[str, str], name: str, count: int) -> int:
    """A layer or a class of a request; a ConfigError if there is none of this number."""
    given = query.get(name, "")
    if not given.isdecimal() or len(given) > 9 or int(given) >= count:
        raise ConfigError(f"{name} is {given[:20]!r}; expected 0 to {count - 1}")
    return int(given)
