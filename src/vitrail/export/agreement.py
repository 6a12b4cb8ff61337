"""Compare the outputs of two engines, on crops of the example photos if there are no others. Needs no torch."""

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError
from vitrail.data.images.decoding.crops import UNIFORMS_PER_BOX, random_resized_crop_box
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.photos import list_example_photos
from vitrail.data.rng import make_view_keys, uniform_randoms

MIN_COSINE = 0.95  # of features that agree; ViT-Ti and DeiT-Ti in int8 reach 0.99, all their tokens 0.97
NOT_FINITE_MESSAGE = "the model returns NaN; expected finite weights: load them again, or in float32"


def count_agreeing_images(found: NDArray[np.float32], expected: NDArray[np.float32], output: str) -> int:
    """Count the images with the same top class, or with features of a cosine of at least MIN_COSINE: (B, …), (B, …)."""
    if output == "logits":
        return int((found.argmax(-1) == expected.argmax(-1)).sum())
    a, b = found.reshape(len(found), -1), expected.reshape(len(expected), -1)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return int(((a * b).sum(1) >= MIN_COSINE * lengths).sum())


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
