"""The bundled data set: a balanced sample of Fashion-MNIST, 6,000 images for training and 1,000 for validation.

The first 600 training images and the first 100 test images of each class, lossless, on two sheets with the ten classes
one below the other. Fashion-MNIST is by Zalando; its license is next to the sheets.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.base.errors import DataError, describe_error
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.decoding.rgb_image import open_undecoded_file

FASHION_FOLDER = Path(__file__).parent
IMAGE_SIDE = 28  # pixels
IMAGES_PER_ROW = 100  # of a sheet
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
EXAMPLE_CLASSES = ("Bag", "Dress", "Sandal", "Sneaker")  # of `write_photos`


def read_fashion(folder: Path = FASHION_FOLDER) -> tuple[ArrayDataset, ArrayDataset]:
    """Training and validation images; classes alternate, so that the first images cover all of them."""
    train, val = (read_sheet(folder / f"{part}.png") for part in ("train", "test"))
    return interleave_classes(train, "fashion (train)"), interleave_classes(val, "fashion (val)")


def read_sheet(sheet: Path) -> NDArray[np.uint8]:
    """The images on a sheet: (classes, images, 28, 28)."""
    pixels = np.asarray(open_undecoded_file(sheet))
    rows, columns = pixels.shape[0] // IMAGE_SIDE, pixels.shape[1] // IMAGE_SIDE
    images = pixels.reshape(rows, IMAGE_SIDE, columns, IMAGE_SIDE).swapaxes(1, 2)
    return images.reshape(len(FASHION_CLASSES), -1, IMAGE_SIDE, IMAGE_SIDE)


def interleave_classes(images: NDArray[np.uint8], name: str) -> ArrayDataset:
    images = np.ascontiguousarray(images.swapaxes(0, 1)).reshape(-1, IMAGE_SIDE, IMAGE_SIDE)
    return ArrayDataset(images, np.arange(len(images)) % len(FASHION_CLASSES), FASHION_CLASSES, name)


def write_photos(folder: Path, classes: Sequence[str] = EXAMPLE_CLASSES, *, train: int = 100, val: int = 25) -> None:
    """Write folder/train/CLASS/*.png and folder/val/CLASS/*.png, the first `train` and `val` images of each class."""
    if folder.exists():
        raise DataError(f"{folder} exists; expected the name of a new folder")
    for part, images, count in zip(("train", "val"), read_fashion(), (train, val), strict=True):
        for name in classes:
            place = folder / part / name
            try:
                place.mkdir(parents=True)
                for number in range(count):
                    index = number * len(images.classes) + images.classes.index(name)  # classes alternate
                    Image.fromarray(images.source(index).squeeze()).save(place / f"{number:03}.png")
            except OSError as error:
                raise DataError(f"{place} cannot be written: {describe_error(error)}") from None
