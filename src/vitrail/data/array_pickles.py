"""Pickles of arrays of bytes and plain containers, read without running anything: what else they ask for is refused."""

import pickle
import pickletools
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import DataError, VitrailError, one_line


def read_pickle(data: bytes, path: Path) -> Any:
    """What is in the pickle; if that is a dictionary, its values may be arrays of bytes."""
    try:
        check_sizes(data)
        read = Unpickler(BytesIO(data), path).load()
    except VitrailError:
        raise
    except Exception as error:  # on broken bytes pickle raises anything
        raise DataError(f"{path} cannot be read: {one_line(error)}; expected a pickle, whole and readable") from None
    if isinstance(read, dict):
        return {key: value.values if isinstance(value, Array) else value for key, value in read.items()}
    return read


def check_sizes(data: bytes) -> None:
    """Refuses sizes that are larger than the file, for which pickle would take gigabytes before it looks."""
    for operation, argument, _ in pickletools.genops(data):  # which itself misses what a string says it has
        if operation.name.endswith("PUT") and isinstance(argument, int) and argument > len(data):
            raise ValueError(f"number {argument} of what is remembered")


class Unpickler(pickle.Unpickler):
    """Knows the few names that numpy's arrays are pickled with, each a stand-in of ours."""

    def __init__(self, file: BytesIO, path: Path) -> None:
        super().__init__(file, encoding="bytes")
        self.path = path

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        stand_in = STAND_INS.get((module_name.replace("numpy._core", "numpy.core"), global_name))
        if stand_in is None:
            wanted = f"{module_name}.{global_name}"
            raise DataError(f"{self.path} is a pickle that wants to run {wanted}; refused: expected arrays only")
        return stand_in


class DType:
    """Stands for numpy.dtype, of which only that of bytes is known."""

    def __init__(self, code: Any, *_: Any) -> None:
        if code not in ("u1", b"u1"):
            raise ValueError(f"an array of {code!r}, not of bytes")

    def __setstate__(self, state: Any) -> None:
        """Bytes have no order."""


class Array:
    """Stands for numpy.ndarray: made empty, then told its values."""

    values: NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, _, columns_first, values = state
        self.values = np.frombuffer(values, np.uint8).reshape(shape, order="F" if columns_first else "C")


def reconstruct(*_: Any) -> Array:
    return Array()


def from_buffer(values: Any, kind: DType, shape: Any, order: str) -> Array:
    array = Array()
    array.__setstate__((1, shape, kind, order == "F", values))
    return array


def encode(text: str, _: Any) -> bytes:
    """How Python 3 writes bytes for Python 2; another codec would do something."""
    return text.encode("latin1")


STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): reconstruct,
    ("numpy.core.numeric", "_frombuffer"): from_buffer,
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): DType,
    ("_codecs", "encode"): encode,
}
