"""MNIST's format, idx: train-images-idx3-ubyte and its three siblings, also with a dot for the dash, also as .gz."""

import gzip
import zlib
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.array_dataset import ArrayDataset
from vitrail.data.fashion import FASHION_CLASSES as FASHION
from vitrail.errors import DataError, describe_error
from vitrail.files import read_bytes

MAX_FILE_BYTES = 2**30  # bytes, also unpacked
MAX_UNPACK_RATIO, UNPACK_ALLOWANCE = 64, 2**26  # a file unpacks to at most UNPACKED × its size + AND_BYTES
SPLIT_PREFIXES = {"train": ("train",), "val": ("t10k", "test")}
DIMENSIONS_BY_KIND = {"images": 3, "labels": 1}  # and how many dimensions
FASHION_FIRST_LABELS = (9, 0, 0, 3, 0, 2, 7, 2, 5, 5)  # its first labels: the files are called as MNIST's are


def find_idx_files(folder: Path) -> dict[tuple[str, str], Path]:
    """Its files by part and kind; torchvision keeps them in raw/."""
    for place in (folder, folder / "raw"):
        files = {
            (part, kind): file
            for part, words in SPLIT_PREFIXES.items()
            for kind, dimensions in DIMENSIONS_BY_KIND.items()
            for word in words
            for dash in "-."
            for packed in (".gz", "")  # the last found counts
            if (file := place / f"{word}-{kind}{dash}idx{dimensions}-ubyte{packed}").is_file()
        }
        if files:
            return files
    return {}


def read_mnist_folder(folder: Path) -> tuple[ArrayDataset | None, ArrayDataset | None]:
    """Training and validation, what there is of them."""
    files = find_idx_files(folder)
    arrays = dict[str, tuple[NDArray[Any], NDArray[Any], str]]()
    for part in SPLIT_PREFIXES:
        images, labels = files.get((part, "images")), files.get((part, "labels"))
        if images and labels:
            arrays[part] = (read_idx_file(images, 3), read_idx_file(labels, 1), str(images))
        elif images or labels:
            raise DataError(f"{images or labels} has no {'labels' if images else 'images'} beside it; expected both")
    classes = choose_class_names({part: labels for part, (_, labels, _) in arrays.items()}, folder)
    train, val = (
        ArrayDataset(arrays[part][0], arrays[part][1], classes, arrays[part][2]) if part in arrays else None
        for part in SPLIT_PREFIXES
    )
    return train, val


def choose_class_names(labels: dict[str, NDArray[Any]], folder: Path) -> tuple[str, ...]:
    """Fashion-MNIST's names where it is that, else numbers."""
    starts = tuple(labels["train"][: len(FASHION_FIRST_LABELS)].tolist()) if "train" in labels else ()
    if starts == FASHION_FIRST_LABELS or "fashion" in str(folder.resolve()).lower():
        return FASHION
    return tuple(str(number) for number in range(1 + max(int(each.max(initial=0)) for each in labels.values())))


def read_idx_file(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """An idx file of bytes: what it is, the sizes, the values."""
    length = 4 * (1 + dimensions)
    try:
        packed = read_bytes(path, MAX_FILE_BYTES)
        stream = gzip.GzipFile(fileobj=BytesIO(packed)) if path.suffix == ".gz" else BytesIO(packed)
        header = stream.read(length)
        if header[:4] != bytes((0, 0, 8, dimensions)) or len(header) < length:
            raise DataError(
                f"{path} begins with {header[:4].hex(' ') or 'nothing'}; expected 00 00 08 0{dimensions}, idx of bytes"
            )
        shape: list[int] = np.frombuffer(header[4:], ">u4").tolist()
        most = min(
            MAX_UNPACK_RATIO * len(packed) + UNPACK_ALLOWANCE, MAX_FILE_BYTES
        )  # known before anything is unpacked
        values = stream.read(min(prod(shape), most) + 1)  # one more byte makes gzip verify its checksum
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read: {describe_error(error)}; expected an idx file, whole and readable"
        ) from None
    if len(values) > most:
        raise DataError(f"{path} of {len(packed)} bytes would unpack to more than {most}; expected images or labels")
    if len(values) != prod(shape):
        there = "more" if len(values) > prod(shape) else len(values)
        raise DataError(f"{path} has {there} bytes of values; expected {prod(shape)}, as its header says")
    try:
        return np.frombuffer(values, np.uint8).reshape(shape)
    except ValueError as error:  # of no pixels the sides may be more than NumPy counts
        raise DataError(f"{path} has the sizes {shape}: {describe_error(error)}; expected images or labels") from None
