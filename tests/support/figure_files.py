"""Read what an explorer returns."""

import json
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import load


def read_figures(answer: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What the arrays show, and the arrays by name."""
    length = int.from_bytes(answer[:8], "little")
    about = json.loads(json.loads(answer[8 : 8 + length])["__metadata__"]["explanation"])
    return about, load(answer)
