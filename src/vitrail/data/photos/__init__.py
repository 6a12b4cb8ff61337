"""Eight photos in the public domain, for want of others: to see whether two engines say the same of a picture."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.data.crops import DRAWS, resized_box
from vitrail.data.draws import keys, uniforms
from vitrail.data.framed import framed
from vitrail.data.images import open_image
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError

HERE = Path(__file__).parent
AREA, ASPECT = (0.2, 1.0), (3 / 4, 4 / 3)  # of the part of a photo that a view shows


def built_in_photos() -> list[Path]:
    return sorted(HERE.glob("*.jpg"))


def views(count: int, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """So many pictures, no two alike and always the same: (count, rows, columns, channels).

    First each photo whole, then parts of them in turn, about half of them flipped.
    """
    if count < 1:
        raise ConfigError(f"{count} views; expected 1 or more")
    photos = [open_image(path) for path in built_in_photos()]
    draws = uniforms(keys(0, 0, np.arange(count), 0), 1 + DRAWS).tolist()
    seen = list[NDArray[np.uint8]]()
    for number, (flip, *where) in enumerate(draws):
        photo = photos[number % len(photos)]
        if number >= len(photos):
            top, left, rows, columns = resized_box(photo.height, photo.width, AREA, ASPECT, where)
            photo = photo.crop((left, top, left + columns, top + rows))
        pixels = framed(photo, preprocessing)
        seen.append(pixels[:, ::-1] if flip < 0.5 and number >= len(photos) else pixels)
    return np.stack(seen)
