"""The embedded data set: 6,000 and 1,000 pictures of Fashion-MNIST, as many of each class.

The first 600 of each class among its training pictures and the first 100 among its test pictures, lossless, on two
sheets of ten classes one below the other. Fashion-MNIST is Zalando's: its licence lies beside them.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.data.arrays import Arrays
from vitrail.data.image_formats import DEFAULT, open_undecoded, read_image_file

HERE = Path(__file__).parent
SIDE = 28  # pixels
COLUMNS = 100  # pictures in a row of a sheet
CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


def read(folder: Path = HERE) -> tuple[Arrays, Arrays]:
    """Training and validation; the classes take turns, so that the first pictures are of all of them."""
    train, val = (cut(folder / f"{part}.png") for part in ("train", "test"))
    return labelled(train, "fashion's training pictures"), labelled(val, "fashion's validation pictures")


def cut(sheet: Path) -> NDArray[np.uint8]:
    """The pictures on a sheet, (classes, pictures, 28, 28)."""
    where = str(sheet)
    pixels = np.asarray(open_undecoded(read_image_file(sheet, where, DEFAULT), where, DEFAULT))
    rows, columns = pixels.shape[0] // SIDE, pixels.shape[1] // SIDE
    panes = pixels.reshape(rows, SIDE, columns, SIDE).swapaxes(1, 2)
    return panes.reshape(len(CLASSES), -1, SIDE, SIDE)


def labelled(pictures: NDArray[np.uint8], name: str) -> Arrays:
    in_turn = np.ascontiguousarray(pictures.swapaxes(0, 1)).reshape(-1, SIDE, SIDE)
    return Arrays(in_turn, np.arange(len(in_turn)) % len(CLASSES), CLASSES, name)
