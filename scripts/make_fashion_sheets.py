"""Make the two sheets from the files of Fashion-MNIST: `python scripts/make_fashion_sheets.py FOLDER`."""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.base.errors import DataError
from vitrail.data.fashion import FASHION_CLASSES, FASHION_FOLDER, IMAGE_SIDE, IMAGES_PER_ROW
from vitrail.data.images.formats import mnist_idx


def make_sheets(source: Path, target: Path, train: int = 600, test: int = 100) -> None:
    """Write train.png and test.png with the first `train` and `test` images of each class."""
    for part, dataset, count in zip(("train", "test"), mnist_idx.read_mnist_folder(source), (train, test), strict=True):
        if dataset is None or min(np.bincount(dataset.labels, minlength=len(FASHION_CLASSES))) < count:
            raise DataError(f"{source} has too few {part} images; expected idx files with {count} per class")
        chosen = [dataset.images[dataset.labels == label][:count, ..., 0] for label in range(len(FASHION_CLASSES))]
        sheet = tile_images(np.concatenate(chosen), min(count, IMAGES_PER_ROW))
        Image.fromarray(sheet).save(target / f"{part}.png", optimize=True)


def tile_images(images: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    rows = images.reshape(-1, columns, IMAGE_SIDE, IMAGE_SIDE).swapaxes(1, 2)  # (rows, 28, columns, 28)
    return rows.reshape(-1, columns * IMAGE_SIDE)


if __name__ == "__main__":
    make_sheets(Path(sys.argv[1]), FASHION_FOLDER)
