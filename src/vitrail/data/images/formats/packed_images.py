"""Images in arrays on disk: SVHN's .mat files and STL-10's binary files."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import DataError, describe_error
from vitrail.base.files import read_bytes
from vitrail.base.text import format_count
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.formats.matlab import read_matlab_arrays

Splits = tuple[ArrayDataset | None, ArrayDataset | None, list[str]]  # training, validation, notes
DIGITS = tuple("0123456789")
SVHN_FILES = {"train": "train_32x32.mat", "val": "test_32x32.mat"}
STL_FILES = {"train": ("train_X.bin", "train_y.bin"), "val": ("test_X.bin", "test_y.bin")}
STL_CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
STL_SIDE = 96
MAX_FILE_BYTES = 2**30


def is_svhn(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SVHN_FILES.values())


def read_svhn(folder: Path) -> Splits:
    """The label 10 is the digit 0; the number of the image is the last axis."""
    parts, notes = dict[str, ArrayDataset](), ["digits change when they are flipped: leave out horizontal flips"]
    for split, name in SVHN_FILES.items():
        path = folder / name
        if not path.is_file():
            notes.append(f"{path} is missing")
            continue
        found = read_matlab_arrays(path, ("X", "y"))
        images, labels = found["X"], found["y"].ravel()
        if images.ndim == 3:  # MATLAB drops the last axis of a single image
            images = images[..., None]
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3:
            raise DataError(
                f"{path} has images {images.dtype} {images.shape}; expected bytes (rows, columns, 3, images)"
            )
        if len(labels) and not 1 <= labels.min() <= labels.max() <= 10:
            raise DataError(f"{path} has labels from {labels.min():g} to {labels.max():g}; expected 1 to 10")
        ordered = np.ascontiguousarray(images.transpose(3, 0, 1, 2))
        parts[split] = ArrayDataset(ordered, labels.astype(np.int64) % 10, DIGITS, str(path))
    return parts.get("train"), parts.get("val"), notes


def is_stl10(folder: Path) -> bool:
    return any((folder / images).is_file() for images, _ in STL_FILES.values())


def read_stl10(folder: Path) -> Splits:
    """The unlabeled images are not used."""
    parts, notes = dict[str, ArrayDataset](), list[str]()
    for split, (images_name, labels_name) in STL_FILES.items():
        if not (folder / images_name).is_file():
            notes.append(f"{folder / images_name} is missing")
            continue
        images, labels = read_stl_images(folder / images_name), read_stl_bytes(folder / labels_name)
        if len(labels) and not 1 <= labels.min() <= labels.max() <= len(STL_CLASSES):
            raise DataError(f"{folder / labels_name} has labels outside 1 to {len(STL_CLASSES)}")
        parts[split] = ArrayDataset(images, labels.astype(np.int64) - 1, STL_CLASSES, str(folder / images_name))
    if "train" in parts:
        notes.append(
            f"trained on all {format_count(len(parts['train']), 'labeled image')}; the official protocol is the mean "
            "of ten folds of 1,000"
        )
    return parts.get("train"), parts.get("val"), notes


def read_stl_images(path: Path) -> NDArray[np.uint8]:
    """Each channel is stored column by column."""
    data = read_stl_bytes(path)
    if not len(data) or len(data) % (3 * STL_SIDE**2):
        raise DataError(f"{path} has {len(data):,} bytes; expected a multiple of {3 * STL_SIDE**2}: is it truncated?")
    return np.ascontiguousarray(data.reshape(-1, 3, STL_SIDE, STL_SIDE).transpose(0, 3, 2, 1))


def read_stl_bytes(path: Path) -> NDArray[np.uint8]:
    try:
        return np.frombuffer(read_bytes(path, MAX_FILE_BYTES), np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {describe_error(error)}; expected the published file") from None
