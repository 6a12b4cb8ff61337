"""Write some of the bundled images as a folder of photos to try things on: `python -m vitrail.data.fashion photos`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from vitrail.base.errors import DataError, VitrailError, describe_error
from vitrail.data.fashion import read_fashion

EXAMPLE_CLASSES = ("Bag", "Dress", "Sandal", "Sneaker")


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


if __name__ == "__main__":
    try:
        if len(sys.argv) != 2:
            raise DataError(f"{len(sys.argv) - 1} arguments; expected one: python -m vitrail.data.fashion FOLDER")
        write_photos(Path(sys.argv[1]))
    except VitrailError as error:
        sys.exit(f"vitrail.data.fashion: {error}")
    sys.stdout.write(f"{sys.argv[1]}: 400 images for training, 100 for validation; {', '.join(EXAMPLE_CLASSES)}\n")
