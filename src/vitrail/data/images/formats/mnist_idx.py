"""MNIST's idx format: train-images-idx3-ubyte and three more files, also named with a dot, also as .gz."""

import gzip
import zlib
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import DataError, describe_error
from vitrail.base.files import read_bytes
from vitrail.data.fashion import FASHION_CLASSES as FASHION
from vitrail.data.images.array_dataset import ArrayDataset

MAX_FILE_BYTES = 2**30  # compressed or not
MAX_UNPACK_RATIO, UNPACK_ALLOWANCE = 64, 2**26  # a file unpacks to at most RATIO × its size + ALLOWANCE
SPLIT_PREFIXES = {"train": ("train",), "val": ("t10k", "test")}
DIMENSIONS_BY_KIND = {"images": 3, "labels": 1}
FASHION_FIRST_LABELS = (9, 0, 0, 3, 0, 2, 7, 2, 5, 5)  # tell it from MNIST, whose file names are the same


def find_idx_files(folder: Path) -> dict[tuple[str, str], Path]:
    """Paths by (split, kind); torchvision keeps the files in raw/."""
    for parent in (folder, folder / "raw"):
        files = {
            (split, kind): file
            for split, prefixes in SPLIT_PREFIXES.items()
            for kind, dimensions in DIMENSIONS_BY_KIND.items()
            for prefix in prefixes
            for dash in "-."
            for suffix in (".gz", "")  # the last match is used
            if (file := parent / f"{prefix}-{kind}{dash}idx{dimensions}-ubyte{suffix}").is_file()
        }
        if files:
            return files
    return {}


def read_mnist_folder(folder: Path) -> tuple[ArrayDataset | None, ArrayDataset | None]:
    """Training and validation images, None for those without files."""
    files = find_idx_files(folder)
    arrays = dict[str, tuple[NDArray[Any], NDArray[Any], str]]()
    for split in SPLIT_PREFIXES:
        images, labels = files.get((split, "images")), files.get((split, "labels"))
        if images and labels:
            arrays[split] = (read_idx_file(images, 3), read_idx_file(labels, 1), str(images))
        elif images or labels:
            raise DataError(f"{images or labels} has no {'labels' if images else 'images'} next to it; expected both")
    classes = choose_class_names({split: labels for split, (_, labels, _) in arrays.items()}, folder)
    train, val = (
        ArrayDataset(arrays[split][0], arrays[split][1], classes, arrays[split][2]) if split in arrays else None
        for split in SPLIT_PREFIXES
    )
    return train, val


def choose_class_names(labels: dict[str, NDArray[Any]], folder: Path) -> tuple[str, ...]:
    """The class names of Fashion-MNIST if it is recognized, else numbers."""
    first_labels = tuple(labels["train"][: len(FASHION_FIRST_LABELS)].tolist()) if "train" in labels else ()
    if first_labels == FASHION_FIRST_LABELS or "fashion" in str(folder.resolve()).lower():
        return FASHION
    return tuple(str(number) for number in range(1 + max(int(each.max(initial=0)) for each in labels.values())))


def read_idx_file(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of bytes: magic number, sizes, values."""
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
        max_bytes = min(MAX_UNPACK_RATIO * len(packed) + UNPACK_ALLOWANCE, MAX_FILE_BYTES)
        values = stream.read(min(prod(shape), max_bytes) + 1)  # one more byte makes gzip verify its checksum
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read: {describe_error(error)}; expected a complete and readable idx file"
        ) from None
    if len(values) > max_bytes:
        raise DataError(
            f"{path} of {len(packed)} bytes would unpack to more than {max_bytes}; expected images or labels"
        )
    if len(values) != prod(shape):
        count = "more" if len(values) > prod(shape) else len(values)
        raise DataError(f"{path} has {count} bytes of values; expected {prod(shape)}, according to its header")
    try:
        return np.frombuffer(values, np.uint8).reshape(shape)
    except ValueError as error:  # with a side of 0, the others may exceed NumPy's limit
        raise DataError(f"{path} has the sizes {shape}: {describe_error(error)}; expected images or labels") from None
