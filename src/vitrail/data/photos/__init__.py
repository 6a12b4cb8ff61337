"""Eight photos in the public domain, for want of others: to see whether two engines say the same of a picture."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.data.decoding.crops import UNIFORMS_PER_BOX, random_resized_crop_box
from vitrail.data.decoding.model_input import decode_for_model
from vitrail.data.decoding.rgb_image import open_image
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.rng import make_view_keys, uniform_randoms
from vitrail.errors import ConfigError

PHOTO_FOLDER = Path(__file__).parent
CROP_AREA, CROP_ASPECT = (0.2, 1.0), (3 / 4, 4 / 3)  # of the part of a photo that a view shows


def built_in_photos() -> list[Path]:
    return sorted(PHOTO_FOLDER.glob("*.jpg"))


def make_photo_views(count: int, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """So many pictures, no two alike and always the same: (count, rows, columns, channels).

    First each photo whole, then parts of them in turn, about half of them flipped.
    """
    if count < 1:
        raise ConfigError(f"{count} views; expected 1 or more")
    photos = [open_image(path) for path in built_in_photos()]
    draws = uniform_randoms(make_view_keys(0, 0, np.arange(count), 0), 1 + UNIFORMS_PER_BOX).tolist()
    seen = list[NDArray[np.uint8]]()
    for number, (flip, *where) in enumerate(draws):
        photo = photos[number % len(photos)]
        if number >= len(photos):
            top, left, rows, columns = random_resized_crop_box(photo.height, photo.width, CROP_AREA, CROP_ASPECT, where)
            photo = photo.crop((left, top, left + columns, top + rows))
        pixels = decode_for_model(photo, preprocessing)
        seen.append(pixels[:, ::-1] if flip < 0.5 and number >= len(photos) else pixels)
    return np.stack(seen)
