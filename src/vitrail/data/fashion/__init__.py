"""The embedded data set: 6,000 and 1,000 pictures of Fashion-MNIST, as many of each class.

The first 600 of each class among its training pictures and the first 100 among its test pictures, lossless, on two
sheets of ten classes one below the other. Fashion-MNIST is Zalando's: its licence lies beside them.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.data.array_dataset import ArrayDataset
from vitrail.data.decoding.image_formats import DEFAULT_LIMITS, open_undecoded, read_image_file

FASHION_FOLDER = Path(__file__).parent
IMAGE_SIDE = 28  # pixels
IMAGES_PER_ROW = 100  # pictures in a row of a sheet
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


def read_fashion(folder: Path = FASHION_FOLDER) -> tuple[ArrayDataset, ArrayDataset]:
    """Training and validation; the classes take turns, so that the first pictures are of all of them."""
    train, val = (read_sheet(folder / f"{part}.png") for part in ("train", "test"))
    return interleave_classes(train, "fashion's training pictures"), interleave_classes(
        val, "fashion's validation pictures"
    )


def read_sheet(sheet: Path) -> NDArray[np.uint8]:
    """The pictures on a sheet, (classes, pictures, 28, 28)."""
    where = str(sheet)
    pixels = np.asarray(open_undecoded(read_image_file(sheet, where, DEFAULT_LIMITS), where, DEFAULT_LIMITS))
    rows, columns = pixels.shape[0] // IMAGE_SIDE, pixels.shape[1] // IMAGE_SIDE
    panes = pixels.reshape(rows, IMAGE_SIDE, columns, IMAGE_SIDE).swapaxes(1, 2)
    return panes.reshape(len(FASHION_CLASSES), -1, IMAGE_SIDE, IMAGE_SIDE)


def interleave_classes(pictures: NDArray[np.uint8], name: str) -> ArrayDataset:
    in_turn = np.ascontiguousarray(pictures.swapaxes(0, 1)).reshape(-1, IMAGE_SIDE, IMAGE_SIDE)
    return ArrayDataset(in_turn, np.arange(len(in_turn)) % len(FASHION_CLASSES), FASHION_CLASSES, name)
