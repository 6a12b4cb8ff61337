"""Eight photos in the public domain, opened by name wherever an image is expected: example:cat."""

import os
from pathlib import Path

from vitrail.base.errors import DataError, find_nearest_name

PHOTO_FOLDER = Path(__file__).parent
EXAMPLE_PREFIX = "example:"
MIN_NAME_SIMILARITY = 0.85  # of a photo that is suggested; the prefix is the same in all names


def list_example_photos() -> list[Path]:
    return sorted(PHOTO_FOLDER.glob("*.jpg"))


def locate_example_photo(source: str | Path) -> str | Path:
    """The file of example:NAME; any other path, or an existing file of that name, is returned as it is."""
    name = str(source)
    if not name.startswith(EXAMPLE_PREFIX) or os.path.lexists(name):
        return source
    photos = {EXAMPLE_PREFIX + path.stem: path for path in list_example_photos()}
    if name not in photos:
        nearest = find_nearest_name(name, photos, MIN_NAME_SIMILARITY)
        hint = f"did you mean {nearest!r}?" if nearest else f"expected one of {', '.join(photos)}"
        raise DataError(f"{name!r} is not an example photo; {hint}")
    return photos[name]
