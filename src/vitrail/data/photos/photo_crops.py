"""Any number of different crops of the example photos, to check that two engines agree."""

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError
from vitrail.data.images.decoding.crops import UNIFORMS_PER_BOX, random_resized_crop_box
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.photos import list_example_photos
from vitrail.data.rng import make_view_keys, uniform_randoms

CROP_AREA, CROP_ASPECT = (0.2, 1.0), (3 / 4, 4 / 3)  # of a crop, relative to its photo


def make_photo_crops(count: int, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """`count` different images, the same in every call: (count, rows, columns, channels).

    First the uncropped photos, then crops of them in turn, about half of them flipped.
    """
    if count < 1:
        raise ConfigError(f"{count} views; expected 1 or more")
    photos = [open_image(path) for path in list_example_photos()]
    draws = uniform_randoms(make_view_keys(0, 0, np.arange(count), 0), 1 + UNIFORMS_PER_BOX).tolist()
    views = list[NDArray[np.uint8]]()
    for number, (flip, *box_draws) in enumerate(draws):
        photo = photos[number % len(photos)]
        if number >= len(photos):
            top, left, rows, columns = random_resized_crop_box(
                photo.height, photo.width, CROP_AREA, CROP_ASPECT, box_draws
            )
            photo = photo.crop((left, top, left + columns, top + rows))
        pixels = decode_for_model(photo, preprocessing)
        views.append(pixels[:, ::-1] if flip < 0.5 and number >= len(photos) else pixels)
    return np.stack(views)
