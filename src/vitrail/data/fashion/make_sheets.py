"""Makes the two sheets again from Fashion-MNIST's own files: `python -m vitrail.data.fashion.make_sheets FOLDER`."""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.fashion import FASHION_CLASSES, FASHION_FOLDER, IMAGE_SIDE, IMAGES_PER_ROW
from vitrail.data.formats import mnist_idx
from vitrail.errors import DataError


def make_sheets(source: Path, target: Path, train: int = 600, test: int = 100) -> None:
    """Writes train.png and test.png with so many pictures of each class, the first in the order of the files."""
    for part, pictures, each in zip(("train", "test"), mnist_idx.read_mnist_folder(source), (train, test), strict=True):
        if pictures is None or min(np.bincount(pictures.labels, minlength=len(FASHION_CLASSES))) < each:
            raise DataError(f"{source} has too few {part} pictures; expected idx files with {each} of each class")
        chosen = [pictures.images[pictures.labels == label][:each, ..., 0] for label in range(len(FASHION_CLASSES))]
        Image.fromarray(tile_images(np.concatenate(chosen), min(each, IMAGES_PER_ROW))).save(
            target / f"{part}.png", optimize=True
        )


def tile_images(pictures: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    panes = pictures.reshape(-1, columns, IMAGE_SIDE, IMAGE_SIDE).swapaxes(1, 2)  # (rows, 28, columns, 28)
    return panes.reshape(-1, columns * IMAGE_SIDE)


if __name__ == "__main__":
    make_sheets(Path(sys.argv[1]), FASHION_FOLDER)
