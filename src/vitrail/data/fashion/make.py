"""Makes the two sheets again from Fashion-MNIST's own files: `python -m vitrail.data.fashion.make FOLDER`."""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data import idx
from vitrail.data.fashion import CLASSES, COLUMNS, HERE, SIDE
from vitrail.errors import DataError


def make(source: Path, target: Path, train: int = 600, test: int = 100) -> None:
    """Writes train.png and test.png with so many pictures of each class, the first in the order of the files."""
    for part, pictures, each in zip(("train", "test"), idx.read(source), (train, test), strict=True):
        if pictures is None or min(np.bincount(pictures.labels, minlength=len(CLASSES))) < each:
            raise DataError(f"{source} has too few {part} pictures; expected idx files with {each} of each class")
        chosen = [pictures.images[pictures.labels == label][:each, ..., 0] for label in range(len(CLASSES))]
        Image.fromarray(sheet(np.concatenate(chosen), min(each, COLUMNS))).save(target / f"{part}.png", optimize=True)


def sheet(pictures: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    panes = pictures.reshape(-1, columns, SIDE, SIDE).swapaxes(1, 2)  # (rows, 28, columns, 28)
    return panes.reshape(-1, columns * SIDE)


if __name__ == "__main__":
    make(Path(sys.argv[1]), HERE)
