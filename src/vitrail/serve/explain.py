"""The figures of an explorer, a safetensors file, as JSON for clients that draw nothing."""

import json
from math import prod
from typing import Any

import numpy as np

DTYPES = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8", "U8": "u1"}
MAX_VALUES = 10_000  # of an array; longer ones are in the file only


def describe_explanation(answer: bytes) -> dict[str, Any]:
    """The explanation and its small arrays, and the shapes of all."""
    length = int.from_bytes(answer[:8], "little")
    header, values = json.loads(answer[8 : 8 + length]), answer[8 + length :]
    metadata = header.pop("__metadata__", {})
    found: dict[str, Any] = json.loads(metadata.get("explanation", "{}"))
    arrays = dict[str, Any]()
    for name, about in header.items():
        start, end = about["data_offsets"]
        array = np.frombuffer(values[start:end], DTYPES[about["dtype"]]).reshape(about["shape"])
        if prod(array.shape) <= MAX_VALUES and np.isfinite(array).all():
            arrays[name] = array.astype(float).round(6).tolist()
    shapes = {name: about["shape"] for name, about in header.items()}
    return {**found, "arrays": arrays, "shapes": shapes}
